"""The tokenizer of InternLM2, which its repositories bring as Python code: built from its data, no code is run.

``tokenizer.model`` is a SentencePiece model of byte pairs, a protocol buffer of which a few fields matter:
the pieces with their scores, and how blanks are treated. Names of special tokens, BOS and the chat template
stand in ``tokenizer_config.json``.
"""

from __future__ import annotations

import io
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
    splits = (
        (score, text[:cut], text[cut:])
        for text, score, kind in pieces
        if kind == _NORMAL
        for cut in range(1, len(text))
    )
    known = [(score, a, b) for score, a, b in splits if a in vocabulary and b in vocabulary]
    known.sort(key=lambda pair: (-pair[0], vocabulary[pair[1]], vocabulary[pair[2]]))
    return [(a, b) for _, a, b in known]


def _read_model(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any]]:
    """Pieces (text, score, kind) by id, and the normaliser's fields."""
    pieces: list[tuple[str, float, int]] = []
    sections: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for field, value in _fields(data):
        if field == _PIECES:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(_SCORE, b"\0\0\0\0"))
            pieces.append((piece[_TEXT].decode("utf-8"), score, piece.get(_KIND, _NORMAL)))
        elif field in sections:
            sections[field] = dict(_fields(value))
    if not pieces or sections[_TRAINER].get(_MODEL_TYPE) != _BPE:
        raise ValueError("it holds none")
    return pieces, sections[_NORMALIZER]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer message: int, or bytes."""
    stream = io.BytesIO(data)

    def take(size: int) -> bytes:
        taken = stream.read(size)
        if len(taken) < size:
            raise ValueError("it ends too early")
        return taken

    def varint() -> int:
        value = shift = 0
        while True:
            (byte,) = take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while stream.tell() < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
        elif wire in (1, 2, 5):
            yield key >> 3, take({1: 8, 5: 4}.get(wire) or varint())
        else:
            raise ValueError(f"wire type {wire} is none")
