"""Scores items by a reward model in a few fixed shapes, which a server compiles before its first request."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import PrbError, PrbWarning
from prb_jax.models.continued import ContinuedScorer, Fresh, block_shapes, make_fresh
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, Batcher, BatchOptions, rows_of_trees, stream_batches
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.serving.items import Item, ItemTree, Score, Scores, TreeMaker
from prb_jax.serving.prefix_cache import PrefixCache, ScoreCache
from prb_jax.text.view import ViewOptions
from prb_jax.trees.continued import BlockStore, KeptPrefix, LaidBehind, lay_behind
from prb_jax.trees.kernel_tables import for_lengths
from prb_jax.trees.packing import READS_STEP, pack_streams
from prb_jax.trees.sequences import (
    STEP,
    TOKENS_PER_SHARD,
    PackedSequences,
    SequenceOptions,
    make_sequence_batch,
)
from prb_jax.trees.streams import PackedStream, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, PlannedBatch, Tree, build_tree, round_up, with_equal_splits

PARTS = (8, 3, 1)
"""A stream is a whole one, a third or an eighth: a single request does not wait for the work of many."""


TOKENS_OF_A_READ = 16  # a stream has room for one response per this many tokens

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
    """Scores items as trees, in fixed shapes of streams or sequences that do not depend on the items.

    With a cache, prefixes that were computed before are not computed again, and a server answers a conversation that
    was scored before from `known`.
    """

    model: RewardModel
    maker: TreeMaker
    shapes: BatchOptions
    tokens: int
    cache: PrefixCache | None = None
    store: BlockStore | None = field(default=None, repr=False)
    """Memory of the cache."""
    known: ScoreCache = field(default_factory=ScoreCache, repr=False)
    fresh: list[Fresh] = field(default_factory=list, repr=False)
    """Arrays into which a batch writes the keys and values that it computes, of finished batches."""

    @property
    def batcher(self) -> Batcher:
        """Function that makes batches of trees in the fixed shapes."""
        if isinstance(self.shapes, SequenceOptions):
            return self.shapes.batches
        if self.cache is not None:
            return self._behind
        return partial(stream_batches, shape=self.shapes.fixed[-1], options=self.shapes)

    @cached_property
    def program(self) -> ContinuedScorer:
        """Program that scores streams after cached tokens."""
        model, dtype = self.model, jnp.dtype(self.model.dtype)
        return ContinuedScorer(
            model.params, config=model.decoder, mesh=model.mesh, dtype=dtype, readout=model.labels
        )

    def kept(self, tree: Tree) -> KeptPrefix:
        """Return the cached tokens of a tree's prefix, as many as a stream has room for."""
        if self.cache is None:
            return KeptPrefix()
        assert isinstance(self.shapes, StreamOptions)
        return self.cache.find(tree.prefix, most=self.shapes.fixed[-1].kept)

    def recall(self, made: ItemTree) -> tuple[dict[int, Score | PrbError], ItemTree | None]:
        """Return the scores of the members that were scored before, and the tree of the others, if any."""
        values = [None] * len(made.members) if self.cache is None else self.known.find(made.tree)
        places = [place for place, value in enumerate(values) if value is not None]
        if not places:
            return {}, made
        known, rest = made.part(places), [place for place, value in enumerate(values) if value is None]
        scores = known.scores(np.asarray([values[place] for place in places], np.float64))
        return dict(zip(known.members, scores, strict=True)), made.part(rest) if rest else None

    def _behind(self, trees: Sequence[Tree], indices: Sequence[int]) -> Iterator[PlannedBatch]:
        """Pack trees into streams after their cached tokens."""
        assert isinstance(self.shapes, StreamOptions)
        assert self.store is not None
        options, store, trees = self.shapes, self.store, with_equal_splits(trees)
        cached = [self.kept(tree) for tree in trees]
        counts = [kept.tokens for kept in cached]
        for (stream,) in pack_streams(trees, options.fixed[-1], options, counts):
            yield PlannedBatch(
                members=tuple(indices[member] for member in stream.members),
                computed=stream.tokens,
                make=lambda stream=stream: [lay_behind(trees, stream, cached, store)],
                take=partial(rows_of_trees, trees, (stream,)),
            )

    def _fresh(self, batch: LaidBehind) -> Fresh:
        """Return arrays for the keys and values of a batch, which no other batch uses."""
        tokens = batch.batch.tokens.shape[1]
        if tokens <= self._most_fresh:
            with contextlib.suppress(IndexError):
                return self.fresh.pop()
        model, most = self.model, max(tokens, self._most_fresh)
        return make_fresh(model.decoder, model.mesh, jnp.dtype(model.dtype), most)

    @property
    def _most_fresh(self) -> int:
        """Tokens of the arrays in `fresh`: of the longest shape. A longer batch has arrays of its own."""
        assert isinstance(self.shapes, StreamOptions)
        return self.shapes.fixed[-1].tokens

    def start(self, batch: Batch | LaidBehind) -> Callable[[], np.ndarray]:
        """Start scoring a batch; return a function that waits for the scores and caches the computed prefixes."""
        if not isinstance(batch, LaidBehind):
            scores = self.model.run(batch)
            return lambda: np.asarray(scores, np.float32)
        sizes = [np.shape(array) for array in jax.tree.leaves(batch.batch)]
        with compiling(self.program, *sizes):
            rewards, *fresh = self.program(batch.batch, self._fresh(batch))

        def finish() -> np.ndarray:
            assert self.cache is not None
            keys, values = fresh
            for prefix, blocks in batch.blocks(np.asarray(keys), np.asarray(values)):
                self.cache.put(prefix, blocks)
            scores = np.asarray(rewards, np.float32)
            if keys.shape[2] == self._most_fresh:
                self.fresh.append((keys, values))
            return scores

        return finish

    def compile(self) -> None:
        """Compile the program of each shape, and touch the memory of the first blocks."""
        tree, shapes = build_tree([[0, 0]]), self.shapes
        batches: Iterable[Batch | LaidBehind]
        if isinstance(shapes, SequenceOptions):
            sizes = [(length, rows) for length, some in shapes.fixed.items() for rows in some]
            batches = (make_sequence_batch([], PackedSequences(rows, length, ())) for length, rows in sizes)
        else:
            packed = [PackedStream(shape, (0,), (0,), tree.tokens) for shape in shapes.fixed]
            batches = (make_stream_batch([tree], (stream,), shapes) for stream in packed)
            if (store := self.store) is not None:
                store.touch(2 * shapes.fixed[-1].kept // BLOCK)
                batches = (lay_behind([tree], stream, [KeptPrefix()], store) for stream in packed)
        for batch in batches:
            self.start(batch)()

    def __call__(self, items: Sequence[Item]) -> Scores:
        """Return the score of each item, or its error."""
        trees, errors = self.maker.make_trees(items)
        scores: dict[int, Score | PrbError] = dict(errors)
        for planned in self.batcher([made.tree for made in trees], range(len(trees))):
            scored = [self.start(batch)() for batch in planned.make()]
            rows = planned.take(scored)
            for member, row in zip(planned.members, rows, strict=True):
                scores |= dict(zip(trees[member].members, trees[member].scores(row), strict=True))
        return [scores[place] for place in range(len(items))]


def open_tree_scorer(
    model: RewardModel, options: ViewOptions, *, batch_tokens: int | None, prefix_cache: int = 0
) -> TreeScorer:
    """Choose the fixed shapes of a model.

    Args:
      model: Reward model that scores the items.
      options: Options for the parts of an item that the model sees.
      batch_tokens: Approximate tokens per batch; None chooses by the device.
      prefix_cache: Size of the prefix cache in bytes; 0 for no cache, and for models that cannot keep prefixes.
    """
    view = model.reader.view(options)
    for remark in model.reader.remarks(view.protocol):
        warnings.warn(remark, PrbWarning, stacklevel=2)
    chosen = model.batch_options(batch_tokens)
    if isinstance(chosen, StreamOptions):
        # the tables have room for usual conversations, not for every conversation that fits a stream
        if chosen.keys is not None:
            longest = min(model.reader.limit(view), LONGEST_USUAL)
            chosen = for_lengths(chosen, longest=longest, response=longest)
        tokens, multiple = chosen.tokens, chosen.multiple
        lengths = sorted({round_up(max(tokens // part, multiple), multiple) for part in PARTS})
        kept = lengths[-1] if prefix_cache else 0  # as many tokens as a full stream has
        fixed = [StreamShape(n, round_up(-(-n // TOKENS_OF_A_READ), READS_STEP), kept) for n in lengths]
        shapes, most = replace(chosen, fixed=tuple(fixed)), fixed[-1].reads
    else:
        limit, most = model.reader.limit(view), MOST_RESPONSES
        tokens = batch_tokens or max(chosen.tokens // PART_OF_A_BATCH, TOKENS_PER_SHARD["cpu"])
        chosen = replace(chosen, tokens=tokens, limit=limit)
        lengths = {min(round_up(-(-limit // part), STEP), limit) for part in PARTS_OF_THE_LIMIT}
        rows = {length: {chosen.most_rows(part * length) for part in (1, PARTS[0])} for length in lengths}
        shapes = replace(chosen, fixed={length: tuple(sorted(some)) for length, some in rows.items()})
    maker = TreeMaker(model.reader, view, min(most, MOST_RESPONSES))
    if not prefix_cache:
        return TreeScorer(model, maker, shapes, tokens)
    assert isinstance(shapes, StreamOptions)
    dtype = jnp.dtype(model.dtype)
    like = block_shapes(model.decoder, dtype)
    # Two batches may read as many blocks as fit, while these leave the cache.
    spare = 2 * shapes.fixed[-1].kept // BLOCK
    store = BlockStore(like, most=prefix_cache, spare=spare, dtype=dtype)
    return TreeScorer(model, maker, shapes, tokens, PrefixCache(prefix_cache), store)
