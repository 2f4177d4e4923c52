"""Personalised RewardBench (arXiv 2604.07343): win rate of the answer written for this user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.benchmarks.benchmark import (
    Benchmark,
    BenchmarkScore,
    by_subset,
    is_won,
    mean,
    pair_scores,
)
from prb_jax.records.sources.source import PRB_SUBSETS

PRB_REPOSITORY: Final = "QiyaoMa/Personalized-RewardBench"


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Win rate in each subset and over all pairs; mean scores as the paper's script prints them."""
    subsets = {
        name: {
            "pairs": len(members),
            "chosen_wins": sum(chosen > rejected for chosen, rejected in map(pair_scores, members)),
            "rejected_wins": sum(chosen < rejected for chosen, rejected in map(pair_scores, members)),
            "ties": sum(chosen == rejected for chosen, rejected in map(pair_scores, members)),
            "win_rate": mean(map(is_won, members)),
            "mean_chosen": mean(pair_scores(row)[0] for row in members),
            "mean_rejected": mean(pair_scores(row)[1] for row in members),
            "mean_difference": mean(pair_scores(row)[0] - pair_scores(row)[1] for row in members),
        }
        for name, members in by_subset(rows).items()
    }
    rates = {name: figures["win_rate"] for name, figures in subsets.items()}
    return BenchmarkScore(
        score=mean(map(is_won, rows)),
        figures={**rates, "mean of subsets": mean(rate for rate in rates.values() if rate is not None)},
        details={"subsets": subsets},
        missing=[name for name in PRB_SUBSETS.values() if name not in subsets],
    )


BENCHMARK = Benchmark(
    name="prb",
    rule="chosen wins / pairs, over all pairs that were scored; a tie is no win",
    score=score,
    won=is_won,
    repository=PRB_REPOSITORY,
)
