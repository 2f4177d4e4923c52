"""Finish a run: its rows in order, its summary, and what else belongs to its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.runs.clusters import write_clusters
from prb_jax.runs.users import USERS, USERS_DEFINITION, write_users
from prb_jax.scoring.baselines import FIRST, PROFILE_OVERLAP, SHOWN_OVERLAP, VOTES, profile_overlap
from prb_jax.scoring.benchmarks import BENCHMARKS_DEFINITION, benchmark_scores, write_result_files
from prb_jax.scoring.comparison_table import ComparisonTable, clusters_of
from prb_jax.scoring.controls import CONTROLS_DEFINITION
from prb_jax.scoring.inputs import LEFT_OUT_DEFINITION, Inputs, LeftOut
from prb_jax.scoring.prompt_extras import HINTS_DEFINITION
from prb_jax.scoring.run import RunIdentity, ScoredRun, shown_view
from prb_jax.scoring.scorer import AdaptsToUsers, HasJudgements, ReadsTokens, Scorer
from prb_jax.sources.large import LargeComparisons

TOKENS_DEFINITION = (
    "of the comparisons, each by itself with its prompt once (alone); computed for them, without padding, where those "
    "that begin alike share their beginning (computed); the difference (saved)"
)
UNKNOWN_USERS_DEFINITION = (
    "users that the model was not trained with; what it learned for anybody stands for them"
)
FITTED_DEFINITION = "users on whom the method was fitted; their figures are not those of new people"
HISTORY_DEFINITION = (
    "comparisons of the history that tell nothing of their user, by reason; they are not used"
)
JUDGE_DEFINITION = (
    "verdicts of the judge. The paper's way: the share of right ones, where a reply without a verdict counts as A "
    "(accuracy), and its difference between comparisons with the better response in A and in B (position_bias). Both "
    "orders: the share of comparisons whose better response is preferred in both (order_consistent_accuracy), or any "
    "one response (consistent); the difference between the shares of A and of B among the verdicts (position_bias); "
    "comparisons with a reply that cannot be read (unparsable). Ratings of single responses: their mean (mean_rating), "
    "that of the responses with the highest label (mean_rating_of_better) and of the others; a comparison with a reply "
    "that cannot be read (unparsable) is a tie, which is no win; the probability of the numbers where one is named, if "
    "the endpoint tells it (mean_number_mass)"
)
QUANTIZATION_DEFINITION = (
    "how the weights are quantised (form), and the whole model's bytes of parameters before (bytes_unquantized) and as "
    "held (bytes_held)"
)
READOUT_DEFINITION = "how the model's outputs become one score: --readout"


def finish_run(
    run: ScoredRun,
    *,
    identity: RunIdentity,
    scorer: Scorer,
    inputs: Inputs,
    table: ComparisonTable,
    baselines: Mapping[str, Sequence[ScoredRow] | str],
    name: str,
    left_out: LeftOut | None,
    controls: Mapping[str, Any] | None = None,
) -> tuple[Sequence[ScoredRow], dict[str, Any]]:
    """Put the rows of a run in order, and write the summary and what else belongs to the folder.

    Args:
      run: with a row for each comparison.
      identity: of the run.
      scorer: the model.
      inputs: of the run.
      table: of all comparisons.
      baselines: by name, rows in the order of the inputs, or why it is not defined on them.
      name: of the model in tables.
      left_out: comparisons that were not scored.
      controls: figures of each control, by its name.

    Returns:
      The rows in the order of the inputs, and the summary.
    """
    folder = run.folder
    assert folder is not None
    rows = folder.file.finish(table.ids)
    clusters = clusters_of(inputs.comparisons, table)
    write_clusters(folder.path, rows, clusters)
    summary = {
        "model": name,
        **shown_view(identity.view),
        "limit": identity.limit,
        **summarise(
            rows, baselines=baselines, partial=VOTES, clusters=clusters, model=identity.model.get("name")
        ),
    }
    definitions = summary["definitions"] = dict(summary["definitions"])

    def add(name: str, value: Any, definition: str) -> None:
        summary[name], definitions[name] = value, definition

    if (readout := scorer.identity().get("readout")) is not None:
        add("readout", readout, READOUT_DEFINITION)
    if (computed := folder.computed_tokens()) is not None:
        alone = sum(row.tokens for row in rows)
        tokens = {"alone": alone, "computed": computed, "saved": alone - computed}
        add("tokens", tokens, TOKENS_DEFINITION)
    if identity.hints:
        add("hints", dict(identity.hints), HINTS_DEFINITION)
    if isinstance(scorer, HasJudgements):
        add("judge", scorer.judge_figures(inputs.comparisons), JUDGE_DEFINITION)
    if controls:
        add("controls", dict(controls), CONTROLS_DEFINITION)
    if inputs.benchmarks:
        scores = benchmark_scores(inputs, rows, baselines, clusters=clusters, seed=identity.seed)
        add("benchmarks", scores, BENCHMARKS_DEFINITION)
    if (form := identity.model.get("quantize")) is not None and hasattr(scorer, "bytes_of_weights"):
        before, held = scorer.bytes_of_weights() or (None, None)  # pyright: ignore[reportAttributeAccessIssue]
        weights = {"form": form, "bytes_unquantized": before, "bytes_held": held}
        add("quantization", weights, QUANTIZATION_DEFINITION)
    unknown = scorer.reader.unknown_users(rows) if isinstance(scorer, ReadsTokens) else None
    if isinstance(scorer, AdaptsToUsers):
        unknown = scorer.unknown(inputs.comparisons)
        add("users_fitted_on", len(scorer.fitted_on(inputs.comparisons)), FITTED_DEFINITION)
        if scorer.left_out:
            add("history_left_out", dict(scorer.left_out), HISTORY_DEFINITION)
    if write_users(folder.path, rows, clusters, unknown=unknown):
        definitions[USERS] = USERS_DEFINITION
    if unknown is not None:
        add("unknown_users", len(unknown), UNKNOWN_USERS_DEFINITION)
    if left_out is not None:
        left_out.write(folder.path)
        for benchmark, count in left_out.benchmarks.items():
            summary["benchmarks"][benchmark]["left_out"] = count
        add("left_out", left_out.to_json(), LEFT_OUT_DEFINITION)
    if identity.control is None:
        write_result_files(folder.path, scorer, inputs, rows, name=name, view=identity.view)
    folder.finish(summary)
    if computed is not None:
        folder.settle_computed(computed)
    return rows, summary


_WITHOUT_SCORES: Final = {
    PROFILE_OVERLAP: "no response shares a word with a profile",
    FIRST: "the responses are given as chosen and rejected, so that their places say nothing",
}
_VOTES_OF_LARGE_DATA: Final = "the data are read by windows, and the votes of other users need them at once"
_NO_VOTES: Final = (
    "no two users judge the same responses to the same prompt, or too few of them judge another pair"
)


def all_baselines(
    comparisons: Sequence[Comparison], table: ComparisonTable, *, posts: int | None
) -> dict[str, Sequence[ScoredRow] | str]:
    """Return the rows of every baseline by name, or why one says nothing of the comparisons.

    The votes of other users have rows only for the comparisons that other users judge too. "baseline:profile-overlap-
    shown" is there where the model sees some posts of a profile and not all of them.

    Args:
      comparisons: of the run.
      table: of them.
      posts: how many posts of a profile the model sees; None for a scorer that sees everything.
    """
    baselines: dict[str, Sequence[ScoredRow] | str] = {}
    for name, rows in table.baselines().items():
        says_nothing = name in _WITHOUT_SCORES and not any(any(row.scores) for row in rows)
        baselines[name] = _WITHOUT_SCORES[name] if says_nothing else rows
    if isinstance(comparisons, LargeComparisons):
        return baselines | dict.fromkeys(VOTES, _VOTES_OF_LARGE_DATA)
    if posts and any(len(comparison.profile) > posts for comparison in comparisons):
        baselines[SHOWN_OVERLAP] = _rows(table, profile_overlap(comparisons, posts=posts))
    for name, votes in VOTES.items():
        baselines[name] = _rows(table, votes(comparisons)) or _NO_VOTES
    return baselines


def _rows(table: ComparisonTable, scores: Sequence[np.ndarray | None]) -> list[ScoredRow]:
    return [table.row(index, row.tolist()) for index, row in enumerate(scores) if row is not None]
