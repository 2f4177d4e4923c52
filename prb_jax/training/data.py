"""The order of training data, and the microbatches of fixed shape that a step is computed in.

Which comparisons step s sees is arithmetic: the data is read as an endless stream, epoch after epoch, each
in a random order of its own that depends on (seed, epoch) alone, and step s takes the positions
[s * B, (s + 1) * B) of it. So the position of a run is one number, and a run on another mesh or with
another number of processes sees the same comparisons in the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.training.objective import Extras
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.buckets import Bucket, batch_size, choose_buckets
from prb_jax.trees.tree import Tree

_STEPS_SIMULATED = 64
_OVERHEAD_TOKENS = 256
"""What starting one more microbatch costs, in tokens."""
_COMPILE_TOKENS = 32_768
"""What one more shape costs, in tokens of forward and backward."""


@dataclass(frozen=True)
class Microbatch:
    """One call of `accumulate`.

    Attributes:
      bucket: its shape; rows: its number of rows B.
      members: indices of its comparisons, at most `rows`.
    """

    bucket: Bucket
    rows: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """Which comparisons each step sees.

    Attributes:
      count: comparisons in the data.
      per_step: comparisons in a step.
      seed: of the order.
    """

    count: int
    per_step: int
    seed: int

    def epoch_of(self, step: int) -> float:
        """How many times the data has been seen before this step."""
        return step * self.per_step / self.count

    def step(self, step: int) -> np.ndarray:
        """int64 [per_step]: indices of the comparisons of one step (from 0)."""
        positions = np.arange(step * self.per_step, (step + 1) * self.per_step)
        epochs = positions // self.count
        members = np.empty(self.per_step, np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            members[chosen] = permutation(self.count, self.seed, int(epoch))[positions[chosen] % self.count]
        return members


@functools.lru_cache(maxsize=2)  # a step touches one epoch, or the end of one and the start of the next
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [count]: the order of one epoch, a pure function of the arguments."""
    # Philox by counter: defined for all platforms and versions, and epochs are independent streams.
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return np.argsort(generator.random(count), kind="stable")


@dataclass(frozen=True)
class Shapes:
    """Fixed shapes (bucket, rows), the largest bucket first."""

    buckets: tuple[tuple[Bucket, int], ...]
    attention_length: int = 8_192

    def deal(self, members: Sequence[int], trees: Sequence[Tree]) -> list[Microbatch]:
        """Microbatches for some of the trees: each goes to the smallest bucket that holds it, and rows
        left over in a larger bucket are filled from the smaller ones."""
        waiting: list[list[int]] = [[] for _ in self.buckets]
        for member in members:
            fitting = [b for b, (bucket, _) in enumerate(self.buckets) if bucket.fits(trees[member].shape)]
            waiting[fitting[-1]].append(member)
        dealt: list[Microbatch] = []
        for b, (bucket, rows) in enumerate(self.buckets):
            own = waiting[b]
            for start in range(0, len(own), rows):
                taken = own[start : start + rows]
                for smaller in waiting[b + 1 :]:
                    while smaller and len(taken) < rows and bucket.fits(trees[smaller[0]].shape):
                        taken.append(smaller.pop(0))
                dealt.append(Microbatch(bucket, rows, tuple(taken)))
        return dealt


def choose_shapes(
    trees: Sequence[Tree],
    order: Order,
    *,
    steps: int,
    tokens: int,
    divisor: int,
    multiple: int,
    max_buckets: int,
    attention_length: int,
) -> Shapes:
    """Shapes for these trees: buckets by their lengths, rows by what steps of this order hold.

    Args:
      steps: of the run: the longer it is, the more shapes pay for their compile.
      tokens: most padded tokens of a microbatch, where `divisor` rows allow it.
      divisor: rows are a multiple of it: the parts into which the mesh splits a batch.
      multiple: of P and R.
      max_buckets: most shapes.
      attention_length: context length at which attention costs as much as the rest of the model.
    """
    shapes = [tree.shape for tree in trees]
    chosen = choose_buckets(
        shapes,
        multiple=multiple,
        max_buckets=max_buckets,
        compile_cost_tokens=_COMPILE_TOKENS * order.count / (steps * order.per_step),
        attention_length=attention_length,
        tokens_per_batch=tokens,
        divisor=divisor,
    )
    counts = np.zeros((_STEPS_SIMULATED, len(chosen.buckets)), np.int64)
    for step in range(_STEPS_SIMULATED):
        np.add.at(counts[step], chosen.assignment[order.step(step)], 1)
    sized = [
        (bucket, _rows(bucket, counts[:, b], tokens=tokens, divisor=divisor))
        for b, bucket in enumerate(chosen.buckets)
    ]
    # Largest first, so that a shape that does not fit in memory shows at once; `deal` relies on the order.
    return Shapes(tuple(sorted(sized, key=lambda item: (-item[0].tokens, item[0]))))


def _rows(bucket: Bucket, counts: np.ndarray, *, tokens: int, divisor: int) -> int:
    """The number of rows that computes the fewest tokens over steps with so many members each."""
    most = batch_size(bucket, tokens_per_batch=tokens, divisor=divisor)
    largest = min(most, -(-max(int(counts.max()), 1) // divisor) * divisor)
    sizes = np.arange(divisor, largest + 1, divisor)
    batches = -(-counts[:, None] // sizes[None])
    cost = (batches * (sizes * bucket.tokens + _OVERHEAD_TOKENS)).sum(axis=0)
    return int(sizes[len(sizes) - 1 - cost[::-1].argmin()])  # of equals the largest


@dataclass(frozen=True)
class Examples:
    """Encoded training data.

    Attributes:
      comparisons: n labelled comparisons.
      trees: their tokens.
      weights: float32 [n], of each in the loss.
      rows: int32 [n], the row of each one's user in the method of personalisation (0: generic).
    """

    comparisons: Sequence[Comparison]
    trees: Sequence[Tree]
    weights: np.ndarray
    rows: np.ndarray

    def batch(self, microbatch: Microbatch, *, slots: Mapping[int, int]) -> tuple[TreeBatch, Extras]:
        """The arrays of one microbatch, on the host; rows that only fill up are masked.

        Args:
          slots: for each comparison its place among the user rows of this step.
        """
        rows, responses = microbatch.rows, microbatch.bucket.responses
        labels = np.zeros((rows, responses), np.float32)
        mask = np.zeros((rows, responses), bool)
        margin = np.zeros(rows, np.float32)
        weights = np.zeros(rows, np.float32)
        users = np.zeros(rows, np.int32)
        for row, member in enumerate(microbatch.members):
            comparison = self.comparisons[member]
            values = comparison.labels or ()
            labels[row, : len(values)] = values
            mask[row, : len(values)] = True
            margin[row] = 0.0 if comparison.margin is None else comparison.margin
            weights[row] = self.weights[member]
            users[row] = slots[member]
        trees = [self.trees[member] for member in microbatch.members]
        extras = Extras(labels=labels, mask=mask, margin=margin, weights=weights, users=users)
        return make_batch(trees, microbatch.bucket, batch=rows), extras


def padding_share(steps: Iterator[Sequence[Microbatch]], trees: Sequence[Tree]) -> float:
    """Share of the computed tokens that are padding, over some steps."""
    real = computed = 0
    for microbatches in steps:
        computed += sum(one.rows * one.bucket.tokens for one in microbatches)
        real += sum(trees[member].tokens for one in microbatches for member in one.members)
    return 1.0 - real / computed if computed else 0.0
