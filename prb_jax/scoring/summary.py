"""Finish a run: its rows in order, its summary, benchmarks by their own rules, and RewardBench's result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.runs.evaluation import COMPUTED, JUDGEMENTS, LEFT_OUT, SCORES
from prb_jax.runs.users import USERS, USERS_DEFINITION, write_users
from prb_jax.scoring import VOTES
from prb_jax.scoring.inputs import check_unchanged
from prb_jax.scoring.run import ScoredRun, check_scores_differ
from prb_jax.seams import get
from prb_jax.trees.tree import EQUAL_SIDES

BASELINE_ROWS = Mapping[str, Sequence[ScoredRow] | str]
"""By the name of a baseline its rows in the order of the comparisons, or why it is not defined on them."""

RESAMPLES: Final = 400  # of the rows of a benchmark, for the interval of its score

DEFINITIONS: Final = {
    "readout": "how the model's outputs become one score: --readout",
    "tokens": "of the comparisons, each by itself with its prompt once (alone); computed for them, without padding, "
    "where those that begin alike share their beginning, and an encoder computes each distinct pair of prompt and "
    "response (computed); the difference (saved)",
    EQUAL_SIDES: "comparisons in which a response with the highest label and another one are the same tokens after the "
    "chat template, so that no model can win: how many, and the ids of the first ten",
    "hints": "what else the model was told of each user; without = comparisons for which there was nothing to tell; "
    "upper_bound = of these the ones that no model could know: such a run shows how much could be reached, and is no "
    "result",
    "judge": "verdicts of the judge. The paper's way: the share of right ones, where a reply without a verdict counts "
    "as A (accuracy), and its difference between comparisons with the better response in A and in B (position_bias). "
    "Both orders: the share of comparisons whose better response is preferred in both (order_consistent_accuracy), or "
    "any one response (consistent); the difference between the shares of A and of B among the verdicts "
    "(position_bias); comparisons with a reply that cannot be read (unparsable). Ratings of single responses: their "
    "mean (mean_rating), that of the responses with the highest label (mean_rating_of_better) and of the others; a "
    "comparison with a reply that cannot be read (unparsable) is a tie, which is no win; the probability of the "
    "numbers where one is named, if the endpoint tells it (mean_number_mass). Why no figure of the run is defined, "
    "where no comparison could be judged (undefined)",
    "controls": "by control, the accuracy of the same model on the same comparisons where it is shown no profile, no "
    "user and no hints of one (blind), or those of another user with a profile of similar length (swap; a fitted "
    "method has the whole state of the other user); shown_otherwise = comparisons whose user it was shown otherwise; "
    "difference = accuracy of the run minus that of the control, paired, with its interval: for blind, what knowing "
    "the user gains",
    "benchmarks": "by benchmark, what its own rule says: rule, score (null where a subset that it needs is missing), "
    "figures it is made of, details, missing subsets, and the same for each baseline; score_ci95 and figures_ci95: "
    f"95 % percentile intervals of {RESAMPLES} resamples through the rule, drawn within each subset by user, or by "
    "comparison where there are no users (by N in Ties); null where not defined, where there is too little to draw "
    "from, or where all resamples agree (score_ci95_reason). If several users judge the same responses, score_ci95 is "
    "the interval of an accuracy over users and responses; it is null for a score that is not a share of comparisons, "
    "and figures_ci95 is null",
    "quantization": "how the weights are quantised (form), and the whole model's bytes of parameters before "
    "(bytes_unquantized) and as held (bytes_held)",
    "users_fitted_on": "users on whom the method was fitted; their figures are not those of new people",
    "history_left_out": "comparisons of the history that tell nothing of their user, by reason; they are not used",
    USERS: USERS_DEFINITION,
    "unknown_users": "users that the model was not trained with; what it learned for anybody stands for them",
    "left_out": "comparisons that were not scored, because a response leaves no room for its prompt within the limit, "
    f"named in {LEFT_OUT}: how many, by subset, and by benchmark; they enter no other figure",
}
"""The meaning of what a summary has for some runs alone."""


def sum_up(runs: Sequence[ScoredRun], folder: Path) -> dict[str, Any]:
    """Finish a run and its controls, which follow it; return what its summary says."""
    run, *controls = runs
    job, inputs = run.job, run.job.inputs
    check_unchanged(inputs)
    if job.part is not None:
        files = (SCORES, COMPUTED, JUDGEMENTS)
        sizes = {"rows": len(run.rows), "rows_of_all": len(job.table)}
        return {"model": job.name, **get("parts", "finish").value(folder, job.part, **sizes, files=files)}
    if inputs.prepared is not None and (job.shown is inputs.comparisons or controls):
        get("sources", "prepared text").value(
            inputs.prepared
        )  # it was read, beside the tokens or in their place
    figures: dict[str, Any] = {}
    for control in controls:
        summary = finish_run(control, baselines={})
        figures[str(control.job.control)] = get("evaluation", "control figures").value(run, control, summary)
    return finish_run(run, baselines=get("evaluation", "baselines").value(job), controls=figures)


def finish_run(
    run: ScoredRun, *, baselines: BASELINE_ROWS, controls: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Put the rows of a run, which has one for each comparison, in order, write what belongs to its folder, and return
    its summary; `controls` are the figures of each control, by its name."""
    job, folder = run.job, run.folder
    assert folder is not None
    inputs, scorer, identity = job.inputs, job.scorer, job.decided["model"]
    if job.control is None:
        check_scores_differ(run)
    rows = folder.file.finish(job.table.ids)
    clusters = job.table.clusters(inputs.comparisons)
    if clusters.responses is not None or clusters.derived:
        get("evaluation", "clusters").value(folder.path, rows, clusters)
    judged = scorer.judge_figures(inputs.comparisons)
    undefined = judged.get("undefined")
    figures = summarise(
        rows,
        baselines=baselines,
        partial=VOTES,
        clusters=clusters,
        model=identity.get("name"),
        undefined=undefined,
    )
    shown = {"model": job.name, **job.view.shown, "limit": job.decided["limit"]}
    summary: dict[str, Any] = shown | figures
    more: dict[str, Any] = {"readout": scorer.identity().get("readout")}
    if (computed := folder.computed(job.table.ids)) is not None:
        alone, tokens = sum(row.tokens for row in rows), computed.tokens
        more["tokens"] = {"alone": alone, "computed": tokens, "saved": alone - tokens}
        more[EQUAL_SIDES] = computed.equal_sides and asdict(computed.equal_sides)
    more["hints"] = dict(inputs.hints) or None
    more["judge"] = judged or None
    more["controls"] = _defined(controls or {}, undefined) or None
    if inputs.benchmarks:
        more["benchmarks"] = get("evaluation", "benchmark scores").value(
            inputs, rows, baselines, clusters=clusters, seed=job.decided["seed"], undefined=undefined
        )
    more |= scorer.own_figures(inputs.comparisons)
    # rows have users, and large data are not read again for them
    unknown = scorer.unknown(inputs.comparisons if scorer.adapts else rows)
    has_users = undefined is None and write_users(folder.path, rows, clusters, unknown=unknown)
    more["unknown_users"] = None if unknown is None else len(unknown)
    if inputs.left_out is not None:
        inputs.left_out.write(folder.path / LEFT_OUT)
        for benchmark, count in inputs.left_out.benchmarks.items():
            more["benchmarks"][benchmark]["left_out"] = count
        more["left_out"] = inputs.left_out.to_json()
    more = {name: value for name, value in more.items() if value is not None}
    said = more.keys() | ({USERS} if has_users else set())
    summary |= more
    summary["definitions"] |= {name: meaning for name, meaning in DEFINITIONS.items() if name in said}
    if inputs.benchmarks and job.control is None and undefined is None:
        get("evaluation", "benchmark files").value(folder.path, job, rows)
    folder.finish(summary)
    if computed is not None:
        folder.settle_computed(computed)
    return summary


def _defined(controls: Mapping[str, Any], undefined: str | None) -> dict[str, Any]:
    """Return the figures of controls; a difference is None if the run or the control is not defined."""
    return {
        name: figures
        if undefined is None and figures["accuracy"] is not None
        else {
            **figures,
            "difference": None,
            "difference_ci95": None,
            "difference_ci95_reason": undefined or figures["ci95_reason"],
        }
        for name, figures in controls.items()
    }
