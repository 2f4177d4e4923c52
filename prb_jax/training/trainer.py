"""A model in training: weights and optimiser on the mesh, steps, scores, checkpoints and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import RunError, quote, short_repr
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.rows import ScoredRow
from prb_jax.models.attention.choice import StreamAttention, choose_attention
from prb_jax.models.checkpoints.array_folder import flat_arrays, from_flat
from prb_jax.models.decoder import Params
from prb_jax.personal.method import OfUser, StepRows, TrainedMethod
from prb_jax.platform.sharding import replicated
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held, Items
from prb_jax.records.joined import Joined
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, BatchOptions, batch_sizes, lanes, stream_options, stream_scores
from prb_jax.scoring.reader import Reader
from prb_jax.seams import get
from prb_jax.text.trained_view import TrainedView
from prb_jax.training import Tuning, step_flops
from prb_jax.training.config import RunOptions, TrainSettings
from prb_jax.training.data import Examples, Order, user_weights
from prb_jax.training.export import Write, export_model
from prb_jax.training.losses import comparison_loss
from prb_jax.training.memory import StepMemory
from prb_jax.training.microbatches import STEPS_SIMULATED, TreesOnDemand, labelled, plan_layout
from prb_jax.training.saved_states import Checkpoints, SavedState
from prb_jax.training.start import Start
from prb_jax.training.step import Metrics, Microbatch, Sums, TrainState, TrainStep, add_gradients
from prb_jax.training.weights import TrainedModel, merge
from prb_jax.trees.tree import Tree

WEIGHTS, USER = "weights", "user"
"""Parameter groups of a reward model: weights of the model, and parameters of the method of personalisation."""

_loss = jax.jit(comparison_loss, static_argnames="config")


class Trainer:
    """One model in training. :meth:`begin` or :meth:`load_step` sets its weights; nothing is compiled earlier.

    Args:
      settings: Settings of the run.
      start: Model that the run starts from.
      program: Compiled functions of a step.

    Attributes:
      settings, start, program: Same as the arguments.
      mesh: Devices.
      state: Trained parameters and optimiser; see :mod:`prb_jax.training.step`.
      frozen: Weights that are not trained; None until they are read.
    """

    def __init__(self, settings: RunOptions, start: Start, program: TrainStep) -> None:
        self.settings, self.start, self.program, self.mesh = settings, start, program, program.mesh
        self.state: TrainState = {}
        self.frozen: Params | None = None
        shapes = jax.eval_shape(lambda params: program.begin(params)[0], start.abstract)
        self._saved = program.kept(
            jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                shapes,
                program.state_shardings,
            )
        )

    @property
    def memory(self) -> StepMemory | None:
        """Memory of a step, which decides on rematerialisation; None for a user's module."""
        return None

    @cached_property
    def attention(self) -> StreamAttention:
        """Attention implementation of the compiled functions."""
        kind, wanted = jnp.dtype(self.settings.dtype), self.settings.attention
        return choose_attention(self.mesh, kind, wanted, config=self.start.config, trained=True)

    def begin(self, checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
        """Continue from the newest readable checkpoint, or from the starting point.

        Returns:
          Number of completed steps, and the facts saved with them.
        """
        saved = checkpoints.restore_newest(flat_arrays(self._saved))
        if saved is None:
            self.begin_anew()
            return 0, {}
        self._resume(saved)
        return saved.step, saved.facts

    def begin_anew(self) -> None:
        """Reset to the starting point."""
        self.state, self.frozen = self.program.begin(self.start.load(self.mesh))

    def load_step(self, checkpoints: Checkpoints, step: int) -> None:
        """Load the state of one checkpoint."""
        self._resume(checkpoints.restore(step, flat_arrays(self._saved)))

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> None:
        """Start writing a checkpoint."""
        checkpoints.save(step, flat_arrays(self.program.kept(self.state)), facts)

    def _plan(self, trees: Items[Tree], together: Sequence[np.ndarray], *, per_step: int, steps: int) -> None:
        """Choose the shapes of microbatches; for the arguments see :func:`plan_layout`."""
        self._layout = plan_layout(
            trees,
            together,
            per_step=per_step,
            steps=steps,
            config=self.start.config,
            mesh=self.mesh,
            attention=self.attention,
            batch=self.settings.batch,
            memory=self.memory,
        )

    def update(self, parts: Sequence[Microbatch]) -> Metrics:
        """Run one optimiser step over its microbatches, and return the metrics without waiting for them."""
        return self.apply(self.gradients(parts))

    def gradients(self, parts: Sequence[Microbatch]) -> Sums:
        """Return the sums of the microbatches of a step."""
        return add_gradients(self.program, self.state, self.frozen or {}, parts)

    def apply(self, sums: Sums) -> Metrics:
        """Update the parameters, and return the metrics without waiting for them."""
        with compiling(self.program.update):
            self.state, metrics = self.program.update(self.state, sums)
        return metrics

    def params(self) -> Params:
        """Return all parameters of the model, adapters included."""
        first = next(iter(self.program.groups))
        return merge(self.program.inputs(self.state)[first], self.frozen or {})

    def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder, with adapters merged; a collective."""
        more = self._side_files()
        export_model(self.params(), self.start, folder, mesh=self.mesh, settings=self.settings, more=more)

    def export_adapter(self, folder: Path) -> None:
        """Write the current adapters, and any score head, for PEFT; a collective."""
        more = self._side_files(adapter=True)
        export = get("training", "export adapter").value
        export(self.params(), self.start, folder, mesh=self.mesh, settings=self.settings, more=more)

    def _side_files(self, *, adapter: bool = False) -> Write:
        """Return a function that writes further files of an export, beside weights, configuration and tokenizer."""
        return lambda folder: None

    def _read_frozen(self) -> Params:
        """Return the frozen weights, which checkpoints do not contain; read them if necessary."""
        if self.frozen is None:
            some = bool(self.program.frozen_shardings)
            self.frozen = self.program.split(self.start.load(self.mesh))[1] if some else {}
        return self.frozen

    def _resume(self, saved: SavedState) -> None:
        self._read_frozen()
        self.state = {}
        self.state = self.program.resume(from_flat(self._saved, saved.arrays))


@dataclass(frozen=True)
class StepBatch:
    """Data of one step, on the host."""

    members: np.ndarray  # int64 [n], comparisons of the step
    users: StepRows  # rows of users that the step trains
    parts: Sequence[Microbatch]  # computed in sequence, or several concurrently
    tokens: int  # sum over the trees; tokens that trees share count for each tree

    __repr__ = short_repr

    def flops(self, tuning: Tuning) -> float:
        """Return the analytic FLOPs that the step needs, without padding; see :func:`prb_jax.training.step_flops`."""
        return sum(step_flops(part.flops, part.mixing_flops, tuning=tuning) for part in self.parts)


class RewardTrainer(Trainer):
    """A reward model in training. Build with :func:`prb_jax.training.train.reward_trainer`.

    Args:
      settings: Settings of the run.
      start: Model that the run starts from.
      model: Trained weights and scores of this model.
      method: Method of personalisation.
      program: Result of :func:`prb_jax.training.train.make_reward_step` for this model and method.
      lengths: Lengths of the run; see :func:`prb_jax.training.weights.learning_rate`.
    """

    settings: TrainSettings

    def __init__(
        self,
        settings: TrainSettings,
        start: Start,
        *,
        model: TrainedModel,
        method: TrainedMethod,
        program: TrainStep,
        lengths: Sequence[int],
    ) -> None:
        super().__init__(settings, start, program)
        self.lengths, self.method, self._memory = lengths, method, model.memory
        states, everywhere = program.state_shardings, replicated(program.mesh)
        self._gather = jax.jit(lambda tree: tree, out_shardings=everywhere)
        self._take = jax.jit(
            method.take,
            in_shardings=(states[USER], everywhere),
            out_shardings=states[USER],
            donate_argnums=0,
        )

        def rewards(state: TrainState, frozen: Params, batch: Batch) -> jax.Array:
            inputs = program.inputs(state)
            prompts = method.soft_prompts(inputs[USER])
            return model.rewards(inputs[WEIGHTS], frozen, batch, prompts=prompts, differentiated=False)

        self.rewards = jax.jit(
            rewards, in_shardings=(states, program.frozen_shardings, None), out_shardings=everywhere
        )
        self.truncated: int | None = 0
        self.view = TrainedView(settings.view, settings.method)
        self.reader = Reader(name=start.name, config=start.config, tokenizer=start.tokenizer, prompts=method)

    @property
    def memory(self) -> StepMemory | None:
        return self._memory

    def begin_from(self, trained: Params) -> None:
        """Start from trained weights that :meth:`trained` returned, with a new optimiser."""
        embedding = merge(trained, self._read_frozen())["embed"]
        self.state = self.program.init({WEIGHTS: trained, USER: embedding})

    def trained(self) -> Params:
        """Return the current trained weights, float32 arrays on the host. Every process must call this."""
        whole = self._gather(self.state[WEIGHTS]["params"])
        return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters."""
        return _size(self.state[WEIGHTS]["params"]) + _size(self.state[USER].get("table"))

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return self.trained_parameters + _size(self.frozen)

    def encode(self, examples: Examples) -> Examples:
        """Add tokens, loss weights and user rows to training data; sets `truncated` to the number of comparisons
        cut."""
        comparisons, known = self._on_disk(examples), examples.known
        if comparisons.in_memory:
            trees: Items[Tree] = Held(self._encode(comparisons))
            self.truncated = sum(tree.truncation.any for tree in trees)
        else:
            trees = TreesOnDemand(comparisons, self._encode_here)
            self.truncated = comparisons.truncated()
        return Examples(known, known, trees=trees, weights=self._weights(known), rows=self.method.rows(known))

    def encode_held_out(self, examples: Examples) -> Examples:
        """Add tokens to data for :meth:`validate`; data larger than memory is tokenised in each validation."""
        comparisons = self._on_disk(examples)
        trees = self._encode(comparisons) if comparisons.in_memory else []
        return replace(examples, comparisons=comparisons, trees=Held(trees))

    def plan(self, examples: Examples, order: Order) -> None:
        """Choose the shapes of microbatches for training data in this order."""
        self._examples = examples
        together = [order.step(step) for step in range(STEPS_SIMULATED)]
        # A lengthened run keeps its shapes, so its results are bitwise the same.
        self._plan(examples.trees, together, per_step=order.per_step, steps=self.lengths[0])

    def batch(self, members: np.ndarray, *, step: int) -> StepBatch:
        """Return the batch of a step, counted from 0, for these comparisons of the planned data."""
        examples = self._examples
        users = self.method.rows_of_step(examples.rows, members, step=step)
        parts = labelled(self._layout, examples, members, users.slots, prompt_tokens=self.method.tokens)
        return StepBatch(members, users, parts, sum(examples.trees[member].tokens for member in members))

    def step(self, batch: StepBatch) -> Metrics:
        """Run one optimiser step, and return the metrics without waiting for them."""
        if batch.users.ids.size:
            self.state[USER] = self._take(self.state[USER], batch.users.ids)
        return self.update(batch.parts)

    def validate(self, held_out: Examples) -> tuple[dict[str, float], float]:
        """Score the held-out data with the current weights, through the scorer used for evaluation.

        Returns:
          Loss (the training loss, with smoothing and margins), accuracy and margin; and the number, lower is better,
          by which `validation.metric` chooses the best checkpoint.

        Raises:
          RunError: A score is not finite; the message names the comparison.
        """
        scores, comparisons = self._score(held_out), held_out.known
        shape = (len(scores), max(len(row) for row in scores))
        rewards, labels = np.zeros((2, *shape), np.float32)
        mask, margin = np.zeros(shape, bool), np.zeros(len(scores), np.float32)
        for i, (comparison, row) in enumerate(zip(comparisons, scores, strict=True)):
            if not np.isfinite(row).all():
                raise RunError(
                    f"validation: comparison {quote(comparison.id)}: the scores {row.tolist()} are not finite"
                )
            rewards[i, : len(row)], mask[i, : len(row)] = row, True
            labels[i, : len(row)] = comparison.labels
            margin[i] = comparison.margin or 0.0
        arrays = {"labels": labels, "mask": mask, "margin": margin, "weights": self._weights(comparisons)}
        parts = _loss(jnp.asarray(rewards), **jax.tree.map(jnp.asarray, arrays), config=self.settings.loss)
        rows = [
            ScoredRow(c.id, c.subset, c.user_id, row.tolist(), list(c.labels or ()))
            for c, row in zip(comparisons, scores, strict=True)
        ]
        seen = outcomes(rows)
        numbers = {
            "loss": float(parts.loss_sum / parts.weight_sum),
            "accuracy": float(seen.wins.mean()),
            "margin": float(seen.margins.mean()),
        }
        by_loss = self.settings.validation.metric == "loss"
        return numbers, numbers["loss"] if by_loss else -numbers["accuracy"]

    def _score(self, examples: Examples) -> list[np.ndarray]:
        """Return rewards under the current weights, one float32 array [K] per comparison."""
        known = (
            dict(zip(map(id, examples.comparisons), examples.trees, strict=True)) if examples.trees else {}
        )
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(examples)
        for batch in stream_scores(
            examples.comparisons,
            encode=(lambda part: [known[id(one)] for one in part]) if known else self._encode_here,
            dispatch=self._dispatch,
            options=self._scoring_options(),
            divide=not known,
            lanes=lanes(self.mesh),
        ):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                scores[index] = row
        return scores

    def _scoring_options(self) -> BatchOptions:
        """Return the batching options for held-out data."""
        return stream_options(self.start.config, self.mesh, self.attention, self.settings.batch.tokens)

    def _dispatch(self, batch: Batch) -> jax.Array:
        """Return the rewards of a host batch in which tree ids are the rows of their users."""
        state = {**self.state, USER: self.method.for_everyone(self.state[USER])}
        with compiling(self.rewards, *batch_sizes(batch)):
            return self.rewards(state, self.frozen or {}, self.program.place(batch, ())[0])

    def _weights(self, comparisons: Sequence[OfUser]) -> np.ndarray:
        """Return the weight of each comparison in the loss, float32 [n]."""
        by_user = self.settings.loss.user_weights
        return user_weights(comparisons) if by_user else np.ones(len(comparisons), np.float32)

    def _on_disk(self, examples: Examples) -> Items[Any]:
        """Return the comparisons, or their prepared tokens if there are any."""
        if examples.prepared is None:
            return examples.comparisons
        (folder, split), comparisons = examples.prepared, cast(Joined, examples.comparisons)
        stored = get("evaluation", "tokens").value(
            folder, self.reader, self.settings.view, split=split, places=comparisons.places
        )
        return comparisons if stored is None else stored

    def _encode(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """Return the trees of comparisons; each of several processes encodes a part."""
        return get("processes", "encode all").value(comparisons, self._encode_here)

    def _encode_here(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """Return the trees of comparisons, encoded in this process only."""
        return self.reader.encode(comparisons, view=self.settings.view)

    def _side_files(self, *, adapter: bool = False) -> Write:
        table = None if adapter else self.method.host_table(self.state[USER])

        def write(folder: Path) -> None:
            self.view.save(folder)
            if table is not None:
                self.method.save(folder, table)

        return write


def _size(tree: Any) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))
