"""Verdicts of a judge on built pairs, in both orders: without the user, and with what the user wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.building.gates.gate import Pair
from prb_jax.building.prompts import blind_messages, prompts_digest, rubric_messages
from prb_jax.data.comparison import Comparison, Message
from prb_jax.judges.chat import ChatModel
from prb_jax.judges.pairs import LETTER_TOKENS, read_verdict
from prb_jax.runs.rows import Row, open_rows

JUDGEMENTS: Final = "judgements.jsonl"
BLIND: Final = "blind"
RUBRIC: Final = "rubric"

_FIELDS: Final = ("kind", "pair", "id", "verdicts", "replies", "tries", "prompt_tokens", "completion_tokens")
_TOGETHER: Final = 32
_SHOWN: Final[Mapping[str, Callable[[Comparison, int], tuple[Message, ...]]]] = {
    BLIND: blind_messages,
    RUBRIC: rubric_messages,
}


@dataclass(frozen=True)
class Verdicts:
    """What a judge said of one pair.

    Attributes:
      letters: with the chosen answer as A, and with the rejected one as A; None for a reply without a verdict.
    """

    letters: tuple[str | None, str | None]

    @property
    def share(self) -> float:
        """1 where the chosen answer is preferred in both orders, 0 where the other one is, else 0.5."""
        if self.letters == ("A", "B"):
            return 1.0
        return 0.0 if self.letters == ("B", "A") else 0.5


def judge_pairs(
    pairs: Sequence[Pair], kind: str, speaker: ChatModel, *, folder: Path, advance: Callable[[int], None]
) -> dict[str, Verdicts]:
    """Return the verdicts on pairs by id; those that are in the folder's file already are not asked for again.

    Args:
      pairs: to be judged.
      kind: "blind" or "rubric".
      speaker: the judge.
      folder: of the build, held by this process.
      advance: called with the number of pairs that were done.

    Raises:
      RunError: the judge cannot be asked, or the file cannot be read or written.
    """
    identity = json.dumps([dict(speaker.identity()), prompts_digest()], sort_keys=True)
    keys = {pair.id: _digest(identity, pair.comparison) for pair in pairs}
    with open_rows(folder / JUDGEMENTS, what="judgements", key=_key, fields=_FIELDS) as file:
        left = [pair for pair in pairs if (kind, keys[pair.id]) not in file.rows]
        advance(len(pairs) - len(left))
        for start in range(0, len(left), _TOGETHER):
            part = left[start : start + _TOGETHER]
            asked = [_SHOWN[kind](pair.comparison, first) for pair in part for first in (0, 1)]
            replies = speaker.replies(asked, max_new_tokens=LETTER_TOKENS)
            file.append(
                {
                    "kind": kind,
                    "pair": keys[pair.id],
                    "id": pair.id,
                    "verdicts": [read_verdict(reply.text) for reply in both],
                    "replies": [reply.text for reply in both],
                    "tries": [reply.tries for reply in both],
                    "prompt_tokens": [reply.prompt_tokens for reply in both],
                    "completion_tokens": [reply.completion_tokens for reply in both],
                }
                for pair, both in zip(part, _in_twos(replies), strict=True)
            )
            advance(len(part))
        return {name: Verdicts(tuple(file.rows[kind, key]["verdicts"])) for name, key in keys.items()}


def judge_usage(folder: Path) -> list[Row]:
    """Return all judgements of a build, none where nothing was judged."""
    from prb_jax.runs.rows import read_rows

    path = folder / JUDGEMENTS
    return (
        list(read_rows(path, what="judgements", key=_key, fields=_FIELDS).values()) if path.exists() else []
    )


def _digest(identity: str, comparison: Comparison) -> str:
    text = identity + json.dumps(comparison.to_row(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _key(row: Row) -> tuple[str, str]:
    return row["kind"], row["pair"]


def _in_twos(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[start : start + 2] for start in range(0, len(items), 2)]
