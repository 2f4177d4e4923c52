"""The policy in training: its weights, the weights of its value function, and the reference; log-probabilities and
values for a step, and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.behaviour.generation.policy import bare_policy
from prb_jax.behaviour.generation.programs import decoding_mesh
from prb_jax.behaviour.rl.dpo import DPO
from prb_jax.behaviour.rl.objective import (
    FROM_REWARDS,
    POLICY,
    Actor,
    make_policy_step,
    token_logprobs,
    token_states,
    token_values,
)
from prb_jax.behaviour.rl.rollouts import Rollouts
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.behaviour.rl.sft import SFT
from prb_jax.models.checkpoints.load import abstract_params, load_params
from prb_jax.models.decoder import Params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.sharding import replicated
from prb_jax.records.items import Held
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import batch_sizes
from prb_jax.training.data import Order, permutation
from prb_jax.training.export import Write, copy_file
from prb_jax.training.memory import StepMemory
from prb_jax.training.microbatches import STEPS_SIMULATED
from prb_jax.training.start import Start, with_pad_token
from prb_jax.training.step import Microbatch, TrainState, TrainStep
from prb_jax.training.trainer import Trainer
from prb_jax.training.weights import merge
from prb_jax.trees.packing import READS_STEP, coarse_length
from prb_jax.trees.response_reads import Reads, response_reads
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree

_STEPS_PACKED = 4
"""Number of simulated steps that determine how many states of a stream are read."""


class Update(NamedTuple):
    """An update of a step."""

    rows: np.ndarray  # rows of the step that it used
    metrics: dict[str, float]
    logprobs: np.ndarray | None  # float32 [B, K, R], log-probabilities before the update, if it has read them


class Learner(Trainer):
    """One policy in training; :meth:`begin` loads its weights. Before that, only headers of its files are read.

    Args:
      settings: Settings of the run.

    Attributes:
      policy: Program, tokenizer and stop tokens, without weights.
      actor: Static parts of the policy.
      objective: Training objective.

    Raises:
      CheckpointError: the model is not a causal language model, or not usable.
      MeshError: the mesh does not fit the devices or the model.
    """

    settings: PpoSettings

    def __init__(self, settings: PpoSettings) -> None:
        assert settings.model is not None
        self._opened = opened = open_language_model(
            settings.model,
            LoadOptions(
                mesh=settings.mesh,
                dtype=settings.dtype,
                revision=settings.revision,
                base=settings.base,
                tokenizer=settings.tokenizer,
                chat_template=settings.chat_template,
                attention=settings.attention,
            ),
        )
        self.actor = Actor(settings, opened.decoder.config, opened.mesh)
        self.policy = bare_policy(
            opened,
            mesh=opened.mesh,
            draws_on=decoding_mesh(self.actor.config, opened.mesh),
            lora_scale=settings.lora_scale,
        )
        identity = dict(self.policy.identity())
        start = Start(
            name=identity.pop("name"),
            config=self.actor.config,
            raw_config=with_pad_token(self.actor.config.original, self.policy.tokenizer),
            tokenizer=self.policy.tokenizer,
            tokenizer_folder=opened.tokenizer_folder.path,
            identity=identity,
            load=self._read_weights,
        )
        self.objective = {"dpo": DPO, "sft": SFT}.get(settings.algorithm, FROM_REWARDS)
        super().__init__(settings, start, make_policy_step(self.actor, self.objective))
        self._look = make_look(self.actor, self.program)

    def _read_weights(self, mesh: Mesh) -> Params:
        config = self.actor.config
        dtype = jnp.dtype("float32") if self.settings.tuning == "full" else self.actor.dtype
        shardings = parameter_shardings(abstract_params(config), mesh, config=config)
        return load_params(self._opened.folder.path, config, dtype=dtype, shardings=shardings).params

    def _side_files(self, *, adapter: bool = False) -> Write:
        name = "generation_config.json"
        return lambda folder: None if adapter else copy_file(self._opened.folder.path / name, folder / name)

    @property
    def memory(self) -> StepMemory:
        return self.actor.memory

    def plan(self, trees: Sequence[Tree], order: Order) -> None:
        """Choose the shapes of microbatches for these trees, or trees of the same sizes, visited in this order."""
        batch = self.settings.batch
        parts = batch.prompts // (batch.minibatch or batch.prompts)
        together = [part for step in range(STEPS_SIMULATED) for part in np.split(order.step(step), parts)]
        steps = self.settings.steps * batch.updates
        self._plan(Held(trees), together, per_step=batch.prompts // parts, steps=steps)
        self._states = dict[tuple[int, ...], int]()  # number of read states, by the shape of a batch
        for members in together[:_STEPS_PACKED]:
            of_step = [trees[member] for member in members]
            for part in self._layout.microbatches(of_step):
                self._read(part, of_step, 0)

    def look(self, batch: Rollouts) -> Rollouts:
        """Add log-probabilities of the current policy and the reference, and values, of every token; the policy's are 0
        if the update reads them."""
        count, responses, columns = batch.mask.shape
        logprobs, reference = np.zeros((2, count, responses, columns), np.float32)
        values = np.zeros((count, responses, columns + 1), np.float32)
        for part in self._layout.microbatches(batch.trees):
            reads = self._read(part, batch.trees, columns)
            with compiling(self._look, *batch_sizes(part.batch)):
                placed = self.program.place(part.batch, reads)
                looked = self._look(self.state, self.frozen, *placed)
            for whole, of_part in zip((logprobs, reference, values), map(np.asarray, looked), strict=True):
                for members, view in _views(of_part, part, responses):
                    whole[members] = view
        return replace(batch, logprobs=logprobs * batch.mask, reference=reference * batch.mask, values=values)

    def updates(self, batch: Rollouts, *, step: int) -> Iterator[Update]:
        """Make the updates of a step, and yield each; if its metric ``finite`` is 0, nothing was updated."""
        settings, count = self.settings, len(batch.trees)
        epochs, size = settings.batch.epochs, settings.batch.minibatch or count
        for epoch in range(epochs):
            # A single full batch needs no order; otherwise the order depends only on (seed, step, epoch).
            order = permutation(count, settings.seed, (step + 1) * epochs + epoch)
            for start in range(0, count, size):
                rows = np.sort(order[start : start + size])
                parts = self.microbatches(batch, rows)
                sums = self.gradients(parts)
                read, logprobs = sums.parts.logprobs, None
                if read:
                    logprobs = np.zeros(batch.mask.shape, np.float32)
                    for part, of_part in zip(parts, map(np.asarray, read), strict=True):
                        for members, view in _views(of_part, part, batch.mask.shape[1]):
                            logprobs[members] = view
                    logprobs *= batch.mask
                metrics = self.apply(replace(sums, parts=replace(sums.parts, logprobs=())))
                yield Update(
                    rows, {name: float(np.asarray(value)) for name, value in metrics.items()}, logprobs
                )

    def microbatches(self, batch: Rollouts, rows: np.ndarray) -> list[Microbatch]:
        """Return the microbatches of an update from these rows of a step, with the targets of the loss."""
        targets, trees = (
            self.objective.targets(batch, rows, self.settings),
            [batch.trees[row] for row in rows],
        )
        parts = []
        for part in self._layout.microbatches(trees):
            reads = self._read(part, trees, batch.columns)
            cut = jax.tree.map(partial(_cut, part=part, reads=reads), targets)
            parts.append(replace(part, extras=(reads, cut)))
        return parts

    def _read(self, part: Microbatch, trees: Sequence[Tree], columns: int) -> Reads:
        """Return the read positions of a microbatch's responses, padded to the most states seen for its shape."""
        batch = part.batch
        assert isinstance(batch, StreamBatch)

        def room(states: int) -> int:
            needed, shape = coarse_length(states, READS_STEP), batch.tokens.shape
            most = self._states[shape] = max(self._states.get(shape, 0), needed)
            return most

        of_streams = [[trees[member] for member in group] for group in part.groups]
        return response_reads(batch, of_streams, columns=columns, room=room)


def _views(array: np.ndarray, part: Microbatch, responses: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the members of a microbatch and views [n, K, ...] of their responses in its array [B, K, ...]."""
    for row, group in enumerate(part.groups):
        view = array[row, : len(group) * responses]
        yield list(group), view.reshape(len(group), responses, *array.shape[2:])


def _cut(array: np.ndarray, part: Microbatch, reads: Reads) -> np.ndarray:
    """Arrange an array [n, K, ...] of a minibatch for a microbatch, [B, K, ...]; 0 in unused places."""
    cut = np.zeros((*reads.index.shape[:2], *array.shape[2:]), np.float32)
    for members, view in _views(cut, part, array.shape[1]):
        view[...] = array[members]
    return cut


def make_look(actor: Actor, step: TrainStep) -> Callable[..., Any]:
    """Return (state, frozen, batch, reads) -> log-probabilities of policy and reference, and values."""
    settings = actor.settings

    def look(state: TrainState, frozen: Params, batch: StreamBatch, reads: Reads) -> Any:
        def read(params: Params) -> tuple[jax.Array, jax.Array]:
            states = token_states(actor, params, batch, reads)
            return states, token_logprobs(actor, params, states, reads)[0]

        inputs = step.inputs(state)
        states, under_reference = read(frozen)  # the reference
        if settings.algorithm == "dpo" or settings.reads_while_updating:
            logprobs = jnp.zeros_like(under_reference)
        else:
            states, logprobs = read(merge(inputs[POLICY], frozen))
        if settings.with_values:
            return logprobs, under_reference, token_values(actor, inputs, frozen, batch, reads, states)
        return logprobs, under_reference, jnp.zeros(jnp.shape(reads.index))

    return jax.jit(
        look,
        in_shardings=(step.state_shardings, step.frozen_shardings, None, None),
        out_shardings=replicated(actor.mesh),
    )
