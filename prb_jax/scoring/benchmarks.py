"""What benchmarks say of a finished run: their own scores, and the result files of RewardBench."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prb_jax.benchmarks import get_benchmark
from prb_jax.benchmarks.benchmark import BenchmarkScore
from prb_jax.benchmarks.resampling import RESAMPLES, score_intervals
from prb_jax.data.comparison import Comparison, Message
from prb_jax.data.writing import write_json, writing
from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.clusters import Clusters
from prb_jax.scoring.baselines import BASELINES
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.view import View
from prb_jax.text.visible import visible

BENCHMARKS_DEFINITION = (
    "by benchmark, what its own rule says: rule, score (null where a subset that it needs is missing), figures "
    "it is made of, details, missing subsets, and the same for each baseline; score_ci95 and figures_ci95: 95 % "
    f"percentile intervals of {RESAMPLES} resamples through the rule, drawn within each subset by user, or by "
    "comparison where there are no users (by N in Ties); null where not defined, where there is too little to "
    "draw from, or where all resamples agree (score_ci95_reason)"
)


@runtime_checkable
class _Tokenizer(Protocol):
    """What writes conversations as the model sees them."""

    @property
    def template_hash(self) -> str: ...
    def render(self, conversations: Sequence[Sequence[Message]]) -> list[str]: ...


def check_benchmarks(inputs: Inputs) -> None:
    """Makes sure, before anything is scored, that every benchmark's rule can be applied.

    Raises:
      DataError: naming the comparison that is not of the form that the rule needs.
    """
    for name, positions in inputs.benchmarks.items():
        unscored = [inputs.comparisons[position] for position in positions]
        try:
            get_benchmark(name).score(
                [
                    ScoredRow(c.id, c.subset, c.user_id, [0.0] * len(c.responses), c.labels or ())
                    for c in unscored
                ]
            )
        except DataError as error:
            raise DataError(
                f"{', '.join(inputs.sources)}: the rule of '{name}' cannot be applied: {error}"
            ) from error


def benchmark_scores(
    inputs: Inputs,
    rows: Sequence[ScoredRow],
    baselines: Mapping[str, Sequence[ScoredRow] | str],
    *,
    clusters: Clusters,
    seed: int,
) -> dict[str, Any]:
    """The entry "benchmarks" of a summary.

    Args:
      inputs: of the run.
      rows: in the order of the comparisons.
      baselines: by name, rows in the same order, or why it is not defined.
      clusters: of the rows.
      seed: of the resampling.

    Raises:
      DataError: for rows that are not of the form that a benchmark's rule needs.
    """
    scores: dict[str, Any] = {}
    for name, positions in inputs.benchmarks.items():
        benchmark = get_benchmark(name)
        benchmark_rows = [rows[position] for position in positions]
        users = [clusters.users[position] for position in positions]
        scores[name] = {
            "rule": benchmark.rule,
            **benchmark.score(benchmark_rows).to_json(),
            **score_intervals(benchmark, benchmark_rows, users, seed=seed),
            "baselines": {
                baseline: _undefined(benchmark.score(benchmark_rows), scored)
                if isinstance(scored, str)
                else benchmark.score([scored[position] for position in positions]).to_json()
                for baseline, scored in baselines.items()
                if baseline in BASELINES  # votes speak of some comparisons, and a rule needs all
            },
        }
    return scores


def _undefined(score: BenchmarkScore, reason: str) -> dict[str, Any]:
    """The entry of a baseline that says nothing of the comparisons."""
    nothing = {
        "score": None,
        "figures": dict.fromkeys(score.figures),
        "details": {},
        "missing": score.missing,
    }
    return {**nothing, "reason": reason}


def write_result_files(
    out: Path,
    scorer: Scorer,
    inputs: Inputs,
    rows: Sequence[ScoredRow],
    *,
    name: str,
    view: View,
) -> None:
    """Writes RewardBench's result files below ``out/BENCHMARK``, for the benchmarks that have them.

    Args:
      out: the run folder.
      scorer: whose chat template writes the texts; without one they are the bare conversations.
      inputs: of the run.
      rows: in the order of the comparisons.
      name: of the model.
      view: of the run.

    Raises:
      RunError: a file cannot be written.
    """
    scorer_tokenizer = getattr(scorer, "tokenizer", None)
    tokenizer = scorer_tokenizer if isinstance(scorer_tokenizer, _Tokenizer) else None
    for benchmark, positions in inputs.benchmarks.items():
        if not get_benchmark(benchmark).results:
            continue
        from prb_jax.benchmarks.results import result_files

        texts = []
        for position in positions:
            spoken = _conversations(inputs.comparisons[position], view)
            texts.append(
                [_bare(conversation) for conversation in spoken]
                if tokenizer is None
                else tokenizer.render(spoken)
            )
        files = result_files(
            benchmark,
            [rows[position] for position in positions],
            texts,
            model=name,
            model_type="Custom Classifier" if tokenizer is None else "Seq. Classifier",
            chat_template=None if tokenizer is None else tokenizer.template_hash,
        )
        for path, content in files.items():
            file = out / benchmark / path
            with writing(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, content, indent=4, sort_keys=True)


def _conversations(comparison: Comparison, view: View) -> list[tuple[Message, ...]]:
    seen = visible(
        comparison, profile_posts=view.profile_posts, protocol=view.protocol, order_claim=view.order_claim
    )
    return [(*seen.prefix_messages, Message("assistant", response)) for response in seen.responses]


def _bare(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages)
