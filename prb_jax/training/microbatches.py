"""Microbatches of a step: its trees packed into streams of a few shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import mixing_flops, stream_flops
from prb_jax.models.model import matrix_flops_per_token
from prb_jax.models.readouts.score_tree import is_pointwise
from prb_jax.records.items import Held, Items
from prb_jax.scoring.batching import stream_options
from prb_jax.scoring.reader import Encode
from prb_jax.seams import get
from prb_jax.training.data import Examples
from prb_jax.training.losses import Extras
from prb_jax.training.memory import StepMemory
from prb_jax.training.step import Microbatch
from prb_jax.trees.step_shapes import choose_step_shapes, pack_step
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, Tree, with_equal_splits

if TYPE_CHECKING:
    from prb_jax.training.modules import SequenceLayout

STEPS_SIMULATED = 64  # first steps of a run, taken as representative

_LOOKED_AT = 1024  # approximate number of comparisons in these steps that decide the shapes of streams

_COMPILE, _COMPILE_OF_ACCELERATOR = 1e12, 1e16
"""FLOPs that a CPU, and one TPU or GPU, executes in the time of a compile."""


class TreesOnDemand(Items[Tree]):
    """Trees of data larger than memory: only the trees of the most recently requested step are held.

    Args:
      comparisons: Comparisons of the data, read from disk when a step needs them.
      encode: Function that converts comparisons to trees.
    """

    in_memory = False

    def __init__(self, comparisons: Sequence[Any], encode: Encode) -> None:
        self._comparisons, self._encode = comparisons, encode
        self._held: dict[int, Tree] = {}

    def __len__(self) -> int:
        return len(self._comparisons)

    def __getitem__(self, index: Any) -> Any:
        return self._held[int(index)]

    def at(self, places: np.ndarray) -> Items[Tree]:
        """Return the trees of a step, and free the trees that only earlier steps needed.

        Raises:
          DataError: A comparison cannot be read or shown to the model.
        """
        wanted = places.tolist()
        missing = sorted(set(wanted) - self._held.keys())  # in disk order
        made = dict(
            zip(missing, self._encode([self._comparisons[member] for member in missing]), strict=True)
        )
        self._held = {member: made[member] if member in made else self._held[member] for member in wanted}
        return Held(self._held[member] for member in wanted)


def first_steps(
    trees: Items[Tree], together: Sequence[np.ndarray], *, per_step: int
) -> tuple[list[list[Tree]], Sequence[Tree]]:
    """Return the trees, by step, of the steps that decide the shapes of a run, and all trees known at that time; for
    the arguments see :func:`plan_layout`."""
    steps = [with_equal_splits(trees.at(members)) for members in together[: max(1, _LOOKED_AT // per_step)]]
    return steps, trees if trees.in_memory else [tree for of_step in steps for tree in of_step]


@dataclass(frozen=True, eq=False)
class Layout:
    """Layout of a step's trees in microbatches of a few shapes. Build with :func:`plan_layout`."""

    config: DecoderConfig  # architecture
    memory: StepMemory  # memory that a backward pass needs
    streams: StreamOptions  # packing of trees, which computes shared prefixes once
    shapes: Sequence[StreamShape]  # shapes of streams, the smallest first
    responses: int  # maximum per tree, as far as is known

    def microbatches(self, trees: Sequence[Tree]) -> Iterator[Microbatch]:
        """Yield the microbatches of a step's trees; a conversation shared by several trees is computed once."""
        trees = with_equal_splits(trees)
        for packed in pack_step(trees, self.shapes, self.streams):
            batch = make_stream_batch(trees, packed, self.streams)
            groups = [stream.members for stream in packed]
            tokens = sum(stream.tokens for stream in packed)
            count, config = batch.tokens.size, self.config
            reads_only = is_pointwise(config)
            yield Microbatch(
                batch,
                groups,
                packed[0].shape.reads,
                tokens,
                flops=stream_flops(batch, config, reads_only=reads_only),
                mixing_flops=mixing_flops(batch, config, reads_only=reads_only),
                activations=count * self.memory.kept(self.memory.policy(count)),
            )


def plan_layout(
    trees: Items[Tree],
    together: Sequence[np.ndarray],
    *,
    per_step: int,
    steps: int,
    config: DecoderConfig,
    mesh: Mesh,
    attention: StreamAttention,
    batch: Any,
    memory: StepMemory | None = None,
) -> Layout:
    """Choose the shapes of a run.

    Args:
      trees: Trees of the data.
      together: Indices of the trees in each of the first steps, which are taken as representative.
      per_step: Maximum number of trees per step.
      steps: Number of steps of the run: in a longer run more shapes repay their compilation.
      config: Architecture.
      mesh: Devices.
      attention: Attention implementation of the run.
      batch: Section `batch` of the settings: size of microbatches and maximum number of shapes.
      memory: Memory of a step; default: nothing is recomputed, in float32.
    """
    memory = memory or StepMemory(config=config, asked="none")
    looked_at, known = first_steps(trees, together, per_step=per_step)
    most = batch.tokens
    if most is None:  # a backward pass keeps the activations of all layers
        most = memory.tokens(stream_options(config, mesh, attention).tokens)
    options = stream_options(config, mesh, attention, max(most // BLOCK, 1) * BLOCK)
    if options.keys is not None:
        options = get("kernel tables", "fit").value(options, known, whole=trees.in_memory)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    compile_cost = _COMPILE if on_cpu else _COMPILE_OF_ACCELERATOR * options.streams
    shapes = choose_step_shapes(
        looked_at,
        options,
        most_shapes=batch.max_buckets,
        compile_cost=compile_cost / (3 * matrix_flops_per_token(config)),
        count=steps,
    )
    return Layout(config, memory, options, shapes, max(len(tree.responses) for tree in known))


def labelled(
    layout: Layout | SequenceLayout,
    examples: Examples,
    members: np.ndarray,
    slots: np.ndarray,
    *,
    prompt_tokens: int = 0,
) -> list[Microbatch]:
    """Return the microbatches of a step with the labels of their comparisons.

    Args:
      layout: Layout of the run.
      examples: Data with its trees.
      members: Comparisons of the step, int64 [n].
      slots: Index of each comparison's user among the user rows of the step, int32 [n].
      prompt_tokens: Length of the soft prompt in front of every tree.
    """
    trees: Sequence[Tree] = examples.trees.at(members)
    if prompt_tokens:
        trees = [named_tree(tree, slot, prompt_tokens) for tree, slot in zip(trees, slots, strict=True)]
    parts = layout.microbatches(trees)
    return [replace(part, extras=_extras(part, layout, examples, members)) for part in parts]


def _extras(
    part: Microbatch, layout: Layout | SequenceLayout, examples: Examples, members: np.ndarray
) -> Extras:
    comparisons = [[examples.known[members[place]] for place in group] for group in part.groups]
    most = max(len(one.labels or ()) for group in comparisons for one in group)
    is_stream = isinstance(part.batch, StreamBatch)
    streams, responses = len(part.batch.tokens) if is_stream else 1, layout.responses
    while responses < most:
        responses *= 2
    labels = np.zeros((streams, part.rows, responses), np.float32)
    mask, places = np.zeros(labels.shape, bool), np.zeros(labels.shape, np.int32)
    margin, weights = np.zeros((2, streams, part.rows), np.float32)
    for number, group in enumerate(part.groups):
        read = 0
        for row, place in enumerate(group):
            comparison = comparisons[number][row]
            count = len(comparison.labels or ())
            labels[number, row, :count] = comparison.labels
            mask[number, row, :count] = True
            places[number, row, :count] = np.arange(read, read + count)
            margin[number, row] = comparison.margin or 0.0
            weights[number, row] = examples.weights[members[place]]
            read += count
    extras = Extras(labels=labels, mask=mask, margin=margin, weights=weights, places=places)
    return extras if is_stream else jax.tree.map(lambda array: array[0], extras)


def named_tree(tree: Tree, slot: int, prompt_tokens: int) -> Tree:
    """Return the tree with its placeholder ids replaced by the row of its soft prompt in this step."""
    prefix = tree.prefix.copy()
    prefix[:prompt_tokens] = slot
    return replace(tree, prefix=prefix)
