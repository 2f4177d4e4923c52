"""The model in training: its weights and optimiser on the mesh, its steps, its scores, its checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.checkpoints.array_folder import flat_arrays, from_flat
from prb_jax.checkpoints.load import abstract_params
from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, quote
from prb_jax.metrics.accuracy import ScoredRow, outcomes
from prb_jax.models.attention.choice import STREAM_ATTENTION, trained_stream_attention
from prb_jax.models.decoder import Params
from prb_jax.personal.method import StepRows
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import Batch, batch_sizes, lanes, shape_options, stream_options
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.stream import encode_by_processes, stream_scores
from prb_jax.sharding import replicated
from prb_jax.text.view import TrainedView
from prb_jax.training.export import export_adapter, export_model
from prb_jax.training.groups import merge, split_params
from prb_jax.training.losses import comparison_loss
from prb_jax.training.microbatches import Microbatch, add_gradients
from prb_jax.training.objective import (
    USER,
    WEIGHTS,
    Extras,
    RewardObjective,
    make_reward_step,
    make_rewards,
    make_take,
)
from prb_jax.training.saved_states import Checkpoints, abstract_state, empty_sums
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import Part, Row, user_weights
from prb_jax.training.start import Start
from prb_jax.training.step import TrainState, sums_of
from prb_jax.training.users import method_of_run
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.tree import Tree

_loss = jax.jit(comparison_loss, static_argnames="config")


class Trainer:
    """One model in training; :meth:`begin` or :meth:`load_step` gives it weights, and nothing is compiled before that.

    Args:
      settings: of the run.
      start: the model.
      mesh: devices.
      data: the training data; without any, the users are those that `out` names.
      out: the run folder.
      lengths: of a run that was lengthened: see `prb_jax.training.optimizer.learning_rate`.

    Raises:
      RunError, DataError, CheckpointError, MeshError: settings that this model or mesh cannot have.
    """

    def __init__(
        self,
        settings: TrainSettings,
        start: Start,
        *,
        mesh: Mesh,
        data: Sequence[Row],
        out: Path,
        lengths: Sequence[int] = (),
    ) -> None:
        self.settings, self.start, self.mesh = settings, start, mesh
        self.lengths = lengths or (settings.steps,)
        config, dtype = start.config, jnp.dtype(settings.dtype)
        self._lora = settings.lora if settings.tuning == "lora" else None
        trainable, frozen = jax.eval_shape(self._split, abstract_params(config))
        peak = settings.learning_rate(hidden_size=config.hidden_size)
        optimizer = dataclasses.replace(settings.optimizer, learning_rate=peak)
        self.method = method_of_run(
            settings,
            data,
            out=out,
            width=config.hidden_size,
            optimizer=optimizer,
            lengths=self.lengths,
            mesh=mesh,
        )
        objective = RewardObjective(
            config=config,
            mesh=mesh,
            dtype=dtype,
            loss=settings.loss,
            lora_scale=1.0 if self._lora is None else self._lora.scale,
            remat=settings.remat,
            attention=settings.attention,
            method=self.method,
        )
        self._step = make_reward_step(
            objective, optimizer=optimizer, lengths=self.lengths, trainable=trainable, frozen=frozen
        )
        self._reward_fn, self._take_rows = (
            make_rewards(objective, self._step),
            make_take(objective, self._step),
        )
        self._abstract = abstract_state(
            self._step, {WEIGHTS: trainable, USER: abstract_params(config)["embed"]}
        )
        self.streams = trained_stream_attention(mesh, dtype, settings.attention)
        self.truncated: int | None = 0
        self._gather = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))
        self._state: TrainState = {}
        self._frozen: Params | None = None
        self._trees: dict[int, Tree] = {}
        self.view = TrainedView(settings.view, settings.method)
        self.reader = Reader(name=start.name, config=config, tokenizer=start.tokenizer, prompts=self.method)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.trained_parameters + _size(self._frozen)

    @property
    def trained_parameters(self) -> int:
        """Parameters that are trained."""
        return _size(self._state[WEIGHTS]["params"]) + _size(self._state[USER].get("table"))

    def begin(self, checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
        """Continues from the newest checkpoint that can be read, or from the starting point.

        Returns:
          The number of steps made by then, and the facts that were saved with them.
        """
        saved = checkpoints.restore_newest(self._saved_shapes())
        if saved is not None:
            self._take(saved.arrays)
            return saved.step, saved.facts
        self.begin_anew()
        return 0, {}

    def begin_anew(self, trained: Params | None = None) -> None:
        """Goes back to the starting point, or to other trained weights, with a new optimiser.

        Args:
          trained: of :meth:`trained`; those of the starting point if not given.
        """
        if trained is None or self._frozen is None:
            trainable, self._frozen = self._split(self.start.load(self.mesh))
            trained = trainable if trained is None else trained
        embedding = merge(trained, self._frozen)["embed"]
        self._state = self._step.init({WEIGHTS: trained, USER: embedding})

    def trained(self) -> Params:
        """The weights that are trained, as they are now: float32 arrays of the host. Every process must ask for it."""
        whole = self._gather(self._state[WEIGHTS]["params"])
        return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), whole)

    def load_step(self, checkpoints: Checkpoints, step: int) -> None:
        """Goes to the weights of one checkpoint."""
        self._take(checkpoints.restore(step, self._saved_shapes()).arrays)

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint."""
        checkpoints.save(step, flat_arrays(self._kept(self._state)), facts)

    def encode(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """What the model sees of training comparisons; how many were cut to fit is kept in `truncated`."""
        trees = encode_by_processes(comparisons, self.encode_here)
        self.truncated = sum(tree.truncation.any for tree in trees)
        return trees

    def step(self, batches: Sequence[Microbatch], rows: StepRows) -> Mapping[str, jax.Array]:
        """One step of the optimiser over its microbatches; the metrics are not waited for."""
        assert self._frozen is not None
        state = self._state
        if rows.ids.size:
            state = self._take_rows(state, rows.ids)
        state = add_gradients(self._step, state, self._frozen, batches)
        with compiling(self._step.update):
            self._state, metrics = self._step.update(state)
        return metrics

    def score(self, comparisons: Sequence[Comparison]) -> list[np.ndarray]:
        """Rewards by the weights of now, one float32 array [K] a comparison.

        Those of a list are tokenised once a run, and others each time.
        """
        held = isinstance(comparisons, list)
        fresh = [one for one in comparisons if id(one) not in self._trees] if held else []
        if fresh:
            self._trees.update(zip(map(id, fresh), encode_by_processes(fresh, self.encode_here), strict=True))
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(comparisons)
        for batch in stream_scores(
            comparisons,
            encode=(lambda part: [self._trees[id(one)] for one in part]) if held else self.encode_here,
            dispatch=self._rewards,
            options=(stream_options if self.streams == STREAM_ATTENTION else shape_options)(
                self.start.config, self.mesh, self.settings.batch.tokens
            ),
            divide=not held,
            lanes=lanes(self.mesh),
        ):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                scores[index] = row
        return scores

    def validate(self, held_out: Part) -> tuple[dict[str, float], float]:
        """Scores what is held out with the weights of now, through the same scorer that evaluates.

        Returns:
          Loss (that of training, so with smoothing and margins), accuracy and margin; and the number, smaller is
          better, by which `validation.metric` chooses the best checkpoint.

        Raises:
          RunError: a score is not finite, naming the comparison.
        """
        scores, comparisons = self.score(held_out.comparisons), held_out.known
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
        settings = self.settings
        weights = (
            user_weights(comparisons) if settings.loss.user_weights else np.ones(len(scores), np.float32)
        )
        arrays = {"labels": labels, "mask": mask, "margin": margin, "weights": weights}
        parts = _loss(
            jnp.asarray(rewards), **{name: jnp.asarray(x) for name, x in arrays.items()}, config=settings.loss
        )
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
        return numbers, numbers["loss"] if settings.validation.metric == "loss" else -numbers["accuracy"]

    def _rewards(self, batch: Batch) -> jax.Array:
        """float32 [B, K] or [S, M] for a batch of the host."""
        assert self._frozen is not None
        if isinstance(batch, TreeBatch):
            users, shape = self.method.rows_of(batch), batch.response_lengths.shape
        else:  # the ids of the trees are the rows of their users
            users, shape = np.zeros(len(batch.reads), np.int32), batch.reads.shape
        blank, one = np.zeros(shape, np.float32), np.zeros(len(users), np.float32)
        state = {**self._state, USER: self.method.for_everyone(self._state[USER])}
        extras = Extras(labels=blank, mask=blank > 0, margin=one, weights=one, users=users)
        with compiling(self._reward_fn, *batch_sizes(batch)):
            return self._reward_fn(state, self._frozen, *self._step.place(batch, extras))

    def params(self) -> Params:
        """All parameters, adapters included."""
        assert self._frozen is not None
        return merge(self._state[WEIGHTS]["params"], self._frozen)

    def export(self, folder: Path) -> None:
        """Writes the weights of now as a Hugging Face folder, with its view and the soft prompts of the users."""
        table = self.method.host_table(self._state[USER])

        def write_more(partial: Path) -> None:
            self.view.save(partial)
            self.method.save(partial, table)

        export_model(
            self.params(),
            self.start.config,
            folder,
            raw_config=self.start.raw_config,
            tokenizer=self.start.tokenizer,
            tokenizer_folder=self.start.tokenizer_folder,
            dtype=self.settings.export.dtype or self.settings.dtype,
            mesh=self.mesh,
            lora_scale=1.0 if self._lora is None else self._lora.scale,
            extra=write_more,
        )

    def export_adapter(self, folder: Path) -> None:
        """Writes the adapters and the head of now for PEFT."""
        assert self._lora is not None
        export_adapter(
            self.params(),
            self.start.config,
            folder,
            lora=self._lora,
            base=self.start.name,
            tokenizer=self.start.tokenizer,
            tokenizer_folder=self.start.tokenizer_folder,
            mesh=self.mesh,
            extra=self.view.save,
        )

    def encode_here(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """What the model sees of comparisons; of several processes this one alone makes it."""
        return self.reader.encode(comparisons, view=self.settings.view)

    def _split(self, params: Params) -> tuple[Params, Params]:
        settings = self.settings
        return split_params(params, tuning=settings.tuning, lora=self._lora, seed=settings.seed)

    def _saved_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return flat_arrays(self._kept(self._abstract))

    def _take(self, arrays: Mapping[str, jax.Array]) -> None:
        """Goes to the state of a checkpoint; frozen weights are loaded if they are not there yet."""
        if self._frozen is None:
            # Where everything is trained, the starting weights are no longer needed.
            full = self.settings.tuning == "full"
            self._frozen = {} if full else self._split(self.start.load(self.mesh))[1]
        saved = from_flat(self._kept(self._abstract), arrays)
        saved[USER] = self.method.resume(saved.get(USER, {}))
        sums = sums_of(self._state) if self._state else empty_sums(self._step, self._abstract)
        self._state = {**saved, **sums}

    def _kept(self, state: TrainState) -> TrainState:
        """What a checkpoint holds of a state: not the sums and rows of a step, which each step makes anew."""
        return {WEIGHTS: state[WEIGHTS], "step": state["step"], USER: self.method.kept(state[USER])}


def _size(tree: Any) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))
