"""What a benchmark is: where its records lie, how they become comparisons, and its rule of scoring."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS, accuracy_interval
from prb_jax.records import fields


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record of a benchmark stands."""

    where: str  # what error messages start with, as "FILE:LINE"
    path: str  # of its file, from the folder that was given on; empty for what ``datasets`` reads
    split: str  # of the data set; empty for files
    number: int  # of the record within its file or split, from 1


@dataclass(frozen=True)
class BenchmarkScore:
    """The result of a benchmark for one model."""

    score: float | None  # its one number; None where the rows do not decide it
    # the numbers it is made of, by the name to show, in the order to show them
    figures: Mapping[str, float | None]
    details: Mapping[str, Any] = field(default_factory=dict)  # everything else, JSON-ready
    missing: Sequence[str] = ()  # subsets that the rule needs and that no row belongs to

    def to_json(self) -> dict[str, Any]:
        """A plain dict; a figure that does not exist is None, never NaN."""
        return _strict(asdict(self))


def numbered(row: ScoredRow, number: int) -> ScoredRow:
    """The row as it stands in a resample, where it may occur several times: id and user have the number of the draw."""
    user = None if row.user_id is None else f"{row.user_id}#{number}"
    return replace(row, id=f"{row.id}#{number}", user_id=user)


Rows = Iterator[tuple[Place, Mapping[str, Any]]]
"""Published rows with their places, each an object."""


@dataclass(frozen=True)
class Published:
    """The data of a benchmark as they are published, for a `Records` function.

    Attributes:
      rows: Rows of the main table, read forward once.
      split: Split that was asked for.
      table: Opens another table by its name in `Benchmark.tables`.
      left_out: Counts rows and choices that give no comparison, by reason; the reader is warned of them.
    """

    rows: Rows
    split: str
    table: Callable[[str], Rows]
    left_out: Counter[str] = field(default_factory=Counter)


Record = Callable[[Mapping[str, Any], Place], Mapping[str, Any]]
Records = Callable[[Published], Iterator[tuple[str, Mapping[str, Any]]]]
"""Yields "FILE:LINE" and a record of ours, whose id is unique."""

EVERY: Final = ("*",)  # in `Benchmark.splits`: all splits of the data set are read

Rule = Callable[[Sequence[ScoredRow]], BenchmarkScore]
Tables = tuple[dict[str, Any], dict[str, list[Any]]]
"""Of the subsets, and of the items by column, as RewardBench's result files hold them."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark: a source and a scoring rule."""

    name: str  # in ``--data``
    rule: str  # what its score is, in a sentence
    score: Rule  # the rule. Its rows are those of this benchmark alone, each once, in any order.
    # whether a row is won, of a rule whose score is the share of rows won; None for a row that does not count.
    # Such a score has an interval where several users judge the same responses
    won: Callable[[ScoredRow], bool | None] | None = None
    # its data set on the hub; None if it has none that can be read without running code
    repository: str | None = None
    # which splits of the data set are read, in this order; empty for the one that is asked for, or `EVERY`
    splits: tuple[str, ...] = ()
    # where a folder holds files of another layout than the hub's, the pattern of their paths
    files: str | None = None
    home: str = ""  # where to get the data, for a benchmark without a repository
    licence: str = ""  # of the data, as far as it is known
    # turns a published record into one of ours (see ``prb_jax.records.comparison``), if it is not one already
    record: Record = lambda row, place: row
    # in its place, for data in which a row gives no record or several, or needs other rows
    records: Records | None = None
    # columns that every published row of `records` has, and records of ours lack
    columns: tuple[str, ...] = ()
    # other tables that `records` reads: the pattern of their paths by the name of their config on the hub
    tables: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None  # config of the main table, for a data set of the hub with several tables
    # makes of the rows and their K conversations as text what runs write as RewardBench's result files
    results: Callable[[Sequence[ScoredRow], Sequence[Sequence[str]]], Tables] | None = None
    # names, without their suffix, of the files that are read; empty for all of ``files``
    topics: tuple[str, ...] = ()
    # which rows without a user are drawn together for the interval of the score; each by itself if not given
    unit: Callable[[ScoredRow], str] = attrgetter("id")
    # a row of the n-th unit drawn, which may be drawn several times
    copy: Callable[[ScoredRow, int], ScoredRow] = numbered


def pair_scores(row: ScoredRow) -> tuple[float, float]:
    """(chosen, rejected) scores of a row with two responses.

    Raises:
      DataError: for a row with more of them, with equal labels, or with scores that are not finite.
    """
    check_finite(row)
    if len(row.scores) != 2 or len(row.labels) != 2:
        raise DataError(f"row {quote(row.id)}: expected a pair, found {len(row.scores)} responses")
    first, second = row.scores
    if row.labels[0] == row.labels[1]:
        raise DataError(f"row {quote(row.id)}: labels {list(row.labels)} prefer no response over another")
    return (first, second) if row.labels[0] > row.labels[1] else (second, first)


def check_finite(row: ScoredRow) -> None:
    """Raise DataError, which names the row, for scores that are not finite."""
    for k, value in enumerate(row.scores):
        if not math.isfinite(value):
            raise DataError(f"row {quote(row.id)}: scores[{k}] is {value}; expected a finite number")


def is_won(row: ScoredRow) -> bool:
    """Whether the chosen response of a pair scores strictly above the rejected one: a tie is a loss."""
    chosen, rejected = pair_scores(row)
    return chosen > rejected


def by_subset(rows: Iterable[ScoredRow]) -> dict[str, list[ScoredRow]]:
    """The rows of each subset, in order of first appearance.

    Raises:
      DataError: for a row without a subset.
    """
    groups: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if row.subset is None:
            raise DataError(f"row {quote(row.id)}: no subset, which this benchmark's rule needs")
        groups.setdefault(row.subset, []).append(row)
    return groups


def mean(values: Iterable[float]) -> float | None:
    """The mean, independent of the order of the values; None of nothing."""
    known = list(values)
    return math.fsum(known) / len(known) if known else None


def better_first(row: Mapping[str, Any], place: Place, *, better: str, worse: str) -> dict[str, Any]:
    """``responses`` and ``labels`` of a record with a list of good and a list of bad responses.

    Raises:
      DataError: one of the two fields is not a list, or is empty.
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

    Within each subset as many units are drawn with replacement as it has. A unit is a user where there are users, else
    what the benchmark says, usually a comparison. If a user has rows in several subsets, users are drawn from all of
    them together. The ends are the 2.5th and the 97.5th percentile.

    Draws by user are too narrow if several users judge the same responses. The interval is then that of an accuracy,
    over users and responses, if the benchmark says which rows are `won`; otherwise there is none. Figures have none.

    Args:
      clusters: Users and responses of the rows in turn.
      seed: of the draws; the same rows in any order, with the same seed, have the same intervals.
      resamples: how often the rows are drawn.
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
        reason = f"{units} units to draw from; an interval needs at least {LEAST_CLUSTERS}"
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
    """The rows by subset and unit, in an order that does not depend on theirs."""
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
    """Contents of the two files by their path, for JSON with sorted keys and an indent of 4.

    Args:
      tables: of a benchmark, as its `results` makes them.
      model: name of the model; one that is no hub id is filed under the organisation "local", and a
        baseline under "baseline".
      model_type: as "Seq. Classifier".
      chat_template: hash of the template that was used; None for a model without one.
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
