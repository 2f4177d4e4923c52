"""`prb best-of-n`: the quality of the best of k samples, as each reward model chooses it.

All samples of a prompt are one comparison with K = N responses, so a reward model reads the prompt once.

``run.json`` holds everything that determines the result, ``rewards.jsonl`` a row for each scorer and prompt,
``summary.json`` the curves, ``curves.png`` their plot, ``behaviour.json`` the last point of each for `prb correlate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from prb_jax.behaviour.judges.candidates import Candidates, read_candidates
from prb_jax.behaviour.judges.judge import open_named_judge
from prb_jax.behaviour.judges.names import is_judge
from prb_jax.behaviour.judges.options import JudgeOptions, check_options_used, options_of_judge, parse_judge
from prb_jax.behaviour.judges.scorer import JudgeScorer
from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.best_of import Point, curve, sizes_up_to
from prb_jax.metrics.texts import rouge_l
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.extras import has_extra, need_extra
from prb_jax.platform.paths import shown
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.writing import whole_file, writing
from prb_jax.runs.behaviour import BEHAVIOUR, cluster_of, figure_of, write_behaviour
from prb_jax.runs.kind import RunKind, RunResult
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowFile, RowKind
from prb_jax.scoring.baselines import baseline_scorer
from prb_jax.scoring.history import read_history, tell_strangers, with_history
from prb_jax.scoring.kinds import has_no_weights
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.scoring.options import Data
from prb_jax.scoring.remote.endpoint import REPLIES
from prb_jax.scoring.same_choices import check_same_choices
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.view import ViewOptions
from prb_jax.version import computing_versions

REWARDS = "rewards.jsonl"
CURVES = "curves.png"


class RewardLine(TypedDict):
    """A line of ``rewards.jsonl``: the scores of a prompt's samples, null if a judge's reply could not be read."""

    scorer: str
    id: str
    samples: list[int]
    scores: list[float | None]


class _QualityLine(TypedDict):
    id: str
    sample: int
    quality: float


def _with_all_scores(row: dict[str, Any]) -> Row:
    if not len(row["samples"]) == len(row["scores"]) == len(set(row["samples"])) > 0:
        raise ValueError(
            f"expected a score for each of its different samples, found {len(row['scores'])} scores of the samples "
            f"{quote(row['samples'])}"
        )
    return row


REWARD_ROWS = RowKind(
    REWARDS, "rewards", key=itemgetter("scorer", "id"), schema=RewardLine, decode=_with_all_scores
)


class _Inputs(TypedDict):
    samples: dict[str, Any]
    rewards: dict[str, dict[str, Any]]


RUNS = RunKind(
    name="prb_jax best-of-n", command="prb best-of-n", rows=REWARD_ROWS, inputs=_Inputs, sealed=(BEHAVIOUR,)
)
REFERENCE = "reference"
ORACLE, RANDOM, CHANCE = "oracle", "random", "baseline:random"

_DEFINITIONS = {
    "quality": "quality of the sample with the highest reward among k: mean over all subsets of k of a prompt's "
    "samples, then over prompts; ties are broken at random",
    "first": "the same with only the first k samples of each prompt; ties go to the first one",
    "ci95": "95 % t interval of `quality` over users (a prompt without a user counts as a separate cluster); null with "
    "fewer than six",
    "ci95_reason": "why ci95 is null; null if there is an interval",
    "oracle": "takes the sample with the best quality: an upper bound for every selector",
    "random": "takes any sample",
    "empty": "samples without a letter, which no reward model can score: left out, and their prompts have fewer",
    "unread": "samples for which a judge's reply has no number: left out of all curves",
    "left_out": "ids of prompts of the data without a sample that was scored: in no curve",
    "fewer": "prompts with fewer samples than the largest k: a larger k takes the best of all that they have",
    "reference": "quality is ROUGE-L F1 of the package rouge-score, without stemming, against the response with the "
    "highest label",
}


class BestOfN(RunResult):
    """The result of `best_of_n`: `out`, the run folder, and `summary`, the contents of `summary.json`."""


def best_of_n(
    samples: str | Path,
    rewards: str | Sequence[str],
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
    """Score samples with reward models, and write the quality of the best of k for each model.

    The same call resumes a killed run. Several processes score together, and process 0 writes.

    Args:
      samples: Run folder of `prb sample`; or a JSON-lines file of {id, sample, text}, texts from any source for the
        comparisons of ``data``.
      rewards: Models or baselines, as for `prb evaluate`, or judges: a list, or a text with commas
        (:class:`prb_jax.behaviour.judges.options.JudgeName`).
      out: Run folder.
      quality: "reference"; a JSON-lines file of {id, sample, quality} for every sample; or a model whose score is the
        quality, e.g. "baseline:persona-truth" for generated persons, or "rubric:MODEL", a judge that rates each aspect
        of the true rubric.
      data: Data of the samples, if renamed since.
      history: Labelled comparisons from which fitted personalisation methods among the models learn the users.
      loading: Options to open models.
      judge: Options of judges; template and scale apply only to judges named `judge:`, pairing and ties only to judges
        named `pairs:`. An option that no judge uses is an error.
      profile_posts, protocol, max_length: Options of the models' view, as for :func:`prb_jax.evaluate`.
      progress: Show progress on standard error.

    Raises:
      DataError: the samples belong to other data, a quality is missing, or a model cannot read a sample.
      RunError: the folder cannot be used.
      CheckpointError, MeshError: a model cannot be loaded.
    """
    path = RUNS.check_together(out)
    rewards = rewards.split(",") if isinstance(rewards, str) else rewards
    if not rewards or len(set(rewards)) != len(rewards):
        raise DataError(f"rewards: expected different models, at least one, found {quote(list(rewards))}")
    if quality == REFERENCE:
        need_extra("texts", f"the quality {REFERENCE!r}")
    drawn = read_candidates(Path(samples), data)
    run = drawn.run
    qualities = _read_qualities(quality, drawn.prompts) if quality.endswith((".jsonl", ".json")) else None
    computed = qualities is None and quality != REFERENCE
    options = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    view = asdict(options)
    names = list(dict.fromkeys([*rewards, quality] if computed else rewards))
    if judge is not None and not any(map(is_judge, names)):
        raise RunError(
            "options of judges belong to one among --rewards or as --quality (judge:MODEL, pairs:MODEL): leave them out"
        )
    judges = {name: parse_judge(name) for name in names if is_judge(name)}
    if judge is not None:
        check_options_used(judge, list(judges))
    # Baselines and functions beside models with weights take no option of loading.
    plain = [name for name in names if name not in judges and has_no_weights(name)]
    loadings = {name: None if name in plain and len(plain) < len(names) else loading for name in names}
    models = {
        name: (judges[name].url or judges[name].model if name in judges else name, loadings[name])
        for name in names
    }
    texts = [[prompt.id, *prompt.comparison.responses] for prompt in drawn.prompts]
    check_same_choices(
        "best-of-n", models, {"quality": quality, "view": view, "samples": run["inputs"], "texts": texts}
    )
    scorers = with_history(
        {
            shown(name): _open(name, loadings[name] or LoadOptions(), judge, cache=path / REPLIES)
            for name in names
        },
        read_history(history),
    )
    tell_strangers(scorers.values(), [prompt.comparison for prompt in drawn.prompts])
    decided = {
        "samples": run["inputs"],
        "rewards": {name: {**scorer.identity(), "name": name} for name, scorer in scorers.items()},
        "quality": quality,
        **({} if qualities is None else {"quality_sha256": sha256(Path(quality).read_bytes()).hexdigest()}),
        "view": view,
        "versions": computing_versions(plain=False),
    }
    check_agreement(decided)
    rewards, quality = shown(list(rewards)), shown(quality)
    with RUNS.open_together(path, decided, notes={"samples": str(samples)}) as opened:
        for name, scorer in scorers.items():
            _score(opened.file, name, scorer, drawn.prompts, options, progress=progress)

        def finish() -> dict[str, Any]:
            keys = [(name, prompt.id) for name in scorers for prompt in drawn.prompts]
            rows = zip(keys, opened.file.finish(keys), strict=True)
            numbers = {key: np.asarray(row["scores"], np.float64) for key, row in rows}
            if qualities is not None:
                numbers |= {(quality, name): values for name, values in qualities.items()}
            prompts, numbers, unread = _readable(drawn.prompts, numbers)
            left_out = [*drawn.left_out, *sorted(unread.keys() - {prompt.id for prompt in prompts})]
            truth = [
                np.asarray([rouge_l(text, prompt.reference) for text in prompt.comparison.responses])
                if quality == REFERENCE
                else numbers[quality, prompt.id]
                for prompt in prompts
            ]
            sizes = sizes_up_to(max(len(prompt.numbers) for prompt in prompts))
            selectors = {name: [numbers[name, prompt.id] for prompt in prompts] for name in rewards}
            selectors |= {ORACLE: truth, RANDOM: [np.zeros(len(values)) for values in truth]}
            curves = {name: curve(scores, truth, sizes) for name, scores in selectors.items()}
            users = [prompt.comparison.user_id for prompt in prompts]

            def summed_up(point: Point) -> dict[str, Any]:
                interval = mean_interval(point.by_prompt, users).to_json()
                return {"k": point.k, "quality": point.quality, **interval, "first": point.first}

            summary = {
                "samples": str(samples),
                "policy": run.get("model"),
                "quality": quality,
                "n": len(prompts),
                "samples_of_a_prompt": run["inputs"]["sampling"]["n"],
                "empty": drawn.empty,
                "unread": sum(unread.values()),
                "left_out": left_out,
                "fewer": sum(len(prompt.numbers) < sizes[-1] for prompt in prompts),
                "curves": {name: [summed_up(point) for point in points] for name, points in curves.items()},
                "definitions": _DEFINITIONS,
            }
            setting = {name: decided.get(name) for name in ("samples", "quality", "quality_sha256")}
            identities = {name: scorers[name].identity() for name in rewards}
            # the baseline for the upper bound: any sample
            identities.setdefault(CHANCE, baseline_scorer(CHANCE).identity())
            figures = [
                figure_of(
                    curves[name if name in rewards else RANDOM][-1].by_prompt.tolist(),
                    [cluster_of(prompt.comparison.user_id, prompt.id) for prompt in prompts],
                    name=f"best-of-{sizes[-1]}",
                    label=name,
                    identity=identity,
                    setting=setting,
                    policy=run["inputs"]["model"].get("architecture"),
                )
                for name, identity in identities.items()
            ]
            write_behaviour(path, figures)
            if has_extra("report", CURVES):
                _draw(path / CURVES, summary)
            opened.finish(summary)
            return summary

        summary = on_first_process(finish)
    return BestOfN(path, summary)


def _read_qualities(file: str, prompts: Sequence[Candidates]) -> dict[str, np.ndarray]:
    """Return the qualities [K] of each prompt's samples from a file.

    Raises:
      DataError: a quality is missing or not finite; names the sample.
    """
    kind = RowKind(file, "qualities", itemgetter("id", "sample"), _QualityLine, hint="correct the line")
    rows = kind.read(Path(file))
    qualities = {}
    for prompt in prompts:
        values = [rows.get((prompt.id, number), {}).get("quality") for number in prompt.numbers]
        for number, value in zip(prompt.numbers, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
                raise DataError(
                    f"{file}: expected a finite quality of sample {number} of {quote(prompt.id)}, found {quote(value)}"
                )
        qualities[prompt.id] = np.asarray(values, np.float64)
    return qualities


def _open(name: str, loading: LoadOptions, judge: JudgeOptions | None, *, cache: Path) -> Scorer:
    if not is_judge(name):
        return open_scorer(name, loading)
    asked = options_of_judge(judge or JudgeOptions(), name)
    return open_named_judge(name, asked, loading=loading, cache=cache)


def _readable(
    prompts: Sequence[Candidates], numbers: Mapping[tuple[str, str], np.ndarray]
) -> tuple[list[Candidates], dict[tuple[str, str], np.ndarray], dict[str, int]]:
    """Return the samples with a score from every scorer, their scores, and the number of other samples by prompt.

    Raises:
      DataError: no sample is left.
    """
    readable, known, unread = [], dict[tuple[str, str], np.ndarray](), dict[str, int]()
    scorers = dict.fromkeys(scorer for scorer, _ in numbers)
    for prompt in prompts:
        keys = [(scorer, prompt.id) for scorer in scorers]
        finite = np.isfinite([numbers[key] for key in keys]).all(axis=0)
        known |= {key: numbers[key][finite] for key in keys}
        if not finite.all():
            unread[prompt.id] = int((~finite).sum())
        if finite.any():
            readable.append(prompt.at(np.flatnonzero(finite)))
    if not readable:
        raise DataError("no sample has a rating by every judge, because their replies could not be read")
    return readable, known, unread


def _score(
    file: RowFile,
    name: str,
    scorer: Scorer,
    prompts: Sequence[Candidates],
    options: ViewOptions,
    *,
    progress: bool,
) -> None:
    """Score the missing prompts; every batch is written to disk before the next one is awaited."""
    chosen = scorer.choose_view(options)
    chosen.warn(str(scorer.identity()["name"]))
    known = [(name, prompt.id) in file.rows for prompt in prompts]
    with show_progress(name, Count(len(prompts), sum(known), unit="prompts"), enabled=progress) as display:
        for batch in scorer.stream(
            [prompt.comparison for prompt in prompts],
            view=chosen.view,
            skip=lambda indices: all(known[index] for index in indices),
        ):
            rows: list[Row] = []
            for index, scores in zip(batch.indices, batch.scores, strict=True):
                prompt, values = prompts[index], list(map(float, scores))
                if not np.isfinite(values).all() and not isinstance(scorer, JudgeScorer):
                    raise RunError(
                        f"{name}: comparison {quote(prompt.id)}: expected finite scores, found {quote(values)}"
                    )
                if not known[index]:
                    numbers = [value if np.isfinite(value) else None for value in values]
                    samples = list(prompt.numbers)
                    rows.append({"scorer": name, "id": prompt.id, "samples": samples, "scores": numbers})
            file.append(rows)
            display.advance(len(rows), sum(batch.tokens))


def quality_label(quality: str) -> str:
    """Return the label of a quality for plots and tables."""
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
