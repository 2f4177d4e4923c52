"""What is trained on and what is held out: read, checked, and split by user or by comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.records import Records, digest
from prb_jax.errors import DataError, RunError, listed, quote
from prb_jax.sources.reading import describe_source, read_comparisons
from prb_jax.training.settings import TrainSettings, ValidationSettings, sources

SPLIT = "train"
"""The split that is read of sources that have several."""


@dataclass(frozen=True)
class TrainingData:
    """Labelled comparisons for one run.

    Attributes:
      train: to train on, at least one, with distinct ids.
      validation: held out; empty where there is no validation.
      sources: what each named source is made of, JSON-ready.
      split_by: "user", "id", "data" (sources of its own) or None.
    """

    train: list[Comparison]
    validation: list[Comparison]
    sources: Mapping[str, Any] = field(default_factory=dict)
    split_by: str | None = None


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

    def read(text: str | None, role: str, *, split: str, given: Records | None = None) -> list[Comparison]:
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
        for name in sources(text):
            part = read_comparisons(name, subset=subset, limit=limit, split=split)
            described.setdefault(role, []).append(_describe(name, part, split=split))
            found += part
        _refuse_repeated_ids(found, role)
        return found

    train = read(settings.data, "data", split=SPLIT, given=data)
    held = read(settings.validation.data, "validation.data", split="validation", given=validation)
    test = read(settings.validation.test, "validation.test", split="test")
    split_by = "data" if held else None
    if not held and settings.validation.fraction > 0:
        split_by = split_rule(train, settings.validation)
        train, held = hold_out(train, fraction=settings.validation.fraction, by=split_by)
    _check_boundaries(train, held, test, settings.validation, own_validation=split_by == "data")
    if settings.validation.limit is not None:
        held = evenly(held, settings.validation.limit)
    return TrainingData(train, held, described, split_by)


def split_rule(comparisons: Sequence[Comparison], options: ValidationSettings) -> str:
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

    def key(comparison: Comparison) -> str:
        alone = by == "id" or comparison.user_id is None
        return f"id:{comparison.id}" if alone else f"user:{comparison.user_id}"

    groups = sorted({key(comparison) for comparison in comparisons}, key=_order)
    if len(groups) < 2:
        raise DataError(
            f"validation.fraction={fraction}: the data has {len(comparisons)} comparisons, too few to hold one "
            "out by its " + by + "; validation.fraction=0 trains without validation"
        )
    held = set(groups[: min(max(1, round(fraction * len(groups))), len(groups) - 1)])
    train = [comparison for comparison in comparisons if key(comparison) not in held]
    return train, [comparison for comparison in comparisons if key(comparison) in held]


def user_weights(comparisons: Sequence[Comparison]) -> np.ndarray:
    """float32 [n], mean 1: each user's comparisons weigh the same in sum, one without a user as one user."""
    counts: dict[str, int] = {}
    for comparison in comparisons:
        if comparison.user_id is not None:
            counts[comparison.user_id] = counts.get(comparison.user_id, 0) + 1
    weights = np.asarray(
        [1.0 if one.user_id is None else 1.0 / counts[one.user_id] for one in comparisons], np.float64
    )
    return (weights * (len(weights) / weights.sum())).astype(np.float32)


def evenly(comparisons: Sequence[Comparison], limit: int) -> list[Comparison]:
    """At most `limit` of them, evenly spaced, in order."""
    if len(comparisons) <= limit:
        return list(comparisons)
    return [comparisons[int(i)] for i in np.linspace(0, len(comparisons) - 1, limit).round()]


def _order(name: str) -> bytes:
    return hashlib.sha256(f"validation:{name}".encode()).digest()


def _describe(name: str, comparisons: Sequence[Comparison], *, split: str) -> dict[str, Any]:
    described = describe_source(name, split=split)
    if not described.get("files"):  # only its name is known without reading it
        described["sha256"] = digest(comparisons)
    return described


def _refuse_repeated_ids(comparisons: Sequence[Comparison], role: str) -> None:
    seen: set[str] = set()
    for comparison in comparisons:
        if comparison.id in seen:
            raise DataError(f"{role}: comparison id {quote(comparison.id)} occurs in two of its sources")
        seen.add(comparison.id)


def _check_boundaries(
    train: Sequence[Comparison],
    validation: Sequence[Comparison],
    test: Sequence[Comparison],
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


def _named(*parts: Sequence[Comparison]) -> list[tuple[str, Sequence[Comparison]]]:
    return list(zip(("training", "validation", "test"), parts, strict=True))
