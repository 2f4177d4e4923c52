"""The few fixed shapes in which a model scores what comes: a server compiles them before its first request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from prb_jax.scoring.batching import Batch, Batcher, fixed_batcher
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.batches import make_batch
from prb_jax.trees.packing import PackedStream, StreamOptions, StreamShape
from prb_jax.trees.shapes import ShapeOptions, Shapes, fixed_shapes, round_up
from prb_jax.trees.stream_shapes import READS_STEP
from prb_jax.trees.streams import make_stream_batch
from prb_jax.trees.tree import build_tree

PARTS = (8, 3, 1)
"""A stream is a whole one, a third or an eighth: a single request does not wait for the work of many."""

TOKENS_OF_A_READ = 16
"""A stream has room for a response in each so many tokens."""

BUCKETS = (256, 1024, 4096), (1, 8), (128, 512)
"""P, K and R of padded trees, where the model is not scored over streams; a longest P is added."""

LONGEST_PREFIX = 8192

PART_OF_A_BATCH = 4
"""Padded batches of a server are smaller than those of an evaluation by this factor: an answer comes sooner."""


@dataclass(frozen=True)
class FixedShapes:
    """The shapes that a model scores in, whatever comes.

    Attributes:
      shapes: of streams or of padded trees.
      tokens: of a full batch.
      responses: most of a tree.
    """

    shapes: StreamOptions | Shapes
    tokens: int
    responses: int

    def batcher(self) -> Batcher:
        """Return a batcher into these shapes."""
        return fixed_batcher(self.shapes)

    def compile(self, model: RewardModel) -> None:
        """Compile the program of each shape."""
        for batch in _empty_batches(self.shapes):
            np.asarray(model.dispatch(batch))


def shapes_for(model: RewardModel, *, longest: int, batch_tokens: int | None = None) -> FixedShapes:
    """Choose the fixed shapes of a model.

    Args:
      model: that scores.
      longest: conversation, in tokens.
      batch_tokens: tokens computed at a time, about; of the device if not given.
    """
    options = model.batch_options(batch_tokens)
    if isinstance(options, StreamOptions):
        fixed = _streams(options)
        return FixedShapes(fixed, options.tokens, fixed.fixed[-1].reads)
    tokens = options.tokens_per_batch // (1 if batch_tokens else PART_OF_A_BATCH)
    buckets = _buckets(replace(options, tokens_per_batch=tokens), longest)
    return FixedShapes(buckets, tokens, max(bucket.responses for bucket in buckets.rows))


def _streams(options: StreamOptions) -> StreamOptions:
    lengths = sorted({round_up(max(options.tokens // part, options.block), options.block) for part in PARTS})
    shapes = [StreamShape(n, round_up(-(-n // TOKENS_OF_A_READ), READS_STEP)) for n in lengths]
    return replace(options, fixed=tuple(shapes))


def _buckets(options: ShapeOptions, longest: int) -> Shapes:
    top = round_up(min(longest, LONGEST_PREFIX), options.multiple)
    prefixes, responses, lengths = BUCKETS
    return fixed_shapes(
        [*(length for length in prefixes if length < top), top],
        responses,
        [*(length for length in lengths if length < top)] or [top],
        options=options,
    )


def _empty_batches(fixed: StreamOptions | Shapes) -> Iterator[Batch]:
    tree = build_tree([[0, 0]])
    if isinstance(fixed, Shapes):
        for bucket, rows in fixed.rows.items():
            yield make_batch([tree], bucket, batch=rows)
        return
    for shape in fixed.fixed:
        yield make_stream_batch([tree], (PackedStream(shape, (0,), (0,), tree.tokens),), fixed)
