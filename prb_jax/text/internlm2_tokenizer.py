"""Build the tokenizer of InternLM2 from its data files, instead of running the Python code of its repositories.

``tokenizer.model`` is a SentencePiece BPE model: the pieces with their scores, and the handling of blanks.
``tokenizer_config.json`` contains the special tokens, BOS and the chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError
from prb_jax.records.reading import read_json

CONFIG, MODEL = "tokenizer_config.json", "tokenizer.model"

_BLANK = "▁"
_NULL = "\0"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def build_internlm2(folder: Path) -> Any:
    """Return the tokenizer of an InternLM2 folder as a transformers tokenizer.

    Raises:
      CheckpointError: A file is broken, or differs from the format of InternLM2.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import import_protobuf

    path, config = folder / MODEL, read_json(folder / CONFIG, error=CheckpointError)
    messages: Any = import_protobuf()
    model = messages.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
        # SentencePiece ignores a piece that is the null character and uses the byte piece of this value.
        names = ["<unused null>" if piece.piece == _NULL else piece.piece for piece in model.pieces]
        if not names or model.trainer_spec.model_type != model.trainer_spec.BPE:
            raise ValueError("it holds none")
    except Exception as error:  # the class depends on the version of protobuf
        raise CheckpointError(
            f"{path}: cannot be read as a SentencePiece model of byte pairs: {error}"
        ) from error
    normalizer = model.normalizer_spec
    if normalizer.precompiled_charsmap:
        raise CheckpointError(f"{path}: normalises characters, unlike the tokenizer of InternLM2")
    if normalizer.remove_extra_whitespaces:
        raise CheckpointError(f"{path}: removes blanks, unlike the tokenizer of InternLM2")
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
            merges=_merges(model.pieces, vocabulary),
            unk_token=config.get("unk_token", "<unk>"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    blanks: list[Any] = [normalizers.Replace(" ", _BLANK)]
    if normalizer.add_dummy_prefix:
        blanks.insert(0, normalizers.Prepend(_BLANK))
    backend.normalizer = normalizers.Sequence(blanks)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    whole = [piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=False) for text in whole if text in vocabulary])
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


def _merges(pieces: Any, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, sorted by the score of the piece, highest first."""
    splits = (
        (piece.score, piece.piece[:cut], piece.piece[cut:])
        for piece in pieces
        if piece.type == piece.NORMAL
        for cut in range(1, len(piece.piece))
    )
    known = [(score, a, b) for score, a, b in splits if a in vocabulary and b in vocabulary]
    known.sort(key=lambda pair: (-pair[0], vocabulary[pair[1]], vocabulary[pair[2]]))
    return [(a, b) for _, a, b in known]
