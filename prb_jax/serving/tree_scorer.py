"""A reward model that scores items in a few fixed shapes: a server compiles them before its first request."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prb_jax.errors import PrbError, PrbWarning
from prb_jax.scoring.batching import Batch, Batcher, fixed_batcher
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.serving.items import Item, Score, Scores, TreeMaker
from prb_jax.text.view import ViewOptions
from prb_jax.trees.batches import make_batch
from prb_jax.trees.packing import PackedStream, StreamOptions, StreamShape, with_key_layout
from prb_jax.trees.shapes import Shapes, fixed_shapes
from prb_jax.trees.stream_shapes import READS_STEP
from prb_jax.trees.stream_tables import KeyLayout, round_up
from prb_jax.trees.streams import make_stream_batch
from prb_jax.trees.tree import build_tree

PARTS = (8, 3, 1)
"""A stream is a whole one, a third or an eighth: a single request does not wait for the work of many."""

TOKENS_OF_A_READ = 16  # a stream has room for a response in each so many tokens

BUCKETS = (256, 1024, 4096), (1, 8), (128, 512)
"""P, K and R of an encoder's padded trees; a longest P is added."""

LONGEST_PREFIX = 8192

PART_OF_A_BATCH = 4
"""Padded batches of a server are smaller than those of an evaluation by this factor: an answer comes sooner."""

MOST_RESPONSES = 64
"""Responses of a tree, at most: more of one prompt become several trees, which share their beginning."""


@dataclass(frozen=True)
class TreeScorer:
    """Scores items as trees, in shapes of streams or of padded trees that do not depend on what comes.

    A full batch has about so many tokens.
    """

    model: RewardModel
    maker: TreeMaker
    shapes: StreamOptions | Shapes
    tokens: int

    @property
    def batcher(self) -> Batcher:
        """What makes batches of trees, in the fixed shapes."""
        return fixed_batcher(self.shapes)

    def compile(self) -> None:
        """Compile the program of each shape."""
        tree, shapes = build_tree([[0, 0]]), self.shapes
        batches: Iterable[Batch]
        if isinstance(shapes, Shapes):
            batches = (make_batch([tree], bucket, batch=rows) for bucket, rows in shapes.rows.items())
        else:
            packed = (PackedStream(shape, (0,), (0,), tree.tokens) for shape in shapes.fixed)
            batches = (make_stream_batch([tree], (stream,), shapes) for stream in packed)
        for batch in batches:
            np.asarray(self.model.dispatch(batch))

    def __call__(self, items: Sequence[Item]) -> Scores:
        """Return the score of each item, or why it has none."""
        trees, errors = self.maker.make_trees(items)
        scores: dict[int, Score | PrbError] = dict(errors)
        for planned in self.batcher([made.tree for made in trees], range(len(trees))):
            rows = planned.take(np.asarray(self.model.dispatch(planned.make()), np.float32))
            for member, row in zip(planned.members, rows, strict=True):
                scores |= dict(zip(trees[member].members, trees[member].scores(row), strict=True))
        return [scores[place] for place in range(len(items))]


def open_tree_scorer(model: RewardModel, options: ViewOptions, *, batch_tokens: int | None) -> TreeScorer:
    """Choose the fixed shapes of a model, of about ``batch_tokens`` tokens (by the device if not given)."""
    view = model.reader.view(options)
    for remark in model.reader.remarks(view.protocol):
        warnings.warn(remark, PrbWarning, stacklevel=2)
    chosen = model.batch_options(batch_tokens)
    if isinstance(chosen, StreamOptions):
        # tables with room for usual conversations, not for any that fits a stream
        if chosen.keys is not None:
            longest = min(model.reader.limit(view), LONGEST_PREFIX)
            chosen = with_key_layout(chosen, KeyLayout.of(longest, longest))
        tokens, multiple = chosen.tokens, chosen.multiple
        lengths = sorted({round_up(max(tokens // part, multiple), multiple) for part in PARTS})
        fixed = [StreamShape(n, round_up(-(-n // TOKENS_OF_A_READ), READS_STEP)) for n in lengths]
        shapes, most = replace(chosen, fixed=tuple(fixed)), fixed[-1].reads
    else:
        tokens = chosen.tokens_per_batch // (1 if batch_tokens else PART_OF_A_BATCH)
        chosen = replace(chosen, tokens_per_batch=tokens)
        top = round_up(min(model.reader.limit(view), LONGEST_PREFIX), chosen.multiple)
        prefixes, counts, lengths = BUCKETS
        shapes = fixed_shapes(
            [*(length for length in prefixes if length < top), top],
            counts,
            [length for length in lengths if length < top] or [top],
            options=chosen,
        )
        most = max(counts)
    return TreeScorer(model, TreeMaker(model.reader, view, min(most, MOST_RESPONSES)), shapes, tokens)
