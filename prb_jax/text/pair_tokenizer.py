"""Tokenise prompt and response as a pair of texts, for encoders with a classifier, as in BERT's next sentence task."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import CheckpointError, DataError
from prb_jax.records.conversation import Message
from prb_jax.text.open_tokenizer import open_tokenizer, place_of
from prb_jax.text.tokenizer import TokenizerIds, tokenize

TURN_SEPARATOR = "\n\n"  # between the turns of a prompt, including a system message


@dataclass(frozen=True, eq=False)
class PairTokenizer(TokenizerIds):
    """A transformers tokenizer used for pairs. Build with :func:`load_pair_tokenizer`."""

    name: str  # folder or hub id
    tokenizer: Any = field(repr=False)
    before: tuple[int, ...]  # ids around the two texts, e.g. ``[CLS] prompt [SEP] response [SEP]``
    between: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def template_hash(self) -> str:
        """ "sha256:..." of the format of a pair: the special ids and the turn separator."""
        rule = f"pair {self.before} {self.between} {self.after} {TURN_SEPARATOR!r}"
        return f"sha256:{hashlib.sha256(rule.encode()).hexdigest()}"

    def texts(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the two texts of a conversation: the prompt, and the last message.

        Raises:
          DataError: The conversation has tools, tool calls or thoughts, which a pair of texts cannot represent.
        """
        plain = all(message.role in ("system", "user", "assistant") for message in messages)
        if messages[0].context or not plain or any(message.fields for message in messages):
            raise DataError(
                f"{self.name}: reads a prompt and a response as two texts, so it has no place for tools, thoughts and "
                f"arguments of a chat template; found a conversation of {[message.role for message in messages]}"
            )
        return TURN_SEPARATOR.join(message.content for message in messages[:-1]), messages[-1].content

    def tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32, without adding special tokens and without truncation."""
        return tokenize(self.tokenizer, texts)

    def encode_together(self, groups: Sequence[Sequence[Sequence[Message]]]) -> list[list[np.ndarray]]:
        """Return the ids of every conversation; each distinct text, e.g. a shared prompt, is tokenised once.

        The text of a prompt is the contents of its messages, separated by blank lines.
        """
        pairs = [[self.texts(conversation) for conversation in group] for group in groups]
        distinct = list(dict.fromkeys(text for group in pairs for pair in group for text in pair))
        ids = dict(zip(distinct, self.tokenize(distinct), strict=True))
        before, between, after = (np.asarray(x, np.int32) for x in (self.before, self.between, self.after))
        return [
            [np.concatenate([before, ids[a], between, ids[b], after]) for a, b in group] for group in pairs
        ]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of one conversation."""
        return self.encode_together([[messages]])[0][0].tolist()


def load_pair_tokenizer(path_or_id: str | Path) -> PairTokenizer:
    """Load a tokenizer and find the special ids that it puts around two texts.

    Raises:
      CheckpointError: The tokenizer cannot be loaded, or a pair is not its two texts with special ids around them.
    """
    name = str(path_or_id)
    tokenizer = open_tokenizer(name)
    first, second = (ids.tolist() for ids in tokenize(tokenizer, ["a b", "c"]))
    whole = list(tokenizer("a b", "c")["input_ids"])
    start = place_of(first, whole)
    stop = 0 if start is None else start + len(first)
    other = None if start is None else place_of(second, whole, stop)
    if start is None or other is None:
        raise CheckpointError(
            f"{name}: a pair of texts is not its texts with special tokens around them: {first}, {second} -> {whole}"
        )
    around = (whole[:start], whole[stop:other], whole[other + len(second) :])
    return PairTokenizer(name, tokenizer, *map(tuple, around))
