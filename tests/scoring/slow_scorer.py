"""A scorer for tests of interruption: deterministic, in batches out of order, slow enough to be killed.

python -m tests.scoring.slow_scorer OUT COUNT [SECONDS_PER_BATCH [CONTROLS]]
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prb_jax import Comparison, evaluate
from prb_jax.trees.tree import ScoredBatch, Truncation


@dataclass
class SlowScorer:
    """Scores by length with a twist; ``scored`` and ``skipped`` count what ``stream`` did."""

    batch: int = 4
    seconds: float = 0.0
    weights: str = "sha256:0"
    until: int | None = None  # it is interrupted when so many comparisons are scored
    scored: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> Mapping[str, Any]:
        return {"name": "slow", "files": {"weights": self.weights}}

    def stream(
        self, comparisons: Sequence[Comparison], *, skip: Callable[[Sequence[int]], bool], **options: Any
    ) -> Iterator[ScoredBatch]:
        self.options = options
        # Longest first, as a scorer with buckets does: not the order of the input.
        order = sorted(range(len(comparisons)), key=lambda i: (-len(comparisons[i].responses[0]), i))
        for start in range(0, len(order), self.batch):
            indices = order[start : start + self.batch]
            if skip(indices):
                self.skipped += indices
                continue
            if len(self.scored) == self.until:
                raise KeyboardInterrupt
            time.sleep(self.seconds)
            self.scored += indices
            scores = [
                np.array([np.float32(len(text)) / 7 for text in comparisons[i].responses], np.float32)
                for i in indices
            ]
            cut = [Truncation(posts_dropped=i % 3) for i in indices]
            yield ScoredBatch(indices, scores, [10 + i for i in indices], cut)


def comparisons(count: int) -> list[Comparison]:
    return [
        Comparison(
            id=f"c{number}",
            question="Which?",
            chosen="a" * (1 + number * 7 % 13),
            rejected="b" * (1 + number * 5 % 11),
            user_id=f"u{number % 5}",
            subset="odd" if number % 2 else "even",
        )
        for number in range(count)
    ]


if __name__ == "__main__":
    out, count, seconds, controls = (*sys.argv[1:], *("0", "none")[len(sys.argv) - 3 :])
    scorer = SlowScorer(seconds=float(seconds))
    evaluate(scorer, comparisons(int(count)), out=out, controls=controls, progress=False)
