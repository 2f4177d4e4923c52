"""A short list of fixed shapes (P, K, R) chosen from the data: least padding for few compiles.

Each bucket costs one compile; each tree is padded up to its bucket. What is minimised is

    sum over buckets of  rows * cell_cost(bucket)  +  compile_cost_tokens * buckets

with rows rounded up to whole batches. All choices depend on the shapes alone, not on their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.errors import short_repr
from prb_jax.models.tree_mask import TreeLayout
from prb_jax.trees.bucket_search import Objective, cell_cost, refine, split_by_k

__all__ = ["Bucket", "Buckets", "balanced_batch", "batch_size", "cell_cost", "choose_buckets"]


@dataclass(frozen=True, order=True)
class Bucket(TreeLayout):
    """A fixed shape that trees are padded to; buckets are ordered by P, K and R."""

    def fits(self, shape: tuple[int, int, int]) -> bool:
        """Whether a tree of this shape (p, K, r) can be padded to the bucket."""
        return shape[0] <= self.prefix and shape[1] <= self.responses and shape[2] <= self.response_length


@dataclass(frozen=True, eq=False)
class Buckets:
    """The chosen buckets, in ascending order, and for every tree the number of its bucket (int32)."""

    buckets: tuple[Bucket, ...]
    assignment: np.ndarray

    __repr__ = short_repr


def batch_size(bucket: Bucket, *, tokens_per_batch: int, divisor: int = 1) -> int:
    """The most rows of `bucket` within `tokens_per_batch`: a multiple of `divisor`, at least one."""
    return _objective(tokens_per_batch=tokens_per_batch, divisor=divisor).most_rows(bucket.tokens)


def balanced_batch(rows: int, bucket: Bucket, *, tokens_per_batch: int, divisor: int = 1) -> int:
    """Rows of each batch when `rows` trees of one bucket are dealt evenly into as few as possible.

    A multiple of `divisor`, at most `batch_size`, and no larger than the rows need.
    """
    batch, _ = _objective(tokens_per_batch=tokens_per_batch, divisor=divisor).deal(
        np.asarray(rows), np.asarray(bucket.tokens)
    )
    return int(batch)


def choose_buckets(
    shapes: Sequence[tuple[int, int, int]],
    *,
    multiple: int = 16,
    response_multiple: int | None = None,
    max_buckets: int = 8,
    compile_cost_tokens: float = 32_768,
    attention_length: int = 8_192,
    tokens_per_batch: int = 16_384,
    divisor: int = 1,
) -> Buckets:
    """Chooses at most `max_buckets` shapes for trees of these shapes and assigns every tree to one.

    Args:
      shapes: (p, K, r) of every tree: prefix length, responses, longest response.
      multiple: P is a multiple of this (16 is fine on CPU and GPU, 128 suits TPU kernels).
      response_multiple: R is a multiple of this; `multiple` when not given.
      max_buckets: the most compiles allowed.
      compile_cost_tokens: what a further compile is worth, in tokens of forward: seconds of a
        compile times tokens per second. With few rows this leads to few buckets.
      attention_length: context length at which attention costs as much as the rest of the model.
      tokens_per_batch, divisor: as in `plan_batches`; used to count whole batches.

    Raises:
      ValueError: no shape, a shape that is not positive (p may be 0), or an option below 1.
    """
    response_multiple = multiple if response_multiple is None else response_multiple
    options = {
        "multiple": multiple,
        "response_multiple": response_multiple,
        "max_buckets": max_buckets,
        "attention_length": attention_length,
        "tokens_per_batch": tokens_per_batch,
        "divisor": divisor,
    }
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, found {value}")
    table = np.asarray(shapes, np.int64).reshape(-1, 3)
    if len(table) == 0:
        raise ValueError("expected at least one shape, found none")
    if table[:, 0].min() < 0 or table[:, 1:].min() < 1:
        raise ValueError("shapes (p, K, r) need p >= 0, K >= 1, r >= 1")
    # At least one prefix column keeps every array non-empty.
    units = np.asarray([multiple, 1, response_multiple])
    rounded = -(-np.maximum(table, 1) // units) * units
    cells, row_cell, counts = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)

    objective = _objective(
        tokens_per_batch=tokens_per_batch,
        divisor=divisor,
        attention_length=attention_length,
        compile_cost_tokens=compile_cost_tokens,
    )
    tops = refine(cells, counts, split_by_k(cells, counts, objective, max_buckets), objective)
    cheapest = objective.row_costs(cells, tops).argmin(axis=0)
    used = np.unique(cheapest)
    return Buckets(
        buckets=tuple(Bucket(*(int(side) for side in tops[b])) for b in used),
        assignment=np.searchsorted(used, cheapest)[row_cell.reshape(-1)].astype(np.int32),
    )


def _objective(
    *, tokens_per_batch: int, divisor: int, attention_length: int = 8_192, compile_cost_tokens: float = 0
) -> Objective:
    return Objective(
        tokens_per_batch=tokens_per_batch,
        divisor=divisor,
        attention_length=attention_length,
        compile_cost_tokens=compile_cost_tokens,
    )
