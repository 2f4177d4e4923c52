"""AlignX (arXiv 2503.15463): posts, a preferred and another answer, and the person's own text.

A row is one person: its own pair ("target"), and up to four earlier pairs of the same person ("feedback"). The 90
preference directions are derived from the labels and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, BenchmarkScore, Published

_TARGET, _FEEDBACK = "target", "feedback"
_DEMOGRAPHIC: Final = "Demographic Information"
_WRITTEN: Final = "User-Generated Content"
_PAIRS: Final = "Pair-wise Comparative Feedback"


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the earlier pairs of each person, and then the target with these pairs in its profile too."""
    for place, row in published.rows:
        where = place.where
        user = people.row_name(place)
        known = people.cell(row.get(_DEMOGRAPHIC), where, _DEMOGRAPHIC, published.cleaned)
        profile = [people.post("about this person", known)] if known else []
        pairs = [_texts(pair, f"{where}: {name}") for name, pair in _items(row, _PAIRS, where)]
        for name, one in _items(row, _WRITTEN, where):
            asked = fields.text(one.get("prompt"), where, f"{name}.prompt")
            comment = fields.text(one.get("comment"), where, f"{name}.comment")
            if not comment.strip():
                published.left_out["comments without a text"] += 1
                continue
            profile.append(people.post("comment", f"On the post: {asked}\n\nComment: {comment}"))
        target = _texts(row, where)
        told = [
            one
            for asked, chosen, rejected in pairs
            if not {chosen, rejected} & set(target[1:])  # such a pair reveals the label
            for one in people.posts_of_choice(asked, chosen, [rejected])
        ]
        for number, (asked, chosen, rejected) in enumerate([*pairs, target], start=1):
            is_target = number > len(pairs)
            if chosen == rejected:
                published.left_out["pairs of equal responses"] += 1
                continue
            yield (
                where,
                {
                    "id": user if is_target else f"{user}/{number}",
                    "user_id": user,
                    "question": asked,
                    "chosen": chosen,
                    "rejected": rejected,
                    "subset": _TARGET if is_target else _FEEDBACK,
                    "profile": [*profile, *told] if is_target else profile,
                },
            )


def _items(row: Mapping[str, Any], column: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    value = row.get(column)
    for number, item in enumerate(() if value is None else fields.objects(value, where, column)):
        yield f"{column}[{number}]", fields.mapping(item, where, f"{column}[{number}]")


def _texts(pair: Mapping[str, Any], where: str) -> tuple[str, str, str]:
    asked, chosen, rejected = (
        fields.text(pair.get(name), where, name) for name in ("prompt", "chosen", "rejected")
    )
    return asked, chosen, rejected


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the score of the targets, and of the earlier pairs beside it."""
    targets = [row for row in rows if row.subset == _TARGET]
    result, everything = people.score(targets), people.score(rows)
    figures = {
        "pairs": result.figures["pairs"],
        **{p: everything.figures.get(p) for p in (_TARGET, _FEEDBACK)},
    }
    missing = [] if targets else [_TARGET]
    return replace(result, figures=figures, details=everything.details, missing=missing)


BENCHMARK = Benchmark(
    name="alignx",
    rule="targets in which the preferred response scores strictly higher / targets; the same persons' earlier pairs "
    "(subset feedback) only beside it",
    score=score,
    won=lambda row: people.is_won(row) if row.subset == _TARGET else None,
    repository="JinaLeejnl/AlignX",
    splits=("train",),
    licence="not stated",
    columns=("Preference Direction",),
    records=records,
)
