"""The tokenizer of InternLM2, which its repositories bring as Python code: built from its data, no code is run.

``tokenizer.model`` is a SentencePiece model of byte pairs, a protocol buffer of which a few fields matter:
the pieces with their scores, and how blanks are treated. Names of special tokens, BOS and the chat template
stand in ``tokenizer_config.json``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_json
from prb_jax.errors import CheckpointError

CLASSES = ("InternLM2Tokenizer", "InternLM2TokenizerFast")
CONFIG, MODEL = "tokenizer_config.json", "tokenizer.model"

_BLANK = "▁"
# Fields of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_CHARSMAP, _DUMMY_PREFIX, _FEWER_BLANKS = 2, 3, 4
_NORMAL, _USER_DEFINED = 1, 4
_NULL = "\0"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_internlm2(folder: Path) -> bool:
    """Whether a folder's tokenizer is InternLM2's, in its own files and no ``tokenizer.json``."""
    if (folder / "tokenizer.json").exists() or not (folder / MODEL).is_file():
        return False
    return _read_config(folder).get("tokenizer_class") in CLASSES


def build_internlm2(folder: Path) -> Any:
    """The tokenizer of such a folder, as one of transformers.

    Raises:
      CheckpointError: a file that is broken, or does not hold what InternLM2's does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    path, config = folder / MODEL, _read_config(folder)
    try:
        pieces, normalizer = _read_model(path.read_bytes())
    except (OSError, IndexError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path}: cannot be read as a SentencePiece model of byte pairs: {error}"
        ) from error
    if normalizer.get(_CHARSMAP):
        raise CheckpointError(f"{path}: normalises characters, which InternLM2's does not: not its tokenizer")
    if normalizer.get(_FEWER_BLANKS, 1):
        raise CheckpointError(f"{path}: removes blanks, which InternLM2's does not: not its tokenizer")
    # SentencePiece does not use a piece that is the null character, but the byte of that value.
    names = ["<unused null>" if text == _NULL else text for text, _, _ in pieces]
    added = {}
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        added[int(number)] = token["content"]
        if int(number) >= len(names):
            raise CheckpointError(
                f"{folder / CONFIG}: token {number} is beyond the {len(names)} pieces of {MODEL}"
            )
        names[int(number)] = token["content"]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(pieces, vocabulary),
            unk_token=config.get("unk_token", "<unk>"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks: list[Any] = [normalizers.Replace(" ", _BLANK)]
    if normalizer.get(_DUMMY_PREFIX, 1):
        blanks.insert(0, normalizers.Prepend(_BLANK))
    backend.normalizer = normalizers.Sequence(blanks)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    whole = [text for text, _, kind in pieces if kind == _USER_DEFINED and text in vocabulary]
    backend.add_tokens([AddedToken(text, normalized=False) for text in whole])
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for _, name in sorted(added.items())]
    )
    if config.get("add_bos_token", True):
        bos = config["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    roles = {role: config[role] for role in _ROLES if config.get(role) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=config.get("chat_template"), **roles
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / CONFIG, error=CheckpointError, optional=True)
    return config if isinstance(config, dict) else {}


def _merges(pieces: list[tuple[str, float, int]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs of pieces that form a piece, the piece of the highest score first."""
    found: list[tuple[float, int, int, str, str]] = []
    for text, score, kind in pieces:
        if kind != _NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _read_model(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any]]:
    """Pieces (text, score, kind) by id, and the normaliser's fields."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == _PIECES:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(_SCORE, b"\0\0\0\0"))
            pieces.append((piece[_TEXT].decode("utf-8"), score, piece.get(_KIND, _NORMAL)))
        elif field == _TRAINER:
            trainer = dict(_fields(value))
        elif field == _NORMALIZER:
            normalizer = dict(_fields(value))
    if not pieces or trainer.get(_MODEL_TYPE) != _BPE:
        raise ValueError("it holds none")
    return pieces, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer message: int, or bytes."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def take(size: int) -> bytes:
        nonlocal place
        if place + size > len(data):
            raise ValueError("it ends too early")
        place += size
        return data[place - size : place]

    while place < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
        elif wire in (1, 5):
            yield key >> 3, take(8 if wire == 1 else 4)
        elif wire == 2:
            yield key >> 3, take(varint())
        else:
            raise ValueError(f"wire type {wire} is none")
