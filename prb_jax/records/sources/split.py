"""`prb split`: disjoint parts of a data set, with no user or no question in two of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Final

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import turns_of
from prb_jax.records.files import Row
from prb_jax.records.intake import describe_source
from prb_jax.records.sources.whole import source_rows
from prb_jax.records.writing import refuse_file, write_once

BY: Final = ("user", "question")
PARTS: Final = MappingProxyType({"train": 0.8, "validation": 0.1, "test": 0.1})
CARD: Final = "README.md"


@dataclass(frozen=True)
class SplitPart:
    """One part of a data set."""

    path: Path  # file of the part
    # comparisons, users, questions: numbers in the part; rows without a user do not count as users
    comparisons: int
    users: int
    questions: int


@dataclass(frozen=True)
class Split:
    """A data set in parts.

    Attributes:
      folder: Folder with one file per part, which `--data` and `data=` accept as a folder with splits.
      parts: Parts by name.
      shared: Number of questions (in a split by users) or users (in a split by questions) in more than one part.
    """

    folder: Path
    parts: Mapping[str, SplitPart]
    shared: int


def split(
    data: str | Path,
    *,
    by: str,
    out: str | Path,
    parts: Mapping[str, float] = PARTS,
    seed: int = 0,
) -> Split:
    """Write the records of ``data`` as disjoint parts: all of one user, or of one question, in one part.

    The shuffle of users or questions depends only on the seed and their names. They fill the parts in order, each up to
    its share of the comparisons. Records are unchanged and keep their order; equal inputs give equal bytes.

    Args:
      data: A file, or any other source of ``read_comparisons``.
      by: "user" or "question"; questions that differ only in case and spaces are equal.
      out: Folder for one PART.jsonl per part and a README.md that documents the split.
      parts: Names and shares, which are positive and sum to 1.
      seed: Seed of the shuffle.

    Raises:
      DataError: A record is invalid, a row lacks a user in a split by user, there are too few users or questions for
        all parts, or shares are invalid.
      RunError: ``out`` cannot be written, or contains other files with these names.
    """
    if by not in BY:
        raise DataError(f"by: expected {' or '.join(BY)}, found {quote(by)}")
    _check_parts(parts)
    refuse_file(out)
    source, rows, folder = describe_source(data), source_rows(data), Path(out)
    users, questions = _groups(rows, by)
    groups, others = (users, questions) if by == "user" else (questions, users)
    part_of = _assign([str(group) for group in groups], parts, by=by, seed=seed)
    inside: dict[str, list[int]] = {name: [] for name in parts}
    for number, group in enumerate(groups):
        inside[part_of[str(group)]].append(number)
    made = {
        name: SplitPart(
            path=folder / f"{name}.jsonl",
            comparisons=len(numbers),
            users=len({users[i] for i in numbers} - {None}),
            questions=len({questions[i] for i in numbers}),
        )
        for name, numbers in inside.items()
    }
    sets = [{others[i] for i in numbers} - {None} for numbers in inside.values()]
    shared = sum(map(len, sets)) - len(set().union(*sets))
    files = {
        made[name].path: b"".join(json.dumps(rows[i].value, default=str).encode() + b"\n" for i in numbers)
        for name, numbers in inside.items()
    }
    settings = {"by": by, "seed": seed, "parts": dict(parts), "source": source}
    files[folder / CARD] = _card(made, settings, by=by).encode()
    write_once(files)
    return Split(folder, made, shared)


def _check_parts(parts: Mapping[str, float]) -> None:
    for name, share in parts.items():
        if not name.isidentifier():
            raise DataError(f"part {quote(name)}: expected a name of letters, digits and underscores")
        if not 0 < share <= 1:
            raise DataError(f"part {name}: expected a share above 0 and at most 1, found {share:g}")
    if abs(sum(parts.values()) - 1) > 1e-6:
        raise DataError(f"parts: expected shares that are 1 together, found {sum(parts.values()):g}")


def _groups(rows: Sequence[Row], by: str) -> tuple[list[str | None], list[str]]:
    """Return the user and the question of each record."""
    users: list[str | None] = []
    questions: list[str] = []
    for row in rows:
        comparison = Comparison.from_row(row.value, where=row.where)
        if comparison.user_id is None and by == "user":
            raise DataError(
                f"{row.where}: field 'user_id': missing; a split by user needs one in every record"
            )
        users.append(comparison.user_id)
        opening = comparison.prompt or turns_of(comparison.responses[0])[:-1]
        turns = "\n".join(f"{message.role}: {message.content}" for message in opening)
        questions.append(" ".join(turns.casefold().split()))
    return users, questions


def _assign(groups: Sequence[str], parts: Mapping[str, float], *, by: str, seed: int) -> dict[str, str]:
    """Return the part of each group: by the midpoint of its range of comparisons, in a seeded order of the groups."""
    sizes = Counter(groups)
    order = sorted(sizes, key=lambda group: hashlib.sha256(f"{seed}\0{group}".encode()).digest())
    ends = list(zip(parts, accumulate(parts.values())))
    part_of, before = dict[str, str](), 0
    for group in order:
        middle = (before + sizes[group] / 2) / len(groups)
        part_of[group] = next((name for name, end in ends if middle < end), ends[-1][0])
        before += sizes[group]
    if empty := [name for name in parts if name not in part_of.values()]:
        raise DataError(
            f"part {empty[0]} would be empty: {len(order)} {by}s with {len(groups)} comparisons are too few for the "
            f"parts {', '.join(f'{name}={share:g}' for name, share in parts.items())}"
        )
    return part_of


def _card(parts: Mapping[str, SplitPart], settings: Mapping[str, object], *, by: str) -> str:
    table = [
        f"| {name} | {part.comparisons:,} | {part.users:,} | {part.questions:,} |"
        for name, part in parts.items()
    ]
    return "\n".join(
        [
            f"No {by} is in two of these parts, which `prb split` made.",
            "",
            "| part | comparisons | users | questions |",
            "|---|---:|---:|---:|",
            *table,
            "",
            *(f"    {line}" for line in json.dumps(settings, indent=2).splitlines()),
            "",
        ]
    )
