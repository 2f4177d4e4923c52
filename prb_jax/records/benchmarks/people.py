"""Common code for data sets of real people: cells, a person's earlier choices as a profile, and one rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

from prb_jax.metrics.accuracy import margin
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import BenchmarkScore, Place, mean

CHOICES: Final = 8
"""Earlier choices of a person that a profile holds: the first ones in the data.

So all later comparisons of a person have one profile, whose tokens are computed once.
"""

_EMPTY: Final = "EMPTY STRING"
_END: Final = "<|end_of_text|>"
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}

RULE: Final = (
    "comparisons in which the preferred response scores strictly above all others / comparisons; also by pair, and as "
    "the mean over users"
)


def cell(value: object, where: str, name: str, cleaned: Counter[str]) -> str | None:
    """Return the text of a cell without end marks; None if it is null, empty or "EMPTY STRING".

    `cleaned` counts removed end marks and cells "EMPTY STRING".
    """
    text = (fields.optional_text(value, where, name) or "").strip()
    cleaned[f"ends with {_END} (removed)"] += text.endswith(_END)
    while text.endswith(_END):
        text = text.removesuffix(_END).rstrip()
    cleaned[f"{_EMPTY} (read as empty)"] += text == _EMPTY
    return None if text in ("", _EMPTY) else text


def number(value: object, where: str, name: str) -> float:
    """Return a number, which may be stored as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            fields.fail(where, name, f"expected a number, found {fields.found(value)}")
    return fields.number(value, where, name)


def truth(value: object, where: str, name: str) -> bool:
    """Return a truth value, which may be stored as a number or as text."""
    known = _TRUTHS.get(str(value).strip().lower())
    if known is None:
        fields.fail(where, name, f"expected true or false, found {fields.found(value)}")
    return known


def row_name(place: Place) -> str:
    """Return a name for a row without one: its split or file, and its number."""
    return f"{place.split or PurePosixPath(place.path).name.partition('.')[0] or 'row'}-{place.number}"


def post(category: str, text: str) -> dict[str, str]:
    """Return a post of a profile."""
    return {"id": "", "category": category, "text": text}


def posts_of_choice(
    asked: str, chosen: str, rejected: Iterable[str] = (), feedback: str | None = None
) -> list[dict[str, str]]:
    """Return one choice as posts: the question, the preferred and the rejected texts, and the person's reason.

    The categories "agreed_with" and "disagreed_with" mark texts of others, so a study can find posts that reveal a
    label (`prb_jax.personal.features.read_post`).
    """
    posts = [post("asked", asked), post("agreed_with", chosen)]
    posts += [post("disagreed_with", text) for text in rejected]
    return posts + ([post("feedback", feedback)] if feedback else [])


class Histories:
    """The first choices of each person so far, as posts."""

    def __init__(self) -> None:
        self._choices: dict[str, list[tuple[frozenset[str], Sequence[Mapping[str, str]]]]] = {}

    def add(self, user: str, candidates: Iterable[str], posts: Sequence[Mapping[str, str]]) -> None:
        """Remember a choice of a person between some candidates, unless enough are known."""
        choices = self._choices.setdefault(user, [])
        if len(choices) < CHOICES:
            choices.append((frozenset(candidates), posts))

    def posts(self, user: str, responses: Iterable[str]) -> list[Mapping[str, str]]:
        """Return the posts of a person's choices; a choice between any of these responses would tell the label."""
        asked = frozenset(responses)
        known = self._choices.get(user, ())
        return [one for candidates, posts in known if asked.isdisjoint(candidates) for one in posts]


def is_won(row: ScoredRow) -> bool:
    """Return whether the preferred response scores strictly above all others."""
    return margin(row.scores, row.labels, id=row.id) > 0


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the share of comparisons won; beside it by pair, by user and by part of the subset ("en/balanced")."""
    won = {row.id: is_won(row) for row in rows}
    users: dict[str, list[bool]] = {}
    parts: dict[str, list[bool]] = {}
    for row in rows:
        users.setdefault(row.id if row.user_id is None else f"user {row.user_id}", []).append(won[row.id])
        for part in (row.subset or "").split("/"):
            parts.setdefault(part, []).append(won[row.id])
    parts.pop("", None)
    pairs = [
        better > worse
        for row in rows
        for better, top in zip(row.scores, row.labels, strict=True)
        if top == max(row.labels)
        for worse, label in zip(row.scores, row.labels, strict=True)
        if label < top
    ]
    return BenchmarkScore(
        score=mean(won.values()),
        figures={
            "pairs": mean(pairs),
            "mean over users": mean(sum(values) / len(values) for values in users.values()),
            **{name: mean(parts[name]) for name in sorted(parts)},
        },
        details={
            "users": len(users),
            "comparisons": len(rows),
            "pairs": len(pairs),
            "by_part": {name: len(parts[name]) for name in sorted(parts)},
        },
    )
