"""Finish a run: order its rows and write its summary, benchmark scores and RewardBench's result files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import PrbWarning, RunError
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.runs.evaluation import COMPUTED, JUDGEMENTS, LEFT_OUT, SCORES
from prb_jax.runs.users import USERS, USERS_DEFINITION, write_users
from prb_jax.scoring import VOTES
from prb_jax.scoring.clusters import clusters_of_table
from prb_jax.scoring.run import ScoredRun, explanation
from prb_jax.scoring.unchanged import check_unchanged
from prb_jax.seams import get
from prb_jax.trees.tree import EQUAL_SIDES

BASELINE_ROWS = Mapping[str, Sequence[ScoredRow] | str]
"""Name of a baseline -> its rows in the order of the comparisons, or the reason why it is undefined."""

_HANDFUL: Final = 9  # up to this many comparisons, equal scores are a warning instead of an error
RESAMPLES: Final = 400  # bootstrap resamples for the interval of a benchmark's score

DEFINITIONS: Final = {
    "readout": "how the model's outputs become one score: --readout",
    "tokens": "alone = tokens of the comparisons, each counted separately with its prompt once; computed = tokens the "
    "model computed, without padding: comparisons with the same beginning share its tokens, and an encoder computes "
    "each distinct pair of prompt and response; saved = the difference",
    EQUAL_SIDES: "comparisons in which a response with the highest label and another one are the same tokens after the "
    "chat template, so no model can win: their number, and the ids of the first ten",
    "hints": "user information in the prompt beyond the profile; without = comparisons without a hint; upper_bound = "
    "hints that no model could know: such a run shows how much could be reached and is not a result",
    "judge": "verdicts of the judge. Paper protocol: accuracy = share of correct verdicts, where a reply without a "
    "verdict counts as A; position_bias = its difference between comparisons with the better response in A and in B. "
    "Both orders: order_consistent_accuracy = share of comparisons whose better response is preferred in both orders; "
    "consistent = share whose two verdicts prefer the same response; position_bias = share of A minus share of B among "
    "the verdicts; unparsable = comparisons with an unreadable reply. Ratings of single responses: mean_rating = mean "
    "of all ratings; mean_rating_of_better = mean for the responses with the highest label; mean_rating_of_others = "
    "mean for the others; unparsable = comparisons with an unreadable reply, which count as ties and not as wins; "
    "mean_number_mass = probability of the numbers at the rating, if the endpoint reports it. undefined = reason why "
    "no figure of the run is defined, if no comparison could be judged",
    "controls": "by control, the accuracy of the same model on the same comparisons without profile, user and hints "
    "(blind), or with those of another user with a profile of similar length (swap; a fitted method uses the whole "
    "state of the other user); shown_otherwise = comparisons whose user information differs from the run; difference = "
    "accuracy of the run minus accuracy of the control, paired, with its interval: for blind, the gain from knowing "
    "the user",
    "benchmarks": "by benchmark, results of its own rule: rule, score (null if a required subset is missing), "
    "figures that make up the score, details, missing subsets, and the same for each baseline; score_ci95 and "
    f"figures_ci95: 95 % percentile intervals of {RESAMPLES} resamples through the rule, drawn within each subset by "
    "user, or by comparison if there are no users (by N in Ties); null if undefined, if there are too few rows to draw "
    "from, or if all resamples agree (score_ci95_reason). If several users judge the same responses, score_ci95 is the "
    "interval of an accuracy over users and responses; it is null for a score that is not a share of comparisons, and "
    "figures_ci95 is null",
    "quantization": "format of the quantised weights (form), and bytes of all parameters of the model before "
    "(bytes_unquantized) and after (bytes_held)",
    "users_fitted_on": "users that the method was fitted on; their figures are not those of new people",
    "history_left_out": "uninformative comparisons of the history, by reason; they are not used",
    "users_without_history": "users of the data without a comparison in the history (--history): the model knows only "
    "their posts, or nothing",
    USERS: USERS_DEFINITION,
    "unknown_users": "users that the model was not trained on; the model uses its generic prompt or state for them",
    "left_out": "comparisons that were not scored because a response leaves no room for the prompt within the limit, "
    f"listed in {LEFT_OUT}: their number in total, by subset and by benchmark; no other figure includes them",
}
"""Definitions of entries that only some summaries have."""


def sum_up(runs: Sequence[ScoredRun], folder: Path) -> dict[str, Any]:
    """Finish a run and its controls, in this order in `runs`; return the summary of the run."""
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
        )  # because text was read in addition to tokens, or instead of them
    figures: dict[str, Any] = {}
    for control in controls:
        summary = finish_run(control, baselines={})
        figures[str(control.job.control)] = get("evaluation", "control figures").value(run, control, summary)
    return finish_run(run, baselines=get("evaluation", "baselines").value(job), controls=figures)


def finish_run(
    run: ScoredRun, *, baselines: BASELINE_ROWS, controls: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Order the rows of a complete run, write its folder and return its summary.

    `controls` maps the name of each control to its figures.
    """
    job, folder = run.job, run.folder
    assert folder is not None
    inputs, scorer, identity = job.inputs, job.scorer, job.decided["model"]
    if job.control is None:
        _check_scores_differ(run)
    rows = folder.file.finish(job.table.ids)
    clusters = clusters_of_table(job.table, inputs.comparisons)
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
    # rows contain users, so large data need not be read again
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
    """Return the figures of controls; a difference is None if the run or the control is undefined."""
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


def _check_scores_differ(run: ScoredRun) -> None:
    """Check that a model with weights does not give different texts the same score.

    Raises:
      RunError: All scores are equal; for up to `_HANDFUL` comparisons this is only a warning.
    """
    if run.job.scorer.reader is None or not run.job.inputs.comparisons.in_memory:
        return
    scores = (score for row in run.rows for score in row.scores)
    first = next(scores, None)
    if first is None or any(score != first for score in scores):
        return
    comparisons = run.job.inputs.comparisons
    texts = ((comparison.prompt, text) for comparison in comparisons for text in comparison.responses)
    if (one := next(texts, None)) is None or all(text == one for text in texts):
        return
    message = (
        f"{run.job.name}: gives every response the same score, {first}, over different texts"
        f"{explanation(run.job.scorer)}"
    )
    if len(comparisons) > _HANDFUL:
        raise RunError(f"{message}. Its figures would be meaningless")
    warnings.warn(message, PrbWarning, stacklevel=2)
