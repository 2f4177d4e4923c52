"""Training data as trees of token ids, and padded batches of them for accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.scoring.comparison_table import TableRow
from prb_jax.scoring.stream import Encode
from prb_jax.training.objective import Extras
from prb_jax.training.order import StepOrder
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.shapes import PaddedBatch, ShapeOptions, Shapes, choose_shapes
from prb_jax.trees.tree import Tree

STEPS_SIMULATED = 64
"""Steps at the beginning of a run that speak for all of them."""

_ENCODED = 256
_BATCH_COST = 256
"""What starting one more microbatch costs, in tokens."""


def shapes_of_steps(trees: Sequence[Tree], order: StepOrder, *, steps: int, options: ShapeOptions) -> Shapes:
    """Shapes of microbatches for these trees: buckets by their lengths, rows by what steps of this order hold.

    Args:
      steps: of the run: the longer it is, the more shapes pay for their compile.
      options: with the most padded tokens of a microbatch and the most shapes.
    """
    options = replace(
        options,
        compile_cost=options.compile_cost * order.count / (steps * order.per_step),
        batch_cost=_BATCH_COST,
    )
    together: Sequence[np.ndarray] = [order.step(step) for step in range(STEPS_SIMULATED)]
    if isinstance(trees, TreesOnDemand):
        lengths, together = trees.planned(together)
    else:
        lengths = [tree.shape for tree in trees]
    return choose_shapes(lengths, options=options, together=together, fill=True)


class TreesOnDemand(Sequence[Tree]):
    """Trees of data larger than memory: those of the steps at hand are there, and no others.

    Args:
      comparisons: of the data, read when they are asked for.
      encode: comparisons to trees.
      shapes: int64 [n, 3], (p, K, r) of every tree, where they are known without reading it.
    """

    def __init__(
        self, comparisons: Sequence[Comparison], encode: Encode, *, shapes: np.ndarray | None = None
    ) -> None:
        self._comparisons, self._encode, self._shapes = comparisons, encode, shapes
        self._held: dict[int, Tree] = {}

    def __len__(self) -> int:
        return len(self._comparisons)

    def __getitem__(self, index: Any) -> Any:
        return self._held[int(index)]

    def ahead(self, members: np.ndarray) -> None:
        """Make the trees of a step; those of earlier steps are let go.

        Raises:
          DataError: one of its comparisons cannot be read or shown to the model.
        """
        wanted = members.tolist()
        missing = sorted(set(wanted) - self._held.keys())  # in the order in which they lie on the disk
        comparisons = [self._comparisons[member] for member in missing]
        made = dict(zip(missing, self._encode(comparisons), strict=True))
        self._held = {member: made[member] if member in made else self._held[member] for member in wanted}

    def planned(self, together: Sequence[np.ndarray]) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Return the lengths to plan with, int64 [m, 3], and for some steps which of them are theirs.

        Where the lengths of all are not known, those of these steps speak for all.
        """
        if self._shapes is not None:
            return self._shapes, together
        members = np.unique(np.concatenate(together))
        lengths = []
        for start in range(0, len(members), _ENCODED):
            self.ahead(members[start : start + _ENCODED])
            lengths += [self[member].shape for member in members[start : start + _ENCODED]]
        self._held = {}
        return np.asarray(lengths, np.int64), [np.searchsorted(members, step) for step in together]


@dataclass(frozen=True)
class Examples:
    """Encoded training data.

    Attributes:
      comparisons: n labelled comparisons, or what is known of them without their text.
      trees: their tokens.
      weights: float32 [n], of each in the loss.
      rows: int32 [n], the row of each one's user in the method of personalisation (0: generic).
    """

    comparisons: Sequence[Comparison | TableRow]
    trees: Sequence[Tree]
    weights: np.ndarray
    rows: np.ndarray

    def ahead(self, members: np.ndarray) -> None:
        """Make sure that the trees of a step are there."""
        if isinstance(self.trees, TreesOnDemand):
            self.trees.ahead(members)

    def batch(self, microbatch: PaddedBatch, *, slots: Mapping[int, int]) -> tuple[TreeBatch, Extras]:
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
