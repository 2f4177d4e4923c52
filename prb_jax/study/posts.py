"""`prb evaluate --profile-posts 0 1 2 4 10`: score one model with increasing numbers of profile posts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import RunError
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.extras import has_extra
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.writing import write_json
from prb_jax.runs.evaluation import EVALUATION
from prb_jax.runs.finished import FinishedRun
from prb_jax.scoring import NO_CONTROLS
from prb_jax.scoring.clusters import clusters_of
from prb_jax.scoring.evaluate import Evaluation, evaluate, evaluate_options, run_evaluation
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.scoring.open_scorer import Model, open_scorer
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.study.picture import save_figure

POSTS: Final = "posts.json"
PICTURE: Final = "posts.png"


@dataclass(frozen=True)
class PostsSweep:
    """The result of `prb_jax.evaluate_posts`.

    Attributes:
      out: Folder, or None if not given.
      points: Contents of `posts.json` under "points": one dict for each number of posts, in ascending order:
        profile_posts, n, accuracy, ci95, truncated, difference and difference_ci95 (against the fewest posts, paired;
        None for the fewest posts).
      evaluations: Evaluations by number of posts.
    """

    out: Path | None
    points: list[dict[str, Any]]
    evaluations: Mapping[int, Evaluation]


def evaluate_posts(
    model: Model,
    data: Data,
    *,
    profile_posts: Sequence[int],
    **options: Any,
) -> PostsSweep:
    """Score the same comparisons with several numbers of posts of each profile, and draw accuracy against posts.

    The model is loaded and the data are read once. Each number has a separate run, `out`/posts-N, identical to the run
    of `prb_jax.evaluate(..., profile_posts=N)`; `out` gets `posts.json` and the picture `posts.png`. The same call
    resumes a killed one.

    Args:
      model, data: Model and data, as for `prb_jax.evaluate`.
      profile_posts: Two numbers or more, each once.
      options: All other arguments of `prb_jax.evaluate`. `out` is the folder of the runs. `controls` apply to each run
        that shows posts: none by default, because the run without posts is the blind control of the others.

    Raises:
      RunError: there are fewer than two numbers, or a number is repeated.
      PrbError: same as for `prb_jax.evaluate`.
    """
    given = signature(evaluate).bind(model, data, **options).arguments
    return run_posts(model, data, profile_posts, evaluate_options(given))


def run_posts(model: Model, data: Data, profile_posts: Sequence[int], options: EvaluateOptions) -> PostsSweep:
    """Same as :func:`evaluate_posts`, with all other choices in one object."""
    numbers, folder = sorted(profile_posts), options.folder
    if len(numbers) < 2 or len(set(numbers)) < len(numbers):
        raise RunError(f"profile_posts: expected two numbers or more, each once, found {list(profile_posts)}")
    on_first_process(lambda: None if folder is None else str(EVALUATION.check(folder)))
    inputs = read_inputs(data, subset=options.subset, limit=options.limit)
    scorer = open_scorer(model, options.loading, name=options.name, recorded=folder is not None)
    opened = replace(options, loading=LoadOptions(), subset=None)

    def of_posts(number: int) -> EvaluateOptions:
        return replace(
            opened,
            out=None if folder is None else folder / f"posts-{number}",
            view=replace(options.view, profile_posts=number),
            controls=options.controls if options.controls and number else NO_CONTROLS,
        )

    evaluations = {number: run_evaluation(scorer, inputs, of_posts(number)) for number in numbers}
    clusters = None  # comparisons that are streamed in windows are clustered by user
    if inputs.comparisons.in_memory:
        by_id = {comparison.id: comparison for comparison in inputs.comparisons}
        clusters = clusters_of([by_id[row.id] for row in evaluations[numbers[0]].rows])
    points, title = sweep_points(evaluations, clusters), evaluations[numbers[0]].summary["model"]
    if folder is not None:

        def finish() -> None:
            write_json(folder / POSTS, {"model": title, "data": list(inputs.sources), "points": points})
            if has_extra("report", PICTURE):
                draw_posts(points, folder / PICTURE, title=title)

        on_first_process(finish)
    return PostsSweep(folder, points, evaluations)


def sweep_points(
    evaluations: Mapping[int, Evaluation | FinishedRun], clusters: Clusters | None
) -> list[dict[str, Any]]:
    """Return the points of a :class:`PostsSweep`.

    Args:
      evaluations: Runs by their number of posts, in ascending order.
      clusters: Clusters of the rows of the first run; by default their users.
    """
    first, *_ = evaluations.values()  # the run with the fewest posts
    points = []
    for number, evaluation in evaluations.items():
        gain: Mapping[str, Any] = {"difference": None, "ci95": None}
        if evaluation is not first:
            gain = paired_difference(evaluation.rows, first.rows, clusters=clusters)
        figures = {key: evaluation.summary[key] for key in ("n", "accuracy", "ci95", "truncated")}
        against = {"difference": gain["difference"], "difference_ci95": gain["ci95"]}
        points.append({"profile_posts": number, **figures, **against})
    return points


def draw_posts(points: Sequence[Mapping[str, Any]], path: Path, *, title: str = "") -> None:
    """Draw the accuracy with its interval against the number of posts, from the points of a :class:`PostsSweep`. Errors
    and file suffixes are the same as for :func:`save_figure`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axis = figure.subplots()
    posts = [point["profile_posts"] for point in points]
    axis.plot(posts, [point["accuracy"] for point in points], marker="o", color="tab:blue")
    for point in points:
        if point["ci95"] is not None:
            axis.plot([point["profile_posts"]] * 2, point["ci95"], color="tab:blue", alpha=0.5)
    axis.axhline(0.5, color="gray", linewidth=0.8, linestyle=":")
    axis.set_xticks(posts)
    axis.set_xlabel("posts of the profile that the model sees")
    axis.set_ylabel("accuracy, 95 % interval")
    axis.grid(alpha=0.3)
    axis.set_title(title)
    save_figure(figure, path)
