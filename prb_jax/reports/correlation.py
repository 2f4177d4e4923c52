"""`prb correlate`: does a benchmark predict a behaviour? Reads finished runs of both, joined by reward model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, RunError, counted, quote, short_repr
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.paired import HALF, TIES, add_holm
from prb_jax.metrics.prediction import (
    LEAST_MODELS,
    PREDICTION_DEFINITIONS,
    RESOLVED_FROM,
    Cells,
    Resampled,
    cluster_mean,
    cluster_quantile,
    draw_weights,
    part_quantile,
    pooled,
    predict,
)
from prb_jax.metrics.rank_measures import RBO_P, tau_error
from prb_jax.metrics.uncertainty import LEAST_CLUSTERS, grade_interval
from prb_jax.platform.extras import has_extra
from prb_jax.records.reading import read_object
from prb_jax.records.writing import refuse_file, write_json
from prb_jax.reports.comparison import check_comparable, named_runs
from prb_jax.reports.correlation_power import POWER_DEFINITIONS, RANDOM, behaviour_cells, gate, is_upper_bound
from prb_jax.reports.correlation_power import plan as plan_study
from prb_jax.reports.correlation_shown import CORRELATE, PICTURE, draw_correlation
from prb_jax.runs.behaviour import Figure, cluster_of, pool, read_behaviour, reward_identity
from prb_jax.runs.finished import FinishedRun, read_finished
from prb_jax.scoring import UPPER_BOUND
from prb_jax.scoring.prompt_extras import told_of

_NEEDED: Final = {"user_accuracy": "users", "user_quantile": "users", "subset_quantile": "subsets"}
"""Benchmark figures, and the part of the data of which each needs at least two."""

_FIGURES: Final = {
    "accuracy": "(strict wins + ties / 2) / comparisons; with --ties loss a tie counts nothing, here and in the other "
    "figures of the benchmark",
    "user_accuracy": "mean over users of their accuracies",
    "user_quantile": "quantile over users of their accuracies, see parameters",
    "subset_quantile": "quantile over subsets of their accuracies, see parameters",
    "repetitions": "the figure of each seed, where there are several; the figure is the mean over all their texts, and "
    "intervals are over users, not over seeds",
    "lineage": "architecture of the reward model, or its --lineage; same_as_policy: whether it is the policy's",
    **PREDICTION_DEFINITIONS,
    **POWER_DEFINITIONS,
    "ci95_reason": "why there is no interval; accuracies have the intervals of summary.json, all other figures those "
    "over draws, and none below six users or where every draw gives the same",
}


@dataclass(frozen=True)
class _Behaviour:
    """One figure of the behaviour under several reward models, by identity, and the lineage of the policy. Repetitions
    are pooled, and their values kept."""

    name: str
    policy: str | None
    figures: dict[str, Figure]
    repeated: dict[str, list[float]]

    __repr__ = short_repr


def correlate(
    scores: Sequence[str | Path],
    behaviour: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    lineage: str | Path | None = None,
    figures: Sequence[str] | None = None,
    quantile: float = 0.1,
    draws: int = 2000,
    seed: int = 0,
    ties: str = HALF,
    start: float | Mapping[str, float] | None = None,
    least_gain: float = 0.0,
    plan: bool = False,
) -> dict[str, Any]:
    """Correlate benchmark figures of reward models with figures of behaviour, with intervals and permutation tests.

    Args:
      scores: Run folders of `prb evaluate`, one for each reward model, on the same data.
      behaviour: Run folders with a ``behaviour.json``: from `prb best-of-n`, `prb policy-accuracy`, `prb guide`,
        `prb ppo`.
      out: Folder for `correlate.json` and `correlate.png`; without a folder nothing is written.
      lineage: JSON file {name of a score run: lineage}, to replace the architecture as lineage.
      figures: Benchmark figures to correlate, e.g. "accuracy"; by default all that the data support.
      quantile: Quantile over users and subsets, above 0 and at most 0.5.
      draws: Number of draws of users, for the intervals of figures.
      seed: Seed of the draws.
      ties: Value of a tie in benchmark figures: half a win ("half"), so coarse scores do not look worse than fine ones,
        or nothing ("loss").
      start: Behaviour before any learning, for the gate: one number for all, or by behaviour; by default the behaviour
        under baseline:random as the reward.
      least_gain: Minimum gain of the upper bound over the start, in addition to an interval above 0. If it is not
        reached, no correlation is computed.
      plan: Report how many models and prompts resolve a correlation of 0.3, 0.5 and 0.8.

    Returns:
      The contents of `correlate.json`; its "definitions" explain them.

    Raises:
      RunError: a run is missing, not finished or of another kind; runs have different data; fewer than three reward
        models are in both.
      DataError: a number is out of range.
    """
    if not 0 < quantile <= 0.5:
        raise DataError(f"quantile: expected above 0 and at most 0.5, found {quantile}")
    if draws < 100 or seed < 0:
        raise DataError(f"expected at least 100 draws and a seed of at least 0, found {draws} and {seed}")
    if ties not in TIES:
        raise DataError(f"ties: expected one of {', '.join(TIES)}, found {quote(ties)}")
    if out is not None:
        refuse_file(out)
    runs = _read_scores(scores)
    grades = {name: _grades(run, ties) for name, run in runs.items()}
    names = {_identity(run): name for name, run in runs.items()}
    behaviours = _group([(Path(folder), figure) for folder in behaviour for figure in read_behaviour(folder)])
    lineages = _lineages(runs, lineage)
    users = _clusters(next(iter(runs.values())))
    clusters = dict.fromkeys(users)
    for one in behaviours:
        clusters |= dict.fromkeys(cluster for figure in one.figures.values() for cluster in figure.clusters)
    places = {cluster: place for place, cluster in enumerate(clusters)}
    weights = draw_weights(len(places), draws=draws, seed=seed)
    benchmark = _benchmark(runs, grades, places, weights, quantile=quantile)
    for name in figures or ():
        if name not in benchmark:
            raise DataError(f"figures: expected some of {', '.join(benchmark)}, found {quote(name)}")
    models: dict[str, dict[str, Any]] = {}
    for name, run in runs.items():
        about = {"name": name, "model": run.record.get("model"), "lineage": lineages[name]}
        models[name] = {**about, "benchmark": {}, "behaviour": {}}
    for figure, sample in benchmark.items():
        intervals = _standard_intervals(runs, grades, figure) or _intervals(sample, len(set(users)))
        for model, value, bounds in zip(models.values(), sample.values, intervals, strict=True):
            model["benchmark"][figure] = {"value": float(value), **bounds}
    if isinstance(start, Mapping) and (unknown := start.keys() - {one.name for one in behaviours}):
        known = ", ".join(one.name for one in behaviours)
        raise DataError(f"start: expected behaviours, some of {known}, found {quote(min(unknown))}")
    correlations, missing, gates, plans, verdicts = [], [], {}, {}, {}
    for one in behaviours:
        origin = start.get(one.name) if isinstance(start, Mapping) else start
        everything = list(one.figures.values())
        gates[one.name] = gate(everything, places, weights, start=origin, least_gain=least_gain)
        known = {names[key]: figure for key, figure in one.figures.items() if key in names}
        strangers = [figure for key, figure in one.figures.items() if key not in names]
        missing += [
            {"behaviour": one.name, "reward_model": figure.label}
            for figure in strangers
            if not is_upper_bound(figure) and figure.label != RANDOM
        ]
        if len(known) < LEAST_MODELS:
            raise RunError(
                f"{one.name}: expected at least {LEAST_MODELS} reward models that are also in --scores, found "
                f"{len(known)}: {', '.join(known) or 'none'}; only in --behaviour: "
                f"{', '.join(figure.label for figure in strangers) or 'none'}"
            )
        columns = [place for place, name in enumerate(runs) if name in known]
        measured = [known[name] for name in runs if name in known]
        judged = [models[name] for name in runs if name in known]
        sample = pooled(behaviour_cells(measured, places), weights)
        people = min(len(set(figure.clusters)) for figure in measured)
        for model, value, bounds in zip(judged, sample.values, _intervals(sample, people), strict=True):
            model["behaviour"][one.name] = {
                "value": float(value),
                **bounds,
                "repetitions": one.repeated[_identity(runs[model["name"]])],
                "same_as_policy": None if one.policy is None else one.policy == model["lineage"],
            }
        accuracies = [model["benchmark"]["accuracy"]["value"] for model in judged]
        verdicts[one.name] = f"{_verdict(accuracies)}.\n{gates[one.name]['reason']}"
        prompts = min(sum(figure.counts) for figure in measured)
        for figure in benchmark if figures is None else dict.fromkeys(figures):
            part = Resampled(benchmark[figure].values[columns], benchmark[figure].draws[:, columns])
            if plan:
                plans.setdefault(one.name, {})[figure] = plan_study(part, sample, prompts=prompts, seed=seed)
            if gates[one.name]["passed"] is False:
                continue
            measures = predict(part, sample, seed=seed)
            for measure in (*measures.values(), measures["pearson"]["without_noise"]):
                if measure is not None:
                    measure |= _shown_interval(measure["ci95"], people, undefined="too few models")
            about = {"behaviour": one.name, "benchmark": figure, "models": len(measured)}
            correlations.append({**about, "policy": one.policy, "measures": measures})
    add_holm([measure for part in correlations for measure in part["measures"].values()])
    result = {
        "models": list(models.values()),
        "correlations": correlations,
        "unmatched": {
            "scores": [name for name, model in models.items() if not model["behaviour"]],
            "behaviour": missing,
        },
        "verdicts": verdicts,
        "gates": gates,
        "plans": plans,
        "parameters": {"quantile": quantile, "rbo_p": RBO_P, "draws": draws, "seed": seed, "ties": ties},
        "not_shown": {
            name: f"the data have fewer than two {parts}"
            for name, parts in _NEEDED.items()
            if name not in benchmark
        },
        "definitions": _FIGURES,
    }
    if out is not None:
        write_json(Path(out) / CORRELATE, result)
        if correlations and has_extra("report", PICTURE):
            draw_correlation(Path(out) / PICTURE, result)
    return result


def _grades(run: FinishedRun, ties: str) -> np.ndarray:
    """Return 1 for a win and 0 for a loss, float64 [n]; a tie has 0.5 or 0."""
    result = outcomes(run.rows)
    return result.wins + (0.5 if ties == HALF else 0.0) * result.ties


def _standard_intervals(
    runs: Mapping[str, FinishedRun], grades: Mapping[str, np.ndarray], figure: str
) -> list[dict[str, Any]] | None:
    """Return the intervals of accuracies, computed as in every other verb; None for other figures."""
    if figure not in ("accuracy", "user_accuracy"):
        return None
    intervals = []
    for name, run in runs.items():
        of_run, clusters, per_user = grades[name], run.clusters, figure == "user_accuracy"
        if per_user:
            with_user = [place for place, user in enumerate(clusters.users) if user is not None]
            of_run, clusters = of_run[with_user], clusters.take(with_user)
        intervals.append(grade_interval(of_run, clusters, per_user=per_user).to_json())
    return intervals


def _intervals(sample: Resampled, clusters: int) -> list[dict[str, Any]]:
    return [_shown_interval(bounds, clusters) for bounds in sample.intervals()]


def _shown_interval(
    bounds: Sequence[float] | None, clusters: int, *, undefined: str = "not defined in half of the draws"
) -> dict[str, Any]:
    """Return an interval over draws of users, if it has a width and at least six clusters, like all others."""
    reason = None
    if clusters < LEAST_CLUSTERS:
        reason = f"{counted(clusters, 'user')}; an interval needs at least {LEAST_CLUSTERS}"
    elif bounds is None:
        reason = undefined
    elif bounds[0] == bounds[1]:
        reason = "the same in every draw, so nothing is known about other users"
    return {"ci95": None if reason else bounds, "ci95_reason": reason}


def _identity(run: FinishedRun) -> str:
    """Return a key that identifies the reward model of a run of `prb evaluate`."""
    return _key(reward_identity(run.record["inputs"]["model"]))


def _key(identity: Mapping[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _read_scores(folders: Sequence[str | Path]) -> dict[str, FinishedRun]:
    if not folders:
        raise RunError("scores: expected runs of `prb evaluate`, found none")
    runs = {name: read_finished(path) for name, path in named_runs([Path(path) for path in folders]).items()}
    first, reference = next(iter(runs.items()))
    seen: dict[str, str] = {}
    for name, run in runs.items():
        hints = run.record["inputs"].get("hints") or {}
        if UPPER_BOUND in hints:
            raise RunError(f"{name}: was told {told_of(hints)}, so it is not a benchmark figure; remove it")
        if UPPER_BOUND in run.record["inputs"]["model"]:
            raise RunError(f"{name}: is an upper bound, not a benchmark figure; remove it")
    for name, run in runs.items():
        if name != first:  # each model is scored as in its training, so protocols may differ
            check_comparable(first, reference, name, run, across_protocols=True)
        if (other := seen.setdefault(_identity(run), name)) != name:
            raise RunError(f"{other} and {name}: the same reward model twice; expected one run of each")
    return runs


def _group(figures: Sequence[tuple[Path, Figure]]) -> list[_Behaviour]:
    """Return the figures by name and setting, with repetitions pooled; if settings share a name, add the folder."""
    groups: dict[tuple[str, str], dict[str, list[tuple[Path, Figure]]]] = {}
    for folder, figure in figures:
        group = groups.setdefault((figure.name, _key(figure.repeated_setting)), {})
        known = group.setdefault(_key(figure.reward_model), [])
        for before, other in known:
            if other.repetition == figure.repetition:
                raise RunError(
                    f"{folder}: {figure.name} of {figure.label} is also in {before}; expected it once"
                )
        known.append((folder, figure))
    if not groups:
        raise RunError("behaviour: expected runs with a behaviour, found none")
    names = [name for name, _ in groups]
    behaviours = []
    for (name, _), group in groups.items():
        folder, first = next(iter(group.values()))[0]
        by_model = {key: [figure for _, figure in known] for key, known in group.items()}
        behaviours.append(
            _Behaviour(
                name if names.count(name) == 1 else f"{name} ({folder})",
                _family(first.policy),
                {key: pool(known) for key, known in by_model.items()},
                {key: [figure.value for figure in known] for key, known in by_model.items()},
            )
        )
    return behaviours


def _family(architecture: str | None) -> str | None:
    return architecture.partition("For")[0] if architecture else None


def _lineages(runs: Mapping[str, FinishedRun], file: str | Path | None) -> dict[str, str | None]:
    lineages = {
        name: _family(reward_identity(run.record["inputs"]["model"]).get("architecture"))
        for name, run in runs.items()
    }
    if file is not None:
        given = read_object(Path(file), error=RunError)
        for name, value in given.items():
            if name not in lineages or not isinstance(value, str):
                raise RunError(
                    f"{file}: expected names of score runs ({', '.join(lineages)}) with a text each, found "
                    f"{quote(name)}: {quote(value)}"
                )
        lineages |= given
    return lineages


def _clusters(run: FinishedRun) -> list[str]:
    return [cluster_of(user, row.id) for user, row in zip(run.clusters.users, run.rows, strict=True)]


def _benchmark(
    runs: Mapping[str, FinishedRun],
    grades: Mapping[str, np.ndarray],
    places: Mapping[str, int],
    weights: np.ndarray,
    *,
    quantile: float,
) -> dict[str, Resampled]:
    """Return the figures of all score runs that these data support."""
    first = next(iter(runs.values()))
    rows = [places[cluster] for cluster in _clusters(first)]
    order = {row.id: place for place, row in enumerate(first.rows)}
    wins = np.zeros((len(rows), len(runs)))
    for column, (name, run) in enumerate(runs.items()):
        wins[[order[row.id] for row in run.rows], column] = grades[name]
    of_row, subsets = np.asarray(rows), np.asarray([row.subset or "" for row in first.rows])

    def cells(which: np.ndarray) -> Cells:
        sums, counts = np.zeros((len(places), len(runs))), np.zeros((len(places), 1))
        np.add.at(sums, of_row[which], wins[which])
        np.add.at(counts, of_row[which], 1)
        return Cells(sums, np.broadcast_to(counts, sums.shape))

    figures = {"accuracy": pooled(cells(np.ones(len(rows), bool)), weights)}
    named = np.asarray([user is not None for user in first.clusters.users])
    if named.any():
        whole = cells(named)
        users = np.flatnonzero(whole.counts[:, 0])
        of_users = Cells(whole.sums[users], whole.counts[users])
        if len(users) > 1:
            figures["user_accuracy"] = cluster_mean(of_users, weights[:, users])
            figures["user_quantile"] = cluster_quantile(of_users, weights[:, users], quantile=quantile)
    if len(set(subsets)) > 1:
        parts = [cells(subsets == name) for name in sorted(set(subsets))]
        figures["subset_quantile"] = part_quantile(parts, weights, quantile=quantile)
    return figures


def _verdict(accuracies: Sequence[float]) -> str:
    """Return a sentence on whether this number of models resolves an order, and the range of their accuracies."""
    count = len(accuracies)
    text = (
        f"{count} models, accuracies {min(accuracies):.3f} to {max(accuracies):.3f}; Kendall's tau of unrelated "
        f"orders has a standard error of {tau_error(count):.2f}"
    )
    unresolved = f": fewer than {RESOLVED_FROM} models, so the order is not resolved"
    return text + (unresolved if count < RESOLVED_FROM else "")
