"""A reward model that scores items in a few fixed shapes: a server compiles them before its first request."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prb_jax.errors import PrbError, PrbWarning
from prb_jax.scoring.batching import Batch, Batcher, BatchOptions, stream_batches
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.serving.items import Item, Score, Scores, TreeMaker
from prb_jax.text.view import ViewOptions
from prb_jax.trees.kernel_tables import KeyLayout, with_key_layout
from prb_jax.trees.packing import PackedStream, StreamOptions, StreamShape
from prb_jax.trees.sequences import (
    STEP,
    TOKENS_PER_SHARD,
    PackedSequences,
    SequenceOptions,
    make_sequence_batch,
)
from prb_jax.trees.stream_shapes import READS_STEP
from prb_jax.trees.stream_tables import round_up
from prb_jax.trees.streams import make_stream_batch
from prb_jax.trees.tree import build_tree

PARTS = (8, 3, 1)
"""A stream is a whole one, a third or an eighth: a single request does not wait for the work of many."""

TOKENS_OF_A_READ = 16  # a stream has room for a response in each so many tokens

LONGEST_USUAL = 8192
"""Tables of keys have room for conversations of so many tokens; they are widened for longer ones."""

PARTS_OF_THE_LIMIT = (4, 2, 1)
"""Sequences of an encoder are padded to the longest that it reads, or to such a part of it."""

PART_OF_A_BATCH = 4
"""A server's batches of sequences are smaller than those of an evaluation by this factor: an answer comes sooner."""

MOST_RESPONSES = 64
"""Responses of a tree, at most: more of one prompt become several trees, which share their beginning."""


@dataclass(frozen=True)
class TreeScorer:
    """Scores items as trees, in shapes of streams or sequences that do not depend on what comes.

    A full batch has about so many tokens.
    """

    model: RewardModel
    maker: TreeMaker
    shapes: BatchOptions
    tokens: int

    @property
    def batcher(self) -> Batcher:
        """What makes batches of trees, in the fixed shapes."""
        if isinstance(self.shapes, SequenceOptions):
            return self.shapes.batches
        return partial(stream_batches, shape=self.shapes.fixed[-1], options=self.shapes)

    def compile(self) -> None:
        """Compile the program of each shape."""
        tree, shapes = build_tree([[0, 0]]), self.shapes
        batches: Iterable[Batch]
        if isinstance(shapes, SequenceOptions):
            sizes = [(length, rows) for length, some in shapes.fixed.items() for rows in some]
            batches = (make_sequence_batch([], PackedSequences(rows, length, ())) for length, rows in sizes)
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
            scored = [np.asarray(self.model.dispatch(batch), np.float32) for batch in planned.make()]
            rows = planned.take(scored)
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
            longest = min(model.reader.limit(view), LONGEST_USUAL)
            chosen = with_key_layout(chosen, KeyLayout.of(longest, longest))
        tokens, multiple = chosen.tokens, chosen.multiple
        lengths = sorted({round_up(max(tokens // part, multiple), multiple) for part in PARTS})
        fixed = [StreamShape(n, round_up(-(-n // TOKENS_OF_A_READ), READS_STEP)) for n in lengths]
        shapes, most = replace(chosen, fixed=tuple(fixed)), fixed[-1].reads
    else:
        limit, most = model.reader.limit(view), MOST_RESPONSES
        tokens = batch_tokens or max(chosen.tokens // PART_OF_A_BATCH, TOKENS_PER_SHARD["cpu"])
        chosen = replace(chosen, tokens=tokens, limit=limit)
        lengths = {min(round_up(-(-limit // part), STEP), limit) for part in PARTS_OF_THE_LIMIT}
        rows = {length: {chosen.most_rows(part * length) for part in (1, PARTS[0])} for length in lengths}
        shapes = replace(chosen, fixed={length: tuple(sorted(some)) for length, some in rows.items()})
    return TreeScorer(model, TreeMaker(model.reader, view, min(most, MOST_RESPONSES)), shapes, tokens)
