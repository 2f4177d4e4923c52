"""What is trained on and what is held out: read, checked, and split by user or by comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.records import Records, digest
from prb_jax.errors import DataError, RunError, listed, quote
from prb_jax.scoring.comparison_table import ComparisonTable, TableRow, TableRows
from prb_jax.scoring.prepared_tokens import places_of, stored_table
from prb_jax.sources.large import Joined
from prb_jax.sources.prepared import PreparedComparisons
from prb_jax.sources.reading import describe_source, find_comparisons, prepared_tokens, read_comparisons
from prb_jax.training.settings import TrainSettings, ValidationSettings, sources

SPLIT = "train"
"""The split that is read of sources that have several."""

Row = Comparison | TableRow
"""A comparison, or the part of it that is no text."""


@dataclass(frozen=True)
class Part:
    """The data of one role: for training, for validation, or for a test.

    Attributes:
      comparisons: a list, or, where the data is large, read when they are asked for.
      known: of the same comparisons, the part that is no text.
      prepared: the prepared folder with tokens that they all come from, and its split, if there is one.
    """

    comparisons: Sequence[Comparison]
    known: Sequence[Row]
    prepared: tuple[Path, str] | None = None

    def at(self, indices: np.ndarray) -> Part:
        """Return the comparisons at these places."""
        known = (
            self.known.at(indices) if isinstance(self.known, TableRows) else [self.known[i] for i in indices]
        )
        comparisons = self.comparisons
        if isinstance(comparisons, Joined):
            comparisons = comparisons.at(indices)
        else:
            comparisons = [comparisons[index] for index in indices]
        return Part(comparisons, known, self.prepared)


@dataclass(frozen=True)
class TrainingData:
    """Labelled comparisons for one run.

    Attributes:
      train_part: to train on, at least one, with distinct ids.
      validation_part: held out; empty where there is no validation.
      sources: what each named source is made of, JSON-ready.
      split_by: "user", "id", "data" (sources of its own) or None.
    """

    train_part: Part
    validation_part: Part
    sources: Mapping[str, Any] = field(default_factory=dict)
    split_by: str | None = None

    @property
    def train(self) -> Sequence[Comparison]:
        """To train on."""
        return self.train_part.comparisons

    @property
    def validation(self) -> Sequence[Comparison]:
        """Held out."""
        return self.validation_part.comparisons


def read_training_data(
    settings: TrainSettings, *, data: Records | None = None, validation: Records | None = None
) -> TrainingData:
    """Reads and splits the data of a run.

    Args:
      settings: of the run.
      data, validation: records in place of the sources that the settings name.

    Raises:
      RunError: records and the name of a source for the same part.
      DataError: what `read_comparisons` raises, as for equal labels; an empty split; ids or users on both
        sides of a boundary that they must not cross.
    """
    described: dict[str, Any] = {}

    def read(text: str | None, role: str, *, split: str, given: Records | None = None) -> Part:
        found: list[Comparison] = []
        subset = settings.subset if role != "validation.test" else None
        limit = settings.limit if role == "data" else None
        if given is not None:
            if text:
                raise RunError(
                    f"config key '{role}': names {quote(text)}, but records are given in its place"
                )
            found = read_comparisons(given, subset=subset, limit=limit)
            described[role] = [{"kind": "records", "sha256": digest(found)}]
        parts = [
            (name, find_comparisons(name, subset=subset, limit=limit, split=split)) for name in sources(text)
        ]
        for name, part in parts:
            about = describe_source(name, split=split)
            if not about.get("files"):  # only its name is known without reading it
                about["sha256"] = digest(part)
            described.setdefault(role, []).append(about)
        if any(isinstance(part, PreparedComparisons) for _, part in parts):
            return _large_part(parts, subset=subset, limit=limit, split=split)
        found += [comparison for _, part in parts for comparison in part]
        _refuse_repeated_ids(found, role)
        return Part(found, found)

    train = read(settings.data, "data", split=SPLIT, given=data)
    held = read(settings.validation.data, "validation.data", split="validation", given=validation)
    test = read(settings.validation.test, "validation.test", split="test")
    split_by = "data" if held.known else None
    if not held.known and settings.validation.fraction > 0:
        split_by = split_rule(train.known, settings.validation)
        out = _held_out(train.known, fraction=settings.validation.fraction, by=split_by)
        train, held = train.at(np.flatnonzero(~out)), train.at(np.flatnonzero(out))
    parts = (train.known, held.known, test.known)
    _check_boundaries(*parts, settings.validation, own_validation=split_by == "data")
    if settings.validation.limit is not None:
        held = held.at(evenly(len(held.known), settings.validation.limit))
    return TrainingData(train, held, described, split_by)


def _large_part(
    parts: Sequence[tuple[str, Sequence[Comparison]]], *, subset: str | None, limit: int | None, split: str
) -> Part:
    """Data of which some is large: it is read once for what is no text, or not at all where its tokens are prepared."""
    chosen: list[Sequence[Comparison]] = []
    known: list[Sequence[Row]] = []
    for name, part in parts:
        if not isinstance(part, PreparedComparisons):
            chosen.append(part)
            known.append(part)
            continue
        folder = prepared_tokens(name)
        table = None if folder is None else stored_table(folder, split=split)
        table = ComparisonTable(part, baselines=False) if table is None else table
        places = places_of(table, subset=subset, limit=limit, where=name)
        if len(parts) == 1:
            prepared = None if folder is None else (folder, split)
            return Part(Joined([part], places), TableRows(table, places), prepared)
        chosen.append(Joined([part], places))
        known.append(TableRows(table, places))
    rows = [row for part in known for row in part]
    _refuse_repeated_ids(rows, "data")
    return Part(Joined(chosen), rows)


def split_rule(comparisons: Sequence[Row], options: ValidationSettings) -> str:
    """ "user" or "id": what `validation.by` means for these comparisons."""
    users = {comparison.user_id for comparison in comparisons if comparison.user_id is not None}
    if options.by == "user" and len(users) < 2:
        raise DataError(
            f"validation.by=user: the data has {len(users)} users, expected at least 2 to hold one out; "
            "validation.by=id splits by comparison"
        )
    return ("user" if len(users) >= 2 else "id") if options.by == "auto" else options.by


def hold_out(
    comparisons: Sequence[Comparison], *, fraction: float, by: str
) -> tuple[list[Comparison], list[Comparison]]:
    """(training, validation): whole users (`by` "user") or single comparisons ("id") are held out.

    Which ones depends on their names alone, not on a seed, the order or the process: runs with different
    seeds are validated on the same comparisons. At least one is held out and at least one is left. A
    comparison without a user counts as a user of its own.

    Raises:
      DataError: fewer than two to split.
    """

    held = _held_out(comparisons, fraction=fraction, by=by)
    return (
        [one for one, out in zip(comparisons, held) if not out],
        [one for one, out in zip(comparisons, held) if out],
    )


def _held_out(comparisons: Sequence[Row], *, fraction: float, by: str) -> np.ndarray:
    """bool [n]: which ones `hold_out` holds out."""

    def key(comparison: Row) -> str:
        alone = by == "id" or comparison.user_id is None
        return f"id:{comparison.id}" if alone else f"user:{comparison.user_id}"

    groups = sorted({key(comparison) for comparison in comparisons}, key=_order)
    if len(groups) < 2:
        raise DataError(
            f"validation.fraction={fraction}: the data has {len(comparisons)} comparisons, too few to hold one "
            "out by its " + by + "; validation.fraction=0 trains without validation"
        )
    held = set(groups[: min(max(1, round(fraction * len(groups))), len(groups) - 1)])
    return np.fromiter((key(comparison) in held for comparison in comparisons), bool, len(comparisons))


def user_weights(comparisons: Sequence[Row]) -> np.ndarray:
    """float32 [n], mean 1: each user's comparisons weigh the same in sum, one without a user as one user."""
    counts: dict[str, int] = {}
    for comparison in comparisons:
        if comparison.user_id is not None:
            counts[comparison.user_id] = counts.get(comparison.user_id, 0) + 1
    weights = np.asarray(
        [1.0 if one.user_id is None else 1.0 / counts[one.user_id] for one in comparisons], np.float64
    )
    return (weights * (len(weights) / weights.sum())).astype(np.float32)


def evenly(count: int, limit: int) -> np.ndarray:
    """int64: at most `limit` of so many places, evenly spaced, in order."""
    if count <= limit:
        return np.arange(count)
    return np.linspace(0, count - 1, limit).round().astype(np.int64)


def _order(name: str) -> bytes:
    return hashlib.sha256(f"validation:{name}".encode()).digest()


def _refuse_repeated_ids(comparisons: Sequence[Row], role: str) -> None:
    seen: set[str] = set()
    for comparison in comparisons:
        if comparison.id in seen:
            raise DataError(f"{role}: comparison id {quote(comparison.id)} occurs in two of its sources")
        seen.add(comparison.id)


def _check_boundaries(
    train: Sequence[Row],
    validation: Sequence[Row],
    test: Sequence[Row],
    options: ValidationSettings,
    *,
    own_validation: bool,
) -> None:
    """No id on two sides; no validation user in the test data, nor (own sources) in the training data."""
    ids = {name: {one.id for one in part} for name, part in _named(train, validation, test)}
    users = {name: {one.user_id for one in part} - {None} for name, part in _named(train, validation, test)}

    def refuse(what: str, first: str, second: str, shared: set[Any], remedy: str) -> None:
        if shared:
            names = listed([quote(name) for name in sorted(shared)])
            raise DataError(
                f"the {first} and the {second} data share {len(shared)} {what} ({names}); {remedy}"
            )

    for first, second in (("training", "validation"), ("training", "test"), ("validation", "test")):
        refuse("ids", first, second, ids[first] & ids[second], "each comparison may be in one of them")
    if options.shared_users:
        return
    remedy = "validation.shared_users=true allows it"
    refuse("users", "validation", "test", users["validation"] & users["test"], remedy)
    if own_validation:
        refuse("users", "training", "validation", users["training"] & users["validation"], remedy)


def _named(*parts: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    return list(zip(("training", "validation", "test"), parts, strict=True))
