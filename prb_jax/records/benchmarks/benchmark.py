"""Definition of a benchmark: location of its records, their conversion to comparisons, and its scoring rule."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, counted, quote
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS, accuracy_interval
from prb_jax.records import fields


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a benchmark's record."""

    where: str  # start of error messages, e.g. "FILE:LINE"
    path: str  # path of the file relative to the given folder; empty for data read by ``datasets``
    split: str  # split of the data set; empty for files
    number: int  # number of the record within its file or split, from 1


@dataclass(frozen=True)
class BenchmarkScore:
    """The result of a benchmark for one model."""

    score: float | None  # the benchmark's number; None if the rows do not determine it
    # numbers that make up the score, by display name and in display order
    figures: Mapping[str, float | None]
    details: Mapping[str, Any] = field(default_factory=dict)  # everything else, JSON-ready
    missing: Sequence[str] = ()  # required subsets without rows

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict; an undefined figure is None, never NaN."""
        return _strict(asdict(self))


def numbered(row: ScoredRow, number: int) -> ScoredRow:
    """Return the row for a resample, where it can occur several times, with the draw's number in id and user."""
    user = None if row.user_id is None else f"{row.user_id}#{number}"
    return replace(row, id=f"{row.id}#{number}", user_id=user)


Rows = Iterator[tuple[Place, Mapping[str, Any]]]
"""Published rows with their places, each an object."""


@dataclass(frozen=True)
class Published:
    """The published data of a benchmark, for a `Records` function.

    Attributes:
      rows: Rows of the main table, read forward once.
      split: Split that was asked for.
      table: Opens another table by its name in `Benchmark.tables`.
      left_out: Counts rows and choices that give no comparison, by reason; the reader is warned of them.
      cleaned: Counts texts that are read without a mark of the data set, by mark; in the same warning.
    """

    rows: Rows
    split: str
    table: Callable[[str], Rows]
    left_out: Counter[str] = field(default_factory=Counter)
    cleaned: Counter[str] = field(default_factory=Counter)


Record = Callable[[Mapping[str, Any], Place], Mapping[str, Any]]
Records = Callable[[Published], Iterator[tuple[str, Mapping[str, Any]]]]
"""Yields "FILE:LINE" and a record of ours, whose id is unique."""

EVERY: Final = ("*",)  # in `Benchmark.splits`: all splits of the data set are read

Rule = Callable[[Sequence[ScoredRow]], BenchmarkScore]
Tables = tuple[dict[str, Any], dict[str, list[Any]]]
"""Contents of RewardBench's two result files: numbers by subset, and columns of items."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark: a source and a scoring rule."""

    name: str  # name for ``--data``
    rule: str  # definition of the score, one sentence
    score: Rule  # computes the score from the rows of this benchmark, each once, in any order
    # whether a row is won, if the score is the share of rows won; returns None for a row that does not count. Such a
    # score has an interval if several users judge the same responses
    won: Callable[[ScoredRow], bool | None] | None = None
    # data set on the hub; None if there is none that can be read without running code
    repository: str | None = None
    # splits to read, in this order; empty for the requested split; or `EVERY`
    splits: tuple[str, ...] = ()
    # pattern of paths in a folder with another layout than the hub's
    files: str | None = None
    home: str = ""  # where to get the data, for a benchmark without a repository
    licence: str = ""  # licence of the data, if known
    # converts a published record to our schema (see ``prb_jax.records.comparison``), if it differs
    record: Record = lambda row, place: row
    # replaces `record` for data in which a row gives zero or several records, or needs other rows
    records: Records | None = None
    # columns that every published row of `records` has, and records of ours lack
    columns: tuple[str, ...] = ()
    # other tables that `records` reads: the pattern of their paths by the name of their config on the hub
    tables: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None  # config of the main table, for a data set of the hub with several tables
    # builds RewardBench's result files from the rows and the texts of their K conversations
    results: Callable[[Sequence[ScoredRow], Sequence[Sequence[str]]], Tables] | None = None
    # names of files to read, without suffix; empty for all of ``files``
    topics: tuple[str, ...] = ()
    # unit of a row without a user, for draws of score intervals; by default each row is a unit
    unit: Callable[[ScoredRow], str] = attrgetter("id")
    # returns a copy of a row for the n-th draw, because a unit can be drawn several times
    copy: Callable[[ScoredRow, int], ScoredRow] = numbered


def pair_scores(row: ScoredRow) -> tuple[float, float]:
    """Return the (chosen, rejected) scores of a row with two responses.

    Raises:
      DataError: The row is not a pair, has equal labels, or has scores that are not finite.
    """
    check_finite(row)
    if len(row.scores) != 2 or len(row.labels) != 2:
        raise DataError(f"row {quote(row.id)}: expected a pair, found {len(row.scores)} responses")
    first, second = row.scores
    if row.labels[0] == row.labels[1]:
        raise DataError(f"row {quote(row.id)}: labels {list(row.labels)} prefer no response over another")
    return (first, second) if row.labels[0] > row.labels[1] else (second, first)


def check_finite(row: ScoredRow) -> None:
    """Raise DataError, naming the row, for infinite or NaN scores."""
    for k, value in enumerate(row.scores):
        if not math.isfinite(value):
            raise DataError(f"row {quote(row.id)}: scores[{k}] is {value}; expected a finite number")


def is_won(row: ScoredRow) -> bool:
    """Return True if the chosen response of a pair scores strictly above the rejected one: a tie is a loss."""
    chosen, rejected = pair_scores(row)
    return chosen > rejected


def by_subset(rows: Iterable[ScoredRow]) -> dict[str, list[ScoredRow]]:
    """Return the rows of each subset, in order of first appearance.

    Raises:
      DataError: A row lacks a subset.
    """
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if row.subset is None:
            raise DataError(f"row {quote(row.id)}: no subset, which this benchmark's rule needs")
        groups.setdefault(row.subset, []).append(row)
    return groups


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, independent of the order of the values; None without values."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def better_first(row: Mapping[str, Any], place: Place, *, better: str, worse: str) -> dict[str, Any]:
    """Return ``responses`` and ``labels`` of a record with a list of good and a list of bad responses.

    Raises:
      DataError: One of the two fields is not a list, or is empty.
    """
    texts = []
    for name in (better, worse):
        items = fields.sequence(row.get(name), place.where, name)
        if not items:
            fields.fail(place.where, name, "no responses; expected at least one")
        texts.append(items)
    good, bad = texts
    return {"responses": [*good, *bad], "labels": [1.0] * len(good) + [0.0] * len(bad)}


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def score_intervals(
    benchmark: Benchmark,
    rows: Sequence[ScoredRow],
    clusters: Clusters,
    *,
    seed: int,
    resamples: int,
) -> dict[str, Any]:
    """Return "score_ci95", "score_ci95_reason" and "figures_ci95" of one benchmark.

    Units are drawn with replacement within each subset, as many as it has. A unit is a user, or for rows without
    a user `Benchmark.unit`, usually a comparison. If a user has rows in several subsets, units are drawn from all
    subsets together. The ends are the 2.5th and the 97.5th percentile.

    Draws by user are too narrow if several users judge the same responses. If the benchmark defines `won`, the
    interval is then that of an accuracy over users and responses; otherwise there is none, and none for figures.

    Args:
      benchmark: Benchmark with the rule.
      rows: Rows of the benchmark.
      clusters: User and responses of each row.
      seed: Seed of the draws; the same rows in any order, with the same seed, give the same intervals.
      resamples: Number of resamples.
    """
    score = benchmark.score(rows)
    if clusters.responses is not None:
        figures = dict.fromkeys(score.figures)
        return {**_crossed_interval(benchmark, rows, score, clusters), "figures_ci95": figures}
    strata = _strata(benchmark, rows, clusters.users)
    units = sum(len(members) for members in strata)
    reason = None
    if score.score is None:
        reason = "the score is not defined"
    elif units < LEAST_CLUSTERS:
        reason = f"{counted(units, 'unit')} to draw from; an interval needs at least {LEAST_CLUSTERS}"
    elif any(len(members) < 2 for members in strata):
        reason = "a subset with a single unit has nothing to draw from"
    if reason is not None:
        return {
            "score_ci95": None,
            "score_ci95_reason": reason,
            "figures_ci95": dict.fromkeys(score.figures),
        }
    rng = np.random.default_rng(seed)
    drawn = [benchmark.score(_draw(benchmark, strata, rng)) for _ in range(resamples)]
    bounds = _bounds([redrawn.score for redrawn in drawn])
    return {
        "score_ci95": bounds,
        "score_ci95_reason": None if bounds else "all draws give one score",
        "figures_ci95": {
            name: _bounds([redrawn.figures.get(name) for redrawn in drawn]) for name in score.figures
        },
    }


def _crossed_interval(
    benchmark: Benchmark, rows: Sequence[ScoredRow], score: BenchmarkScore, clusters: Clusters
) -> dict[str, Any]:
    """The interval of a score where several users judge the same responses."""
    if score.score is None:
        return {"score_ci95": None, "score_ci95_reason": "the score is not defined"}
    if benchmark.won is None:
        reason = "several users judge the same responses, and the score is not a share of rows won"
        return {"score_ci95": None, "score_ci95_reason": f"{reason}: draws by user would be too narrow"}
    won = [benchmark.won(row) for row in rows]
    counted = [place for place, one in enumerate(won) if one is not None]
    wins = np.array([won[place] for place in counted], bool)
    return accuracy_interval(wins, clusters.take(counted)).to_json("score_ci95")


def _strata(
    benchmark: Benchmark, rows: Sequence[ScoredRow], users: Sequence[str | None]
) -> list[list[list[ScoredRow]]]:
    """Return the rows by subset and unit, in an order that does not depend on the order of `rows`."""
    subset_of: dict[str, str | None] = {}
    nested = all(
        user is None or subset_of.setdefault(user, row.subset) == row.subset
        for row, user in zip(rows, users, strict=True)
    )
    strata: dict[str, dict[str, list[ScoredRow]]] = {}
    for row, user in sorted(zip(rows, users, strict=True), key=lambda pair: pair[0].id):
        unit = benchmark.unit(row) if user is None else user
        strata.setdefault((row.subset or "") if nested else "", {}).setdefault(unit, []).append(row)
    return [list(strata[name].values()) for name in sorted(strata)]


def _draw(
    benchmark: Benchmark, strata: Sequence[Sequence[Sequence[ScoredRow]]], rng: np.random.Generator
) -> list[ScoredRow]:
    rows: list[ScoredRow] = []
    number = 0
    for members in strata:
        for place in rng.integers(len(members), size=len(members)).tolist():
            rows += [benchmark.copy(row, number) for row in members[place]]
            number += 1
    return rows


def _bounds(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None and np.isfinite(value)]
    if len(known) < len(values) or min(known) == max(known):
        return None
    low, high = np.quantile(known, [0.025, 0.975])
    return [float(low), float(high)]


# RewardBench's two result files, in the layout that its leaderboard tools read: AGGREGATES/ORG/MODEL.json holds one
# number for each subset, SCORES/ORG/MODEL.json the columns of a table with a row for each item.
AGGREGATES: Final = "eval-set"
SCORES: Final = "eval-set-scores"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def result_files(
    tables: Tables, *, model: str, model_type: str, chat_template: str | None
) -> dict[str, dict[str, Any]]:
    """Return the contents of the two files by path, for JSON with sorted keys and an indent of 4.

    Args:
      tables: Result of the benchmark's `results`.
      model: Name of the model. A name other than a hub id gets the organisation "local", a baseline "baseline".
      model_type: Type of the model, e.g. "Seq. Classifier".
      chat_template: Hash of the chat template; None for a model without one.
    """
    name = organisation_and_name(model)
    facts = {"model": name, "model_type": model_type, "chat_template": chat_template}
    aggregates, columns = tables
    return {
        f"{AGGREGATES}/{name}.json": {**aggregates, **facts},
        f"{SCORES}/{name}.json": {**columns, **facts},
    }


def organisation_and_name(model: str) -> str:
    """ "ORG/MODEL", which is also the path of the files, for a model of any name."""
    if _HUB_ID.fullmatch(model):
        return model
    organisation, colon, name = model.rpartition(":")
    if colon and organisation == "baseline":
        return f"{organisation}/{name}"
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return f"local/{re.sub(r'[^A-Za-z0-9_.-]', '_', last).lstrip('.') or 'model'}"
