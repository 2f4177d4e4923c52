"""A benchmark: pairs {query, polite, rude}, scored by the share in which the polite answer wins, a tie being half."""

from collections.abc import Mapping, Sequence
from typing import Any

from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks.benchmark import Benchmark, BenchmarkScore, Place, pair_scores


def record(row: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """Turn a published record into one of prb_jax."""
    return {"id": place.number, "question": row["query"], "chosen": row["polite"], "rejected": row["rude"]}


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the share of pairs won."""
    pairs = [pair_scores(row) for row in rows]
    ties = sum(chosen == rejected for chosen, rejected in pairs)
    won = sum(chosen > rejected for chosen, rejected in pairs)
    return BenchmarkScore(score=(won + ties / 2) / len(rows), figures={"ties": ties / len(rows)})


BENCHMARK = Benchmark(
    name="politeness",
    rule="share of pairs in which the polite answer has the higher score; a tie is half",
    score=score,
    files="*.jsonl",
    home="a folder of JSON lines {query, polite, rude}",
    record=record,
)
