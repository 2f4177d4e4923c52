"""Open and call transformers tokenizers, without running code, and with an error for hostile files.

This module also finds the places where a text can be cut without changing its ids.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import CheckpointError, PrbWarning, first_line, quote
from prb_jax.records.reading import read_json
from prb_jax.seams import BUILTIN, get

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_MOST_IDS = 2**31  # ids are int32
RECENT_CHARACTERS = 1 << 24
"""Characters of texts in the cache of token ids; a token has about four."""


def open_tokenizer(name: str, *, revision: str | None = None) -> Any:
    """Return the transformers tokenizer of a folder or hub id, with truncation and padding off.

    Raises:
      CheckpointError: It cannot be loaded, or only by running code from its repository.
    """
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise _no_tokenizer(name)
    with _failures(f"{name}: no tokenizer can be loaded from here"):
        if (kind := class_without_code(folder)) is not None:
            tokenizer = get("tokenizers", kind).value(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    return checked_tokenizer(tokenizer, name)


def class_without_code(folder: Path) -> str | None:
    """Return the tokenizer class of a folder if this package replaces the class's repository code; else None."""
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").is_file():
        return None
    config = read_json(folder / "tokenizer_config.json", error=CheckpointError, optional=True)
    kind = config.get("tokenizer_class") if isinstance(config, dict) else None
    return kind if kind in BUILTIN["tokenizers"] else None


def checked_tokenizer(tokenizer: Any, name: str) -> Any:
    """Check a transformers tokenizer, turn its truncation and padding off, and return it.

    Raises:
      CheckpointError: It needs code of its repository, lacks a vocabulary, or is hostile.
    """
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary.values()) <= set(tokenizer.all_special_ids):
        # For some model types transformers builds an empty tokenizer if the files are missing.
        raise _no_tokenizer(name)
    if "AutoTokenizer" in (tokenizer.init_kwargs.get("auto_map") or {}):
        raise CheckpointError(
            f"{name}: tokenizer_config.json asks for code from its repository (auto_map), which is never run;"
            " convert the tokenizer to a tokenizer.json"
        )
    last = max(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[last] >= _MOST_IDS:
        raise CheckpointError(
            f"{name}: tokenizer.json: vocab: token {quote(last)} has the id {vocabulary[last]}; expected ids below "
            f"{_MOST_IDS}"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        if backend.normalizer is not None:
            get("templates", "normaliser").value(backend.normalizer, name)
        if getattr(backend.model, "dropout", None):
            warnings.warn(
                f"{name}: tokenizer.json: model.dropout {backend.model.dropout:g} would give the same text other "
                "tokens each time; it is off here",
                PrbWarning,
                stacklevel=2,
            )
            backend.model.dropout = None
        # A tokenizer.json can turn on truncation or padding; every cut must be counted.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return tokenizer


def _no_tokenizer(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: no tokenizer files (tokenizer.json or tokenizer.model): expected the model's tokenizer beside its "
        "weights, or another folder or hub id with --tokenizer"
    )


@contextlib.contextmanager
def _failures(what: str, texts: Sequence[str] = ()) -> Iterator[None]:
    """Turn any error of a tokenizer into one line; a panic of `tokenizers` is not an `Exception`."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = first_line(error)
        if any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):  # never from records
            reason = "the chat template writes half of a surrogate pair, which is not text"
        raise CheckpointError(f"{what}: {reason}") from error


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of each text, int32, without adding special tokens and without truncation.

    Raises:
      CheckpointError: The tokenizer fails on a text.
    """
    if not texts:
        return []
    backend = getattr(tokenizer, "backend_tokenizer", None)
    what = f"{tokenizer.name_or_path or 'the tokenizer'}: tokenizer.json: the tokenizer breaks down"
    with _failures(what, texts):
        if backend is None:
            rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        else:
            rows = [
                encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
    return [np.asarray(row, np.int32) for row in rows]


def added_tokens(tokenizer: Any, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the tokenizer puts before and after a text when it adds special tokens."""
    text = "a b"
    with _failures(f"{name}: tokenizer.json: the tokenizer breaks down"):
        plain, full = (
            list(tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (False, True)
        )
    start = place_of(plain, full)
    if start is None:
        raise CheckpointError(
            f"{name}: adding special tokens changes the ids of the text itself: {plain} -> {full}"
        )
    return tuple(full[:start]), tuple(full[start + len(plain) :])


def place_of(run: Sequence[int], ids: Sequence[int], start: int = 0) -> int | None:
    """Return the first index at or after `start` at which `run` occurs in `ids`; None if it does not."""
    places = range(start, len(ids) - len(run) + 1)
    return next((place for place in places if ids[place : place + len(run)] == run), None)


def independent_tokens(tokenizer: Any, probe: str) -> tuple[str, ...]:
    """Return the special tokens in the rendered text `probe` before which a text can be cut.

    A tokenizer first finds its added tokens, then normalises, splits and encodes each stretch between them separately.
    So the ids before and after a special token do not depend on each other. The conversations of a person share
    thousands of prompt tokens, which then are tokenised only once. This holds for tokens that match the text exactly
    (`special`, not `normalized`, not `single_word`), include no neighbouring blanks (neither `lstrip` nor `rstrip`),
    and cannot be hidden by an overlapping added token.

    These are the rules of the `tokenizers` library; for other tokenizers the result is empty.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens:
        return ()
    added = list(backend.get_added_tokens_decoder().values())
    contents = [token.content for token in added if token.content]

    def may_be_hidden(token: str) -> bool:
        starts = (other[start:] for other in contents if other != token for start in range(len(other)))
        return any(start.startswith(token) or token.startswith(start) for start in starts)

    return tuple(
        sorted(
            token.content
            for token in added
            if token.content
            and token.content in probe
            and token.special
            and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
            and not may_be_hidden(token.content)
        )
    )


class RecentStretches:
    """Cache of the ids of recent stretches of text, at most twice :data:`RECENT_CHARACTERS` characters."""

    def __init__(self) -> None:
        self._recent: dict[str, np.ndarray] = {}
        self._older: dict[str, np.ndarray] = {}
        self._characters = 0  # characters in `_recent`

    def ids(
        self, stretches: Iterable[str], tokenize: Callable[[list[str]], list[np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Return the ids of each distinct stretch; only new ones are tokenised."""
        recent, older = self._recent, self._older  # another thread may swap them
        stretches = dict.fromkeys(stretches)
        new = [text for text in stretches if text not in recent and text not in older]
        ids = dict(zip(new, tokenize(new), strict=True))
        ids |= {
            text: recent[text] if text in recent else older[text] for text in stretches if text not in ids
        }
        self._characters += sum(len(text) for text in stretches if text not in recent)
        recent.update(ids)
        if self._characters > RECENT_CHARACTERS:
            self._recent, self._older, self._characters = {}, recent, 0
        return ids
