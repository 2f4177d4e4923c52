"""Benchmark scores of a run, each by the benchmark's own rule, and RewardBench's result files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prb_jax.errors import DataError
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks import get_benchmark
from prb_jax.records.benchmarks.benchmark import result_files, score_intervals
from prb_jax.records.conversation import conversations
from prb_jax.records.writing import write_json
from prb_jax.scoring.baselines import BASELINES
from prb_jax.scoring.inputs import Inputs, Job
from prb_jax.scoring.summary import BASELINE_ROWS, RESAMPLES
from prb_jax.text.view import visible


def check_benchmarks(inputs: Inputs) -> None:
    """Check, before anything is scored, that every benchmark's rule can be applied.

    Raises:
      DataError: A comparison does not have the form that the rule needs; the message names it.
    """
    for name, positions in inputs.benchmarks.items():
        unscored = (inputs.comparisons[position] for position in positions)
        rows = [
            ScoredRow(c.id, c.subset, c.user_id, [0.0] * len(c.responses), c.labels or ()) for c in unscored
        ]
        try:
            get_benchmark(name).score(rows)
        except DataError as error:
            raise DataError(
                f"{', '.join(inputs.sources)}: the rule of '{name}' cannot be applied: {error}"
            ) from error


def benchmark_scores(
    inputs: Inputs,
    rows: Sequence[ScoredRow],
    baselines: BASELINE_ROWS,
    *,
    clusters: Clusters,
    seed: int,
    undefined: str | None = None,
) -> dict[str, Any]:
    """Return the entry "benchmarks" of a summary.

    Args:
      inputs: Inputs of the run.
      rows, baselines, clusters: Results in the order of the comparisons.
      seed: Seed for the resampling.
      undefined: Reason why no figure of the rows is defined, if any.

    Raises:
      DataError: Rows do not have the form that a benchmark's rule needs.
    """
    scores: dict[str, Any] = {}
    for name, positions in inputs.benchmarks.items():
        benchmark = get_benchmark(name)
        benchmark_rows = [rows[position] for position in positions]
        score = benchmark.score(benchmark_rows).to_json()
        none = {**score, "score": None, "figures": dict.fromkeys(score["figures"]), "details": {}}
        if undefined is None:
            of_rows = clusters.take(positions)
            intervals = score_intervals(benchmark, benchmark_rows, of_rows, seed=seed, resamples=RESAMPLES)
        else:
            score = none
            intervals = {"score_ci95": None, "score_ci95_reason": undefined, "figures_ci95": none["figures"]}
        scores[name] = {
            "rule": benchmark.rule,
            **score,
            **intervals,
            "baselines": {
                baseline: {**none, "reason": scored}
                if isinstance(scored, str)
                else benchmark.score([scored[position] for position in positions]).to_json()
                for baseline, scored in baselines.items()
                if baseline in BASELINES  # votes cover some comparisons, and a rule needs all
            },
        }
    return scores


def write_result_files(out: Path, job: Job, rows: Sequence[ScoredRow]) -> None:
    """Write RewardBench's result files to ``out/BENCHMARK``, for the benchmarks that define them.

    The texts are conversations in the model's chat template, or bare ones without a template.
    """
    tokenizer = job.scorer.tokenizer
    render = getattr(tokenizer, "render", None)
    for benchmark, positions in job.inputs.benchmarks.items():
        if (result_tables := get_benchmark(benchmark).results) is None:
            continue
        texts = []
        for position in positions:
            seen = visible(
                job.inputs.comparisons[position],
                profile_posts=job.view.profile_posts,
                protocol=job.view.protocol,
                order_claim=job.view.order_claim,
            )
            spoken = conversations(seen.prefix_messages, seen.responses)
            bare = ["\n\n".join(message.content for message in messages) for messages in spoken]
            texts.append(bare if render is None else render(spoken))
        files = result_files(
            result_tables([rows[position] for position in positions], texts),
            model=job.name,
            model_type="Custom Classifier" if render is None else "Seq. Classifier",
            chat_template=None if render is None else tokenizer.template_hash,
        )
        for path, content in files.items():
            write_json(out / benchmark / path, content, indent=4, sort_keys=True)
