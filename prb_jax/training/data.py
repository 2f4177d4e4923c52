"""Data of a run: training data, validation data, and the comparisons of each step."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from prb_jax.errors import DataError, RunError, listed, quote
from prb_jax.personal.method import OfUser
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records, describe_source, digest, read_comparisons
from prb_jax.records.items import Held, Items
from prb_jax.records.sources.whole import find_comparisons
from prb_jax.seams import get
from prb_jax.training.config import TrainSettings, ValidationSettings
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.scoring.large_table import TableRow

SPLIT = "train"
"""Split to read from sources that have several."""

Row: TypeAlias = "Comparison | TableRow"
"""A comparison, or its fields without the texts."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Comparisons of one role: training, validation or test. Training comparisons also get tokens."""

    comparisons: Items[Any]
    known: Items[Any]  # a `Row` for each comparison: its fields without the texts
    # the folder of prepared tokens that all comparisons come from, and its split; None without one
    prepared: tuple[Path, str] | None = None
    sources: Sequence[Mapping[str, Any]] = ()  # contents of each named source, JSON-ready
    trees: Items[Tree] = field(default_factory=Held[Tree])  # tokens of each comparison, once encoded
    # float32 [n], weight of each comparison in the loss; all 1 by default
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    # int32 [n], row of each comparison's user in the method of personalisation; by default 0, the generic user
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if self.trees and not len(self.weights):
            object.__setattr__(self, "weights", np.ones(len(self.trees), np.float32))
        if self.trees and not len(self.rows):
            object.__setattr__(self, "rows", np.zeros(len(self.trees), np.int32))

    def __len__(self) -> int:
        return len(self.known)

    def at(self, places: np.ndarray) -> Examples:
        """Return the comparisons at these indices."""
        return Examples(self.comparisons.at(places), self.known.at(places), self.prepared)


@dataclass(frozen=True)
class TrainingData:
    """Labelled comparisons for one run."""

    train: Examples  # at least one comparison; ids are distinct
    validation: Examples  # held out; empty in a run without validation
    sources: Mapping[str, Any]  # contents of each named source, JSON-ready
    split_by: str | None  # "user", "id", "data" (separate sources) or None


def read_training_data(
    settings: TrainSettings, *, data: Records | None = None, validation: Records | None = None
) -> TrainingData:
    """Read and split the data of a run.

    Args:
      settings: Settings of the run.
      data, validation: Records that replace the sources named in the settings.

    Raises:
      RunError: A role has both records and the name of a source.
      DataError: `read_comparisons` fails, e.g. on equal labels; a split is empty; or two splits share ids or users
        that must not be shared.
    """
    options, split_by = settings.validation, None
    subset = settings.subset
    train = read_examples(settings.data, "data", subset=subset, limit=settings.limit, given=data)
    held = read_examples(options.data, "validation.data", split="validation", subset=subset, given=validation)
    test = read_examples(options.test, "validation.test", split="test")
    roles = {"data": train, "validation.data": held, "validation.test": test}
    sources = {role: part.sources for role, part in roles.items() if part.sources}
    if len(held):
        split_by = "data"
    elif options.fraction > 0:
        split_by = _split_rule(train.known, options)
        out = _held_out(train.known, fraction=options.fraction, by=split_by)
        train, held = train.at(np.flatnonzero(~out)), train.at(np.flatnonzero(out))
    known = {"training": train.known, "validation": held.known, "test": test.known}
    _check_boundaries(known, options, own_validation=split_by == "data")
    get("training", "same contents").value(train, {"validation": held, "test": test})
    if options.limit is not None and len(held) > options.limit:
        held = held.at(np.linspace(0, len(held) - 1, options.limit).round().astype(np.int64))
    return TrainingData(train, held, sources, split_by)


def read_examples(
    text: str | None,
    role: str,
    *,
    split: str = SPLIT,
    subset: str | None = None,
    limit: int | None = None,
    given: Records | None = None,
) -> Examples:
    """Read the comparisons of one role of a run.

    Args:
      text: Names of sources.
      role: Config key that names them.
      split: Split to read from sources with several splits.
      subset: Only this subset of each source.
      limit: Most comparisons of each source.
      given: Records that replace named sources.

    Raises:
      RunError: Both records and the name of a source are given.
      DataError: `read_comparisons` fails, or an id occurs in two sources.
    """
    comparisons = Held[Comparison]()
    sources: list[Mapping[str, Any]] = []
    if given is not None:
        if text:
            raise RunError(f"config key '{role}': names {quote(text)}, but records are given instead")
        comparisons = Held(read_comparisons(given, subset=subset, limit=limit))
        sources = [{"kind": "records", "sha256": digest(comparisons)}]
    parts = [(name, find_comparisons(name, subset=subset, limit=limit, split=split)) for name in _named(text)]
    for name, part in parts:
        about = describe_source(name, split=split)
        if not about.get("files"):  # without files, only the contents identify the source
            about["sha256"] = digest(part)
        sources.append(about)
    if not all(part.in_memory for _, part in parts):
        read = get("large data", "train").value(parts, subset=subset, limit=limit, split=split)
        return replace(read, sources=sources)
    comparisons += [comparison for _, part in parts for comparison in part]
    refuse_repeated_ids(comparisons, role)
    return Examples(comparisons, comparisons, sources=sources)


def _named(text: str | None) -> list[str]:
    """Return the source names in a setting, separated by commas."""
    if text and Path(text).exists():  # a path may contain commas
        return [text]
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _split_rule(comparisons: Sequence[Row], options: ValidationSettings) -> str:
    """Resolve `validation.by` for these comparisons: "user" or "id"."""
    users = {comparison.user_id for comparison in comparisons if comparison.user_id is not None}
    if options.by == "user" and len(users) < 2:
        raise DataError(
            f"validation.by=user: the data has {len(users)} users, expected at least 2 to hold one out; "
            "validation.by=id splits by comparison"
        )
    return ("user" if len(users) >= 2 else "id") if options.by == "auto" else options.by


def _held_out(comparisons: Sequence[Row], *, fraction: float, by: str) -> np.ndarray:
    """Return a mask, bool [n], of held-out comparisons: whole users (`by` "user") or single comparisons ("id").

    The choice depends only on names, not on a seed, the order or the process: runs with different seeds
    validate on the same comparisons. At least one is held out and at least one remains. A comparison
    without a user counts as a separate user.
    """

    def key(comparison: Row) -> str:
        alone = by == "id" or comparison.user_id is None
        return f"id:{comparison.id}" if alone else f"user:{comparison.user_id}"

    def order(name: str) -> bytes:
        return hashlib.sha256(f"validation:{name}".encode()).digest()

    groups = sorted({key(comparison) for comparison in comparisons}, key=order)
    if len(groups) < 2:
        raise DataError(
            f"validation.fraction={fraction}: the data has {len(comparisons)} comparisons, too few to hold one "
            f"out by its {by}; validation.fraction=0 trains without validation"
        )
    held = set(groups[: min(max(1, round(fraction * len(groups))), len(groups) - 1)])
    return np.fromiter((key(comparison) in held for comparison in comparisons), bool, len(comparisons))


def refuse_repeated_ids(comparisons: Sequence[Row], role: str) -> None:
    seen: set[str] = set()
    for comparison in comparisons:
        if comparison.id in seen:
            raise DataError(f"{role}: comparison id {quote(comparison.id)} occurs in two of its sources")
        seen.add(comparison.id)


def _check_boundaries(
    roles: Mapping[str, Sequence[Row]], options: ValidationSettings, *, own_validation: bool
) -> None:
    """Reject ids in two roles, and validation users in the test data or (separate sources) in the training data."""
    pairs = [("ids", "training", "validation"), ("ids", "training", "test"), ("ids", "validation", "test")]
    if not options.shared_users:
        pairs += [("users", "validation", "test")]
        pairs += [("users", "training", "validation")] if own_validation else []
    fields = {"ids": ("id", "each comparison may be in one of them")}
    fields["users"] = ("user_id", "validation.shared_users=true allows it")
    for kind, first, second in pairs:
        name, remedy = fields[kind]
        values = [{getattr(one, name) for one in roles[role]} - {None} for role in (first, second)]
        if shared := values[0] & values[1]:
            names = listed([quote(value) for value in sorted(shared)])
            raise DataError(
                f"the {first} and the {second} data share {len(shared)} {kind} ({names}); {remedy}"
            )


def user_weights(comparisons: Sequence[OfUser]) -> np.ndarray:
    """Return weights, float32 [n], mean 1: equal sums per user; a comparison without a user is a separate user."""
    counts = Counter(comparison.user_id for comparison in comparisons)
    weights = np.asarray(
        [1.0 if one.user_id is None else 1.0 / counts[one.user_id] for one in comparisons], np.float64
    )
    return (weights * (len(weights) / weights.sum())).astype(np.float32)


class Order:
    """Order of comparisons: step s takes positions [s * B, (s + 1) * B) of an endless stream.

    The stream repeats the data, each epoch in a random order that depends only on (seed, epoch). Runs on different
    meshes or numbers of processes therefore see the same comparisons in the same steps. A continued run needs only
    its step number.

    Args:
      count: Number of comparisons in the data.
      per_step: B, comparisons per step; an upper limit in :class:`prb_jax.training.user_order.UserOrder`.
      seed: Seed of the order.
    """

    split: int | None = (
        None  # number of users whose comparisons are in several steps; None if users are not read
    )

    def __init__(self, count: int, per_step: int, seed: int) -> None:
        self.count, self.per_step, self.seed = count, per_step, seed

    def step(self, step: int) -> np.ndarray:
        """Return the comparisons of one step (from 0) as indices, int64 [at most B]."""
        positions = np.arange(step * self.per_step, (step + 1) * self.per_step)
        epochs = positions // self.count
        members = np.empty(self.per_step, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            members[chosen] = permutation(self.count, self.seed, int(epoch))[positions[chosen] % self.count]
        return members

    def seen(self, step: int) -> int:
        """Return the number of comparisons in all earlier steps."""
        return step * self.per_step

    def epoch_of(self, step: int) -> float:
        """Return the number of epochs completed before this step, a fraction included."""
        return self.seen(step) / self.count


@functools.lru_cache(maxsize=2)  # a step touches one epoch, or the end of one and the start of the next
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of one epoch, int64 [count], a pure function of the arguments."""
    # Philox is defined by its counter: equal on all platforms and versions, with independent streams per epoch.
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return np.argsort(generator.random(count), kind="stable")
