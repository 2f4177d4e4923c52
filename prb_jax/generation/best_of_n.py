"""`prb best-of-n`: how good the best of k samples is, as each reward model chooses it.

All samples of a prompt are one comparison with K = N responses, so a reward model reads the prompt once.

``run.json`` holds what decides the result, ``rewards.jsonl`` a row for each scorer and prompt, ``summary.json`` the
curves; ``curves.png`` shows them. ``behaviour.json`` holds the last point of each curve for `prb correlate`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.writing import held_folder, refuse_file, whole_file, write_json, writing
from prb_jax.errors import DataError, RunError, quote
from prb_jax.generation.candidates import Candidates, given_quality, read_candidates
from prb_jax.generation.endpoint import REPLIES
from prb_jax.generation.judge_ways import RUBRIC, JudgeOptions
from prb_jax.generation.rating_scorer import RatingScorer, is_judge, open_judge, parse_judge
from prb_jax.generation.sample import RUNS as SAMPLE_RUNS
from prb_jax.metrics.best_of import Point, curve, sizes_up_to
from prb_jax.metrics.texts import rouge_l
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.runs.behaviour import cluster_of, figure_of, write_behaviour
from prb_jax.runs.command_line import command_line
from prb_jax.runs.folder import SUMMARY
from prb_jax.runs.kind import RunKind
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowFile, open_rows
from prb_jax.scoring.inputs import Data
from prb_jax.scoring.load import open_scorer, read_history, with_history
from prb_jax.scoring.run import computing_versions
from prb_jax.scoring.scorer import Scorer

REWARDS = "rewards.jsonl"
CURVES = "curves.png"
RUNS = RunKind(name="prb_jax best-of-n", command="prb best-of-n", rows=REWARDS)
REFERENCE = "reference"
ORACLE, RANDOM = "oracle", "random"

_DEFINITIONS = {
    "quality": "of the sample with the highest reward among k: the mean over all subsets of k of a prompt's samples, "
    "then over prompts; equal rewards are drawn from at random",
    "first": "the same with the first k samples of each prompt alone; of equal rewards the first one is taken",
    "ci95": "95 % t interval of `quality` over users (a prompt without a user is a cluster of its own); null with "
    "fewer than six",
    "ci95_reason": "why ci95 is null; null where there is an interval",
    "oracle": "takes the best quality itself: no selector is above it",
    "random": "takes any sample",
    "empty": "samples without a letter, which no reward model can score: left out, and their prompts have fewer",
    "unread": "samples for which the reply of a judge has no number: left out of all curves",
    "reference": "quality is ROUGE-L F1 of the package rouge-score, without stemming, against the response with the "
    "highest label",
}


@dataclass(frozen=True)
class BestOfN:
    """The result of `best_of_n`.

    Attributes:
      out: the run folder.
      summary: what `summary.json` holds.
    """

    out: Path
    summary: dict[str, Any]


def best_of_n(
    samples: str | Path,
    rewards: Sequence[str],
    *,
    out: str | Path,
    quality: str = REFERENCE,
    data: Sequence[str] | None = None,
    history: Data | None = None,
    loading: LoadOptions | None = None,
    judge: JudgeOptions | None = None,
    profile_posts: int | None = None,
    protocol: str | None = None,
    max_length: int | None = None,
    progress: bool = True,
) -> BestOfN:
    """Score samples with reward models, and write how good the best of k is for each of them.

    A run that was killed is continued by the same call.

    Args:
      samples: the run folder of `prb sample`.
      rewards: models or baselines, as `prb evaluate` takes them, or judges (`prb_jax.generation.rating_scorer`).
      out: the run folder.
      quality: "reference"; a JSON-lines file of {id, sample, quality} for every sample; or a model whose score is the
        quality, as "baseline:persona-truth" of generated persons, or "rubric:MODEL", a judge that rates each aspect of
        the true rubric.
      data: the data of the samples, where it has another name now.
      history: labelled comparisons of which fitted methods of personalisation among the models learn the users.
      loading: how models are opened.
      judge: how judges are asked; the template and the scale are of those that are named `judge:` alone.
      profile_posts, protocol, max_length: what the models are shown, as of :func:`prb_jax.evaluate`.
      progress: shows progress on standard error.

    Raises:
      DataError: samples of other data, a quality that is missing, or a sample that a model cannot read.
      RunError: a folder that cannot be used.
      CheckpointError, MeshError: a model cannot be loaded.
    """
    path, refused = Path(out), len(set(rewards)) != len(rewards)
    refuse_file(out)
    RUNS.read(path)
    if not rewards or refused:
        raise DataError(f"rewards: expected different models, at least one, found {quote(list(rewards))}")
    run = SAMPLE_RUNS.read_finished(Path(samples))
    found, left_out, empty = read_candidates(Path(samples), run, data)
    given = given_quality(quality, found)
    scorers = [*rewards] if given is not None or quality == REFERENCE else [*rewards, quality]
    view = {"profile_posts": profile_posts, "protocol": protocol, "max_length": max_length}
    options = loading or LoadOptions()
    names = list(dict.fromkeys(scorers))
    if judge is not None and not any(map(is_judge, names)):
        raise RunError(
            "--prompts, --template: belong to a judge among --rewards or as --quality: leave them out"
        )
    opened = {name: _opened(name, options, judge or JudgeOptions(), cache=path / REPLIES) for name in names}
    known = read_history(history)
    opened = with_history(opened, known)
    decided = {
        "samples": run["inputs"],
        "rewards": {name: {**scorer.identity(), "name": name} for name, scorer in opened.items()},
        "quality": quality,
        **({} if given is None else {"quality_sha256": sha256(Path(quality).read_bytes()).hexdigest()}),
        "view": view,
        "versions": computing_versions(plain=False),
    }
    with held_folder(path):
        RUNS.start(path, decided, notes={"command": command_line(), "samples": str(samples)})
        with open_rows(path / REWARDS, what="rewards", key=_key, fields=("scorer", "id", "scores")) as file:
            for name, scorer in opened.items():
                _score(file, name, scorer, found, view=view, progress=progress)
            keys = [(name, each.comparison.id) for name in opened for each in found]
            rows = {_key(row): np.asarray(row["scores"], np.float64) for row in file.finish(keys)}
        if given is not None:
            rows |= {(quality, each.comparison.id): own for each, own in zip(found, given, strict=True)}
        found, rows, unread = _readable(found, rows)
        left_out += sorted(unread.keys() - {each.comparison.id for each in found})
        scores = {name: [rows[name, each.comparison.id] for each in found] for name in opened}
        truth = [
            np.asarray([rouge_l(text, each.reference) for text in each.comparison.responses])
            if quality == REFERENCE
            else rows[quality, each.comparison.id]
            for each in found
        ]
        sizes = sizes_up_to(max(len(each.numbers) for each in found))
        selectors = {name: scores[name] for name in rewards}
        selectors |= {ORACLE: truth, RANDOM: [np.zeros(len(each)) for each in truth]}
        curves = {name: curve(own, truth, sizes) for name, own in selectors.items()}
        users = [each.user for each in found]
        summary = {
            "samples": str(samples),
            "policy": run.get("model"),
            "quality": quality,
            "n": len(found),
            "samples_of_a_prompt": run["inputs"]["sampling"]["n"],
            "empty": empty,
            "unread": sum(unread.values()),
            "left_out": left_out,
            "curves": {name: [_point(point, users) for point in points] for name, points in curves.items()},
            "definitions": _DEFINITIONS,
        }
        clusters = [cluster_of(each.user, each.comparison.id) for each in found]
        setting = {name: decided[name] for name in ("samples", "quality") if name in decided}
        write_behaviour(
            path,
            [
                figure_of(
                    curves[name][-1].by_prompt.tolist(),
                    clusters,
                    name=f"best-of-{sizes[-1]}",
                    label=name,
                    identity=opened[name].identity(),
                    setting={**setting, "quality_sha256": decided.get("quality_sha256")},
                    policy=run["inputs"]["model"].get("architecture"),
                )
                for name in rewards
            ],
        )
        _draw(path / CURVES, summary)
        write_json(path / SUMMARY, summary)
    return BestOfN(path, summary)


def _opened(name: str, loading: LoadOptions, judge: JudgeOptions, *, cache: Path) -> Scorer:
    if not is_judge(name):
        return open_scorer(name, loading)
    if parse_judge(name).protocol == RUBRIC:
        judge = replace(judge, template=None, system=None, scale=None)
    return open_judge(name, judge, loading=loading, cache=cache)


def _readable(
    found: Sequence[Candidates], rows: Mapping[tuple[str, str], np.ndarray]
) -> tuple[list[Candidates], dict[tuple[str, str], np.ndarray], dict[str, int]]:
    """The samples that every scorer has a number for, their numbers, and how many of each prompt there are not.

    Raises:
      DataError: there is no such sample.
    """
    kept, numbers, unread = [], dict[tuple[str, str], np.ndarray](), dict[str, int]()
    scorers = dict.fromkeys(scorer for scorer, _ in rows)
    for each in found:
        name = each.comparison.id
        own = [(scorer, name) for scorer in scorers]
        there = (
            np.isfinite([rows[key] for key in own]).all(axis=0) if own else np.ones(len(each.numbers), bool)
        )
        if not there.all():
            unread[name] = int((~there).sum())
        if there.any():
            kept.append(each.only(np.flatnonzero(there)))
        numbers |= {key: rows[key][there] for key in own}
    if not kept:
        raise DataError("no sample has a number of every judge: their replies could not be read")
    return kept, numbers, unread


def _score(
    file: RowFile,
    name: str,
    scorer: Any,
    found: Sequence[Candidates],
    *,
    view: Mapping[str, Any],
    progress: bool,
) -> None:
    """Score what is missing; every batch is on disk before the next one is waited for."""
    known = [(name, each.comparison.id) in file.rows for each in found]
    with show_progress(name, Count(len(found), sum(known), unit="prompts"), enabled=progress) as display:
        stream = scorer.stream(
            [each.comparison for each in found],
            skip=functools.partial(_all_known, known),
            **view,
        )
        for batch in stream:
            rows = []
            for index, scores in zip(batch.indices, batch.scores, strict=True):
                if not np.isfinite(scores).all() and not isinstance(scorer, RatingScorer):
                    raise RunError(
                        f"{name}: comparison {quote(found[index].comparison.id)}: expected finite scores, found "
                        f"{quote(np.asarray(scores).tolist())}"
                    )
                if not known[index]:
                    each = found[index]
                    numbers = [number if np.isfinite(number) else None for number in map(float, scores)]
                    rows.append(
                        {
                            "scorer": name,
                            "id": each.comparison.id,
                            "samples": list(each.numbers),
                            "scores": numbers,
                        }
                    )
            file.append(rows)
            display.advance(len(rows), sum(batch.tokens))


def _all_known(known: Sequence[bool], indices: Sequence[int]) -> bool:
    return all(known[index] for index in indices)


def _key(row: Row) -> tuple[str, str]:
    return row["scorer"], row["id"]


def _point(point: Point, users: Sequence[str | None]) -> dict[str, Any]:
    interval = mean_interval(point.by_prompt, users)
    return {"k": point.k, "quality": point.quality, **interval.to_json(), "first": point.first}


def quality_label(quality: str) -> str:
    """Return what a picture or a table calls the quality of a sample."""
    return "ROUGE-L F1 against the best labelled response (0 to 1)" if quality == REFERENCE else quality


def _draw(path: Path, summary: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, points in summary["curves"].items():
        sizes = [point["k"] for point in points]
        bound = name in (ORACLE, RANDOM)
        style = {"color": "gray", "linestyle": ":" if name == RANDOM else "--"} if bound else {"marker": "o"}
        (drawn,) = axis.plot(sizes, [point["quality"] for point in points], label=name, markersize=3, **style)  # pyright: ignore[reportArgumentType]
        if not bound and all(point["ci95"] for point in points):
            low, high = zip(*(point["ci95"] for point in points), strict=True)
            axis.fill_between(sizes, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
    sizes = sorted({point["k"] for points in summary["curves"].values() for point in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("k, samples to choose from")
    axis.set_ylabel(f"quality of the best of k: {quality_label(summary['quality'])}")
    axis.grid(alpha=0.3)
    axis.legend()
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png", metadata={"Software": None})
