"""`prb personalise`: compare methods on the same people, given a few comparisons of each; resumable by method."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError, RunError, quote
from prb_jax.personal import FITTED, SPLITS
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.features import FeatureStore
from prb_jax.personal.few_shot.choices import Backbone
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Method
from prb_jax.personal.few_shot.registry import ALL, StudyMethods, choose_methods, method_names
from prb_jax.personal.saved import Standard, UserStates, save_fitted, save_states
from prb_jax.platform.extras import has_extra
from prb_jax.platform.sharding import as_mesh
from prb_jax.records.writing import write_file, write_json, writing
from prb_jax.runs.kind import RunKind, as_recorded
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.unchanged import check_unchanged
from prb_jax.study.backbone import check_backbone, features_of, trainable
from prb_jax.study.outcomes import (
    Outcome,
    SplitData,
    baselines_of,
    fit_method,
    make_part,
    read_outcome,
    run_baseline,
    run_method,
    standardised,
)
from prb_jax.study.picture import curves_figure, save_figure
from prb_jax.study.population import Population, read_population
from prb_jax.study.results import CEILING, DEFINITIONS, SIMULATED, outcome_table, results, subset_results
from prb_jax.study.splits import (
    PARTS,
    UNSEEN_PART,
    WRAPPER,
    StudySplit,
    check_norms,
    check_wrappers,
    make_splits,
    posts_of_split,
)
from prb_jax.study.write_features import blank_features
from prb_jax.version import computing_versions

RESULTS: Final = "results.json"
SUMMARY: Final = "study.json"
SUBSETS: Final = "subsets.json"
PICTURE: Final = "curves.svg"
TABLE: Final = "outcomes.csv"
OUTCOMES: Final = "outcomes"
STATES: Final = "states"
RUNS: Final = RunKind(
    "prb_jax study",
    "prb personalise",
    finished=RESULTS,
    sealed=(SUMMARY, SPLITS, SUBSETS, TABLE, f"{OUTCOMES}/*.npz"),
)
SHOTS: Final = (0, 1, 2, 4, 8, 16)
PROTOCOL: Final = 2  # version of splits and outcomes: a study with another version cannot be resumed


@dataclass(frozen=True)
class Study:
    """The result of `prb_jax.personalise`.

    Attributes:
      out: Study folder.
      results: Contents of ``results.json``: a row for each method, part of the people and number of shots.
      summary: Contents of ``study.json``: people, splits, exclusions with reasons, the meaning of the figures.
    """

    out: Path
    results: list[dict[str, Any]]
    summary: dict[str, Any]

    def __repr__(self) -> str:
        return f"Study(out={quote(str(self.out))}, rows={len(self.results)})"


def personalise(
    data: Data,
    *,
    backbone: str | Path,
    out: str | Path,
    methods: str | Sequence[str] = ALL,
    shots: Sequence[int] = SHOTS,
    seeds: int = 1,
    split: str = "user",
    settings: Mapping[str, Any] | None = None,
    features: FeatureOptions | None = None,
    relax: Sequence[str] = (),
    subset: str | None = None,
    limit: int | None = None,
    mesh: str | Mesh | None = None,
    progress: bool = True,
) -> Study:
    """Compare personalisation methods on the same people and the same features of a frozen backbone.

    People are divided into seen people, on whom methods are fitted, a validation part, on which all settings are
    chosen, and unseen people. A method is adapted to k comparisons of a person and predicts others. Each method has one
    file for each split. The same call resumes a killed study, and methods can be added later.

    Args:
      data: Data, as for :func:`prb_jax.evaluate`; comparisons must have users.
      backbone: Folder of `prb features`, or a model, whose features are then written to ``out/features``.
      out: Study folder.
      methods: Names in :data:`prb_jax.personal.few_shot.registry.METHODS`, or "all". Pooled Bradley-Terry and pooled
        with an offset for each user are always included.
      shots: Numbers of comparisons to adapt to a person on.
      seeds: Number of splits; each person is unseen in at most one.
      split: New part of the test, a key of :data:`prb_jax.study.splits.SPLITS`.
      settings: Settings of methods by name, instead of their defaults.
      features: Options for computing a model's features.
      relax: Checks of the data that may fail: "wrapper". The summary reports this.
      subset, limit: Same as for :func:`prb_jax.evaluate`.
      mesh: Same as for :func:`prb_jax.load`: people and comparisons are split over its devices.
      progress: Show progress on standard error.

    Raises:
      PrbError: data, backbone, a method or a choice cannot be used; the data have a published flaw (the wrapping of
        responses reveals the labels, people in two parts); or the folder contains another study: each field is named.
    """
    folder = RUNS.check(out)
    _check_shots(shots)
    if odd := set(relax) - {WRAPPER}:
        raise RunError(f"relax: expected {WRAPPER}, found {quote(min(odd))}")
    chosen, given = choose_methods(methods), settings or {}
    for name in given.keys() - {method.name for method in chosen.methods}:
        raise RunError(f"settings: {quote(name)} is not among the methods of this study")
    check_backbone(backbone, chosen.methods, features)
    inputs = read_inputs(data, subset=subset, limit=limit)
    people = read_population(inputs.comparisons, blank_features(inputs.comparisons))
    make_splits(people, by=split, seeds=seeds)  # an error about people comes before hours of features
    store = features_of(backbone, inputs, folder, features, limit=limit, progress=progress)
    population = read_population(inputs.comparisons, store)
    splits = make_splits(population, by=split, seeds=seeds)
    devices = as_mesh(mesh)
    decided = {
        "data": inputs.to_json(),
        "limit": limit,
        "features": store.facts["inputs"],
        "split": split,
        "protocol": PROTOCOL,
        "seeds": seeds,
        "shots": list(shots),
        "versions": computing_versions(plain=False),
    }
    notes = {"data": list(inputs.sources), "backbone": str(backbone)}
    with RUNS.open(folder, decided, notes=notes, session={}):
        saved = {"by": split, "splits": [one.to_json(population) for one in splits]}
        write_json(folder / SPLITS, saved, indent=0)
        for name in (OUTCOMES, FITTED, STATES):
            with writing(folder / name):
                (folder / name).mkdir(exist_ok=True)
        study = _StudyRun(
            folder=folder,
            population=population,
            store=store,
            splits=splits,
            backbone=trainable(backbone, population, features, mesh=devices),
            methods=chosen,
            settings=given,
            shots=tuple(shots),
            relaxed=WRAPPER in relax,
            mesh=devices,
        )
        outcomes, summary = study.run(progress=progress)
        check_unchanged(inputs)
        rows = results(population, splits, outcomes)
        above: dict[str, bool] = {}  # whether a method beats pooled with an offset at any number of shots
        for row in rows:
            if row["split"] == "unseen" and row["above_offset"] is not None and not row["control"]:
                above[row["method"]] = above.get(row["method"], False) or row["above_offset"]
        summary["not_above_offset"] = [name for name, beaten in above.items() if not beaten]
        summary["without_ceiling"] = {
            row["split"]: row["reason"] for row in rows if row["control"] == SIMULATED and row["reason"]
        }
        RUNS.reopen(folder)
        write_json(folder / SUMMARY, summary)
        if by_subset := subset_results(population, splits, outcomes):
            write_json(folder / SUBSETS, by_subset)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(outcome_table(population, splits, outcomes))
        write_file(folder / TABLE, text.getvalue().encode())
        if has_extra("report", PICTURE):
            save_figure(curves_figure(rows), folder / PICTURE)
        RUNS.finish(folder, rows)
    return Study(folder, rows, summary)


def people_of_study(
    data: Data,
    *,
    shots: Sequence[int] = SHOTS,
    seeds: int = 1,
    split: str = "user",
    subset: str | None = None,
    limit: int | None = None,
) -> dict[str, list[int]]:
    """Return how many comparisons each person of a study can be adapted on, by part: "unseen" and "seen".

    Needs no model, and writes nothing. The arguments are the same as for :func:`personalise`.

    Raises:
      PrbError: same as for :func:`personalise`.
    """
    comparisons = read_inputs(data, subset=subset, limit=limit).comparisons
    _check_shots(shots)
    population = read_population(comparisons, blank_features(comparisons))
    people: dict[str, dict[int, int]] = {"unseen": {}, "seen": {}}
    for one in make_splits(population, by=split, seeds=seeds):
        part = make_part(population.choices, one)
        for user, count in zip(part.queries.users.tolist(), part.contexts.mask.sum(1).tolist(), strict=True):
            people["unseen" if one.part[user] == UNSEEN_PART else "seen"].setdefault(user, count)
    return {name: list(counts.values()) for name, counts in people.items() if counts}


def _check_shots(shots: Sequence[int]) -> None:
    whole = all(isinstance(shot, Integral) for shot in shots)
    if not shots or not whole or min(shots) < 0 or len(set(shots)) < len(shots):
        raise RunError(f"shots: expected different numbers of 0 or more, found {quote(list(shots))}")


@dataclass(frozen=True, kw_only=True)
class _StudyRun:
    """A study in progress: all inputs of its outcomes."""

    folder: Path
    population: Population
    store: FeatureStore
    splits: Sequence[StudySplit]
    backbone: Backbone | None
    methods: StudyMethods
    settings: Mapping[str, Any]
    shots: tuple[int, ...]
    relaxed: bool
    mesh: Mesh

    def run(self, *, progress: bool) -> tuple[dict[str, list[Outcome]], dict[str, Any]]:
        """Return the outcomes of each baseline and method, and the contents of ``study.json``."""
        population, choices, splits = self.population, self.population.choices, self.splits
        baselines, methods = baselines_of(population), self.methods.methods
        outcomes: dict[str, list[Outcome]] = {
            name: [] for name in (*baselines, *(method.name for method in methods))
        }
        left_out, checks, removed = dict(self.methods.left_out), [], 0
        count = Count(len(splits) * len(methods), unit="fits")
        with show_progress("personalise", count, enabled=progress) as display:
            for split in splits:
                posts, telling = posts_of_split(population, split)
                removed = max(removed, telling)
                # If the backbone saw posts that reveal choices, its rewards cannot be used.
                shown = None if telling else choices.in_context
                known = replace(choices, posts=posts, backbone=self.backbone, in_context=shown)
                standardised_choices, standard = standardised(known, split)
                part = make_part(standardised_choices, split)
                checks.append(
                    {
                        "seed": split.seed,
                        **check_wrappers(population, split, relaxed=self.relaxed),
                        "norm_ratio": check_norms(population, split, part.choices.features),
                    }
                )
                for name in baselines:
                    outcomes[name].append(run_baseline(name, population, part))
                for method in methods:
                    if method.name not in left_out and (reason := self._missing_data(method, part, telling)):
                        left_out[method.name] = reason
                        del outcomes[method.name]
                    if method.name not in left_out:
                        outcomes[method.name].append(self._outcome(method, part, standard))
                    display.advance(1)
                # Splits have groups of different sizes, and so different programs. Programs of many splits would
                # exhaust the memory maps that a process may have.
                jax.clear_caches()
        for name in method_names():  # from an earlier call with the same folder
            paths = [self._file(name, split) for split in splits]
            if name not in outcomes and name not in left_out and all(path.exists() for path in paths):
                outcomes[name] = list(map(read_outcome, paths, outcomes[baselines[0]]))
        figures = {name: [outcome.figures for outcome in of_splits] for name, of_splits in outcomes.items()}
        return outcomes, {
            "users": len(population.users),
            "choices": len(choices),
            "questions": int(choices.questions.max()) + 1,
            "responses": len(choices.features),
            "users_in_splits": {
                name: [int((split.part == number).sum()) for split in splits]
                for number, name in enumerate(PARTS)
            },
            "users_with_one_choice": int((np.bincount(choices.users) == 1).sum()),
            "excluded": dict(population.excluded),
            "left_out_methods": left_out,
            "choices_that_tell_a_query": [int(split.leaking.sum()) for split in splits],
            "posts_that_judge_a_candidate": removed,
            "checks": checks,
            "relaxed": [WRAPPER] * self.relaxed,
            "numbers": {
                name: [one.get("numbers", {}) for one in of_splits] for name, of_splits in figures.items()
            },
            "controls": {
                name: [one["controls"] for one in of_splits]
                for name, of_splits in figures.items()
                if of_splits[0].get("controls")
            },
            "definitions": dict(DEFINITIONS),
        }

    def _missing_data(self, method: Method, part: SplitData, telling: int) -> str:
        """Return why the data are unsuitable for a method of "all"; for an explicitly named method, raise the error."""
        try:
            part.choices.require(method.name, method.needs)
        except DataError as error:
            if method.name in self.methods.named:
                raise
            if telling and self.store.shown is not None and "in_context" in method.needs:
                return (
                    f"{telling:,} posts judge a response of the same person's comparisons, and the backbone that saw "
                    "the profile saw them"
                )
            return str(error)
        return ""

    def _outcome(self, method: Method, part: SplitData, standard: Standard) -> Outcome:
        """Return the outcome of a method on a split; an existing file with the same settings is reused."""
        path = self._file(method.name, part.split)
        settings = self.settings.get(method.name) or method.settings()
        if isinstance(settings, FewShotSettings) and not settings.validation_shots:
            settings = replace(settings, validation_shots=self.shots)
        recorded = as_recorded({"settings": asdict(settings)})["settings"]
        if path.exists():
            outcome = read_outcome(path, Outcome.of(part, {}, {}))
            if outcome.figures["settings"] != recorded:
                raise RunError(
                    f"{path}: of the settings {quote(outcome.figures['settings'])}, asked for {quote(recorded)}; give "
                    "--out another folder, or remove the file"
                )
            return outcome
        start = time.perf_counter()
        fitted = fit_method(method, settings, part, mesh=self.mesh)
        if method.represent is not None:
            part = replace(part, choices=method.represent(fitted, part.choices))
            standard = Standard.none(part.choices.features.shape[1])
        seconds = time.perf_counter() - start
        outcome, states = run_method(method, fitted, part, shots=self.shots, mesh=self.mesh)
        figures = {**outcome.figures, "seconds_fit": seconds, "settings": recorded}
        if part.split.seed == 0:
            figures["disk_bytes_per_user"] = self._save(method, fitted, standard, part, states)
        if method.name == "bayes":
            from prb_jax.study.simulation import ceiling

            figures[CEILING] = ceiling(fitted, part, shots=self.shots, mesh=self.mesh)
        outcome = replace(outcome, figures=figures)
        outcome.save(path)
        return outcome

    def _save(self, method: Method, fitted: Fitted, standard: Standard, part: SplitData, states: Any) -> int:
        """Write a fitted method and the states of the tested people; return the bytes of one person on disk."""
        digest = save_fitted(
            self.folder / FITTED / method.name,
            method,
            fitted,
            standard=standard,
            items=self.population.item_keys,
            features=self.store.facts,
        )
        count = len(np.unique(part.queries.users))  # first folds come first
        names = tuple(self.population.users[user] for user in part.queries.users[:count].tolist())
        people = UserStates(names, jax.tree.map(lambda leaf: leaf[:count], states))
        return (
            save_states(self.folder / STATES / method.name, people, method=method.name, fitted=digest)
            // count
        )

    def _file(self, method: str, split: StudySplit) -> Path:
        return self.folder / OUTCOMES / f"{method}-{split.seed}.npz"
