"""Which comparisons are scored together: windows of the input, dealt into batches of few fixed shapes.

Everything here is a function of the whole input and of the options alone: not of what is already
scored, nor of how many processes run. So a continued run forms the same batches and gives the same
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Mesh

from prb_jax.sharding import mesh_shape
from prb_jax.trees.batches import PlannedBatch
from prb_jax.trees.buckets import Bucket, Buckets, batch_size, cell_cost, choose_buckets

if TYPE_CHECKING:
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.config.encoder import EncoderConfig

# Padded tokens of a batch for each part that the mesh splits it into. On CPUs larger batches only fall
# out of the cache; accelerators need some thousand tokens to be busy.
TOKENS_PER_SHARD = {"cpu": 8_192, "gpu": 65_536, "tpu": 32_768}
MULTIPLE = {"cpu": 16, "gpu": 64, "tpu": 128}

FIRST_WINDOW = 512
"""Comparisons of the first window: few, so that the device starts early."""

WINDOW = 4096
"""Comparisons of the later windows: many, so that few batches are left partly filled at their ends."""

SAMPLE = 512
"""Comparisons whose lengths decide the shapes."""


@dataclass(frozen=True)
class ShapeOptions:
    """How shapes are chosen.

    Attributes:
      tokens_per_batch: padded tokens of a batch stay at or below this where one row per shard allows it.
      divisor: every batch is a multiple of it: the number of parts that the mesh splits a batch into.
      multiple: P and R are multiples of this.
      max_buckets: most shapes, and so compiles, for lengths like those of the sample.
      attention_length: context length at which attention costs as much as the rest of the model.
    """

    tokens_per_batch: int
    divisor: int = 1
    multiple: int = 16
    max_buckets: int = 8
    attention_length: int = 8192


def shape_options(
    config: DecoderConfig | EncoderConfig, mesh: Mesh, batch_tokens: int | None = None
) -> ShapeOptions:
    """Return how batches are shaped for a model on these devices; `batch_tokens` takes the place of their own."""
    platform, shards = mesh.devices.flat[0].platform, mesh_shape(mesh).batch_shards
    return ShapeOptions(
        tokens_per_batch=batch_tokens or shards * TOKENS_PER_SHARD.get(platform, 8_192),
        divisor=shards,
        multiple=MULTIPLE.get(platform, 16),
        attention_length=config.attention_length,
    )


def windows(count: int) -> list[range]:
    """The input in consecutive parts; each is tokenised while the one before it is scored."""
    starts = [0, *range(FIRST_WINDOW, count, WINDOW)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count]) if start < stop]


def sample_indices(count: int) -> list[int]:
    """Evenly spaced members of the input, at most :data:`SAMPLE`."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, SAMPLE)).round()})


def bucket_for(
    shape: tuple[int, int, int], buckets: Sequence[Bucket], *, multiple: int, attention_length: int
) -> Bucket:
    """The cheapest bucket that holds the shape; one of its own, on a coarse grid, if none does."""
    fitting = [bucket for bucket in buckets if bucket.fits(shape)]
    if fitting:
        return min(
            fitting,
            key=lambda b: (
                float(cell_cost(b.prefix, b.responses, b.response_length, attention_length=attention_length)),
                b,
            ),
        )
    prefix, responses, length = shape
    return Bucket(_coarse(prefix, multiple), _power_of_two(responses), _coarse(length, multiple))


def plan_window(
    shapes: Sequence[tuple[int, int, int]],
    buckets: Sequence[Bucket],
    *,
    start: int,
    options: ShapeOptions,
    whole: bool,
) -> list[PlannedBatch]:
    """Batches of one window, the largest shapes first.

    Args:
      shapes: (p, K, r) of the window's trees.
      buckets: shapes chosen from the sample.
      start: index of the window's first comparison in the whole input.
      options: as for the sample.
      whole: the window is the whole input, so that batches need not be larger than it fills.
    """
    members: dict[Bucket, list[int]] = {}
    for offset, shape in enumerate(shapes):
        bucket = bucket_for(
            shape, buckets, multiple=options.multiple, attention_length=options.attention_length
        )
        members.setdefault(bucket, []).append(start + offset)
    plan: list[PlannedBatch] = []
    for bucket in sorted(members, key=lambda b: (-b.tokens, b)):
        rows = members[bucket]
        batch = batch_size(bucket, tokens_per_batch=options.tokens_per_batch, divisor=options.divisor)
        if whole:
            batches = -(-len(rows) // batch)
            batch = round_up(-(-len(rows) // batches), options.divisor)
        plan.extend(
            PlannedBatch(bucket, batch, tuple(rows[i : i + batch])) for i in range(0, len(rows), batch)
        )
    return plan


def choose(shapes: Sequence[tuple[int, int, int]], *, options: ShapeOptions) -> Buckets:
    """Buckets for the sample's shapes."""
    return choose_buckets(
        shapes,
        multiple=options.multiple,
        max_buckets=options.max_buckets,
        attention_length=options.attention_length,
        tokens_per_batch=options.tokens_per_batch,
        divisor=options.divisor,
    )


def _coarse(size: int, multiple: int) -> int:
    """Rounded up to a step of an eighth to a quarter of the size, so that few distinct shapes arise."""
    step = max(multiple, 1 << max(size.bit_length() - 3, 0))
    return round_up(max(size, 1), round_up(step, multiple))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below the size."""
    return -(-size // multiple) * multiple
