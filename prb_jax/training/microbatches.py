"""The microbatches of a step: its trees packed into streams without padding, or padded to a few fixed shapes; and the
sums of their gradients, on one CPU device of one microbatch for each core at a time, elsewhere one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import short_repr
from prb_jax.models.attention.choice import SPLASH_STREAM_ATTENTION
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.flops import matrix_flops_per_token, stream_flops, tree_flops
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, batch_sizes, lanes, shape_options, stream_options
from prb_jax.training.data import STEPS_SIMULATED, Examples, TreesOnDemand, shapes_of_steps
from prb_jax.training.objective import Extras
from prb_jax.training.order import StepOrder
from prb_jax.training.settings import BatchSettings
from prb_jax.training.step import TrainState, TrainStep, sums_of, without_sums
from prb_jax.trees.kernel_tables import KernelLayout
from prb_jax.trees.packing import PackedBatch, StreamOptions, StreamShape, for_kernel
from prb_jax.trees.shapes import Shapes
from prb_jax.trees.stream_shapes import choose_step_shapes, pack_step
from prb_jax.trees.streams import make_stream_batch
from prb_jax.trees.tree import Tree

_LOOKED_AT = 1024
"""Comparisons, about, of the first steps whose trees decide the shapes of streams."""

_COMPILE, _COMPILE_OF_TPU = 1e12, 1e16
"""Floating-point operations of a CPU, and of one chip, in the time of a compile."""

_ACTIVATIONS = 6e9
"""Bytes that the activations of a stream may take where its length is not given."""


_compiling = threading.Lock()
_compiled: WeakKeyDictionary[Any, set[tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()
"""The shapes for which each program is compiled."""


@dataclass(frozen=True)
class Microbatch:
    """A part of a step, on the host.

    Attributes:
      batch, extras: the arrays.
      tokens: that are computed, without padding.
      flops: of a forward pass on paper, without padding.
      activations: bytes that its backward pass keeps, about.
    """

    batch: Batch
    extras: Extras
    tokens: int
    flops: float
    activations: float

    __repr__ = short_repr


class Microbatches(Protocol):
    """Puts the comparisons of a step into batches of few shapes."""

    def of_step(self, members: np.ndarray, slots: np.ndarray) -> list[Microbatch]:
        """Return the microbatches of a step.

        Args:
          members: int64 [n], its comparisons.
          slots: int32 [n], of each its place among the user rows of the step.
        """
        ...


def plan_microbatches(
    examples: Examples,
    order: StepOrder,
    *,
    config: DecoderConfig,
    mesh: Mesh,
    streams: str | None,
    batch: BatchSettings,
    steps: int,
    remat: str = "none",
    prompt_tokens: int = 0,
) -> Microbatches:
    """Choose the shapes of a run.

    Args:
      examples: the data.
      order: which comparisons each step sees.
      config: architecture.
      mesh: devices.
      streams: of :func:`prb_jax.models.attention.choice.trained_stream_attention`: what attends over packed streams;
        None for padded batches.
      batch: how large microbatches are, and the most shapes.
      steps: of the run: the longer it is, the more shapes pay for their compile.
      remat: what is kept for the backward pass.
      prompt_tokens: of the soft prompt in front of every tree.
    """
    options = shape_options(config, mesh)
    # A backward pass holds the activations of all layers: less at a time than in scoring.
    tokens = options.tokens_per_batch // 2 if batch.tokens is None else batch.tokens * options.divisor
    options = replace(options, tokens_per_batch=tokens, max_buckets=batch.max_buckets)
    token_bytes = _bytes_per_token(config, remat)
    if streams is None:
        shapes = shapes_of_steps(examples.trees, order, steps=steps, options=options)
        return _Padded(examples, config, token_bytes, shapes)
    looked_at = []
    for step in range(min(STEPS_SIMULATED, max(1, _LOOKED_AT // order.per_step))):
        members = order.step(step)
        examples.ahead(members)
        looked_at.append([examples.trees[member] for member in members])
    known = [tree for trees in looked_at for tree in trees]
    if not isinstance(examples.trees, TreesOnDemand):
        known = list(examples.trees)
    packed = stream_options(config, mesh)
    fitting = int(_ACTIVATIONS / token_bytes)
    most = min(max(fitting, packed.tokens // 2), packed.tokens) if batch.tokens is None else batch.tokens
    packed, compile_cost, others = replace(packed, tokens=most), _COMPILE, None
    if streams == SPLASH_STREAM_ATTENTION:
        packed, compile_cost = for_kernel(packed, known), _COMPILE_OF_TPU * packed.streams
        # What fits no stream of a kernel is padded to a shape of its own.
        others = _Padded(examples, config, token_bytes, Shapes({}, options))
    stream_shapes = choose_step_shapes(
        looked_at,
        packed,
        most_shapes=batch.max_buckets,
        compile_cost=compile_cost / (3 * matrix_flops_per_token(config)),
        count=steps,
    )
    responses = max(len(tree.responses) for tree in known)
    return _Packed(examples, config, token_bytes, packed, stream_shapes, responses, prompt_tokens, others)


def _bytes_per_token(config: DecoderConfig, remat: str) -> int:
    """About what a backward pass keeps of each token, in float32."""
    queries, keys = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    numbers = {
        "none": 6 * config.hidden_size + 4 * queries + 6 * keys + 4 * config.intermediate_size,
        "dots": 4 * config.hidden_size + 2 * queries + 2 * keys + 2 * config.intermediate_size,
        "full": config.hidden_size,
    }
    return 4 * config.num_hidden_layers * numbers[remat]


@dataclass(frozen=True, eq=False)
class _Padded:
    """Padded batches of trees."""

    examples: Examples
    config: DecoderConfig
    token_bytes: int
    shapes: Shapes
    flops: dict[int, float] = field(default_factory=dict)

    def of_step(self, members: np.ndarray, slots: np.ndarray) -> list[Microbatch]:
        slot_of = dict(zip(members.tolist(), slots.tolist(), strict=True))
        lengths = [self.examples.trees[member].shape for member in members]
        batches = []
        for padded in self.shapes.batches(lengths, members.tolist()):
            batch, extras = self.examples.batch(padded, slots=slot_of)
            tokens = sum(self.examples.trees[member].tokens for member in padded.members)
            flops = sum(self._flops_of(member) for member in padded.members)
            activations = (batch.prefix.size + batch.responses.size) * self.token_bytes
            batches.append(Microbatch(batch, extras, tokens, flops, activations))
        return batches

    def _flops_of(self, member: int) -> float:
        if member not in self.flops:
            self.flops[member] = tree_flops([self.examples.trees[member]], self.config)
        return self.flops[member]


@dataclass(frozen=True, eq=False)
class _Packed:
    """Packed streams; what several trees of a step begin with is computed once, but for a kernel's streams.

    Attributes:
      options: of the streams.
      shapes: of the streams, the smallest first.
      responses: the most of a tree that was looked at.
      prompt_tokens: of the soft prompt in front of every tree.
      others: takes the trees that fit no stream of a kernel.
    """

    examples: Examples
    config: DecoderConfig
    token_bytes: int
    options: StreamOptions
    shapes: Sequence[StreamShape]
    responses: int
    prompt_tokens: int
    others: _Padded | None

    def of_step(self, members: np.ndarray, slots: np.ndarray) -> list[Microbatch]:
        batches: list[Microbatch] = []
        options, kernel = self.options, self.options.kernel
        if kernel is not None and self.others is not None:
            fits = [_fits(self.examples.trees[member], kernel, self.shapes[-1]) for member in members]
            if not all(fits):
                apart = ~np.asarray(fits)
                batches += self.others.of_step(members[apart], slots[apart])
                members, slots = members[~apart], slots[~apart]
        trees = [
            self._named(self.examples.trees[member], slot)
            for member, slot in zip(members, slots, strict=True)
        ]
        for packed in pack_step(trees, self.shapes, options):
            batch = make_stream_batch(trees, packed, options)
            extras = self._extras(members, packed)
            tokens = sum(stream.tokens for stream in packed)
            if kernel is not None:  # these are places
                placed = [trees[member] for stream in packed for member in stream.members]
                tokens -= sum(kernel.tokens_of(tree) - tree.tokens for tree in placed)
            flops = stream_flops(batch, self.config)
            activations = batch.tokens.size * self.token_bytes
            batches.append(Microbatch(batch, extras, tokens, flops, activations))
        return batches

    def _named(self, tree: Tree, slot: int) -> Tree:
        """The tree with the row of its soft prompt in this step in the place of the ids that stand for it."""
        if not self.prompt_tokens:
            return tree
        prefix = tree.prefix.copy()
        prefix[: self.prompt_tokens] = slot
        return replace(tree, prefix=prefix)

    def _extras(self, members: np.ndarray, packed: PackedBatch) -> Extras:
        streams, rows = self.options.streams, packed[0].shape.reads
        comparisons = [
            [self.examples.comparisons[members[place]] for place in stream.members] for stream in packed
        ]
        counts = [[len(comparison.labels or ()) for comparison in of_stream] for of_stream in comparisons]
        responses = self.responses
        while responses < max(max(of_stream) for of_stream in counts):
            responses *= 2
        labels = np.zeros((streams, rows, responses), np.float32)
        mask, places = np.zeros(labels.shape, bool), np.zeros(labels.shape, np.int32)
        margin, weights = np.zeros((2, streams, rows), np.float32)
        for number, stream in enumerate(packed):
            read = 0
            for row, place in enumerate(stream.members):
                comparison, count = comparisons[number][row], counts[number][row]
                labels[number, row, :count] = comparison.labels
                mask[number, row, :count] = True
                places[number, row, :count] = np.arange(read, read + count)
                margin[number, row] = comparison.margin or 0.0
                weights[number, row] = self.examples.weights[members[place]]
                read += count
        users = np.zeros(streams, np.int32)
        return Extras(labels=labels, mask=mask, margin=margin, weights=weights, users=users, places=places)


def _fits(tree: Tree, kernel: KernelLayout, shape: StreamShape) -> bool:
    room = kernel.tokens_of(tree) <= shape.tokens and len(tree.responses) <= shape.reads
    return room and kernel.fits(tree, shape.tokens)


def add_gradients(
    step: TrainStep, state: TrainState, frozen: Params, batches: Sequence[Microbatch]
) -> TrainState:
    """Return the state, which is donated, with the gradient sums of the microbatches of a step.

    They are added in the order in which they are given, however many are computed side by side: the sums have the
    same bits. Each that is computed holds activations and gradients of its own, so that there are fewer at a time where
    these would fill the memory.
    """
    if lanes(step.mesh) == 1:
        for microbatch in batches:
            placed = step.place(microbatch.batch, microbatch.extras)
            with compiling(step.accumulate, *batch_sizes(microbatch.batch)):
                state = step.accumulate(state, frozen, *placed)
        return state
    rest, sums = without_sums(state), sums_of(state)
    # Gradients are held twice: one that is done may wait for its turn to be added.
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(sums))
    held = 2 * gradients + max((microbatch.activations for microbatch in batches), default=0.0)
    count = lanes(step.mesh, held=held)
    waiting: deque[Future[TrainState]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="gradients") as computing:
        for microbatch in batches:
            waiting.append(computing.submit(_gradients, step, rest, frozen, microbatch))
            if len(waiting) > count:
                sums = step.add(sums, waiting.popleft().result())
        while waiting:
            sums = step.add(sums, waiting.popleft().result())
    return {**rest, **sums}


def _gradients(step: TrainStep, state: TrainState, frozen: Params, microbatch: Microbatch) -> TrainState:
    """The sums of one microbatch, which are waited for: a thread computes one at a time."""
    placed = step.place(microbatch.batch, microbatch.extras)
    shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(placed))
    with _compiling:  # by one thread alone
        known = _compiled.setdefault(step.gradients, set())
        sums = None
        if shapes not in known:
            with compiling(step.gradients, *batch_sizes(microbatch.batch)):
                sums = step.gradients(state, frozen, *placed)
            known.add(shapes)
    if sums is None:
        sums = step.gradients(state, frozen, *placed)
    return jax.block_until_ready(sums)
