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

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError
from prb_jax.models.decoder import Params
from prb_jax.models.lora import LoraConfig
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import batch_sharding, to_global
from prb_jax.training.config import flat_settings
from prb_jax.training.data import Examples
from prb_jax.training.export import export_adapter, export_model
from prb_jax.training.losses import LossConfig
from prb_jax.training.optimizer import OptimizerConfig
from prb_jax.training.settings import TrainSettings
from prb_jax.training.splits import TrainingData
from prb_jax.training.start import Start
from prb_jax.training.state import Checkpoints, flat_arrays, from_flat
from prb_jax.training.step import Extras, TrainState, TrainStep, make_train_step, merge, split_params
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.tree import Tree

_CHECKPOINTED = ("trainable", "opt", "step")


class Trainer:
    """One model in training. Build with :func:`make_trainer`."""

    def __init__(
        self,
        settings: TrainSettings,
        start: Start,
        *,
        mesh: Mesh,
        step: TrainStep,
        state: TrainState,
        frozen: Params,
        loss: LossConfig,
        lora: LoraConfig | None,
    ) -> None:
        self.settings, self.start, self.mesh = settings, start, mesh
        self.loss = loss
        self._step, self._state, self._frozen, self._lora = step, state, frozen, lora
        self.truncated = 0
        self.scorer = RewardModel(
            name=start.name,
            config=start.config,
            params={},
            score_fn=self._score_fn,
            tokenizer=start.tokenizer,
            mesh=mesh,
            dtype=settings.dtype,
            readout="logit",
        )

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The settings by dotted name."""
        return flat_settings(self.settings)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return _size(self._state["trainable"]) + _size(self._frozen)

    @property
    def trained_parameters(self) -> int:
        """Parameters that are trained."""
        return _size(self._state["trainable"])

    def encode(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """What the model sees of training comparisons; how many were cut to fit is kept in `truncated`."""
        trees = self.scorer.encode(
            comparisons, profile_posts=self.settings.shown_posts, max_length=self.settings.max_length
        )
        self.truncated = sum(tree.truncation.any for tree in trees)
        return trees

    def user_rows(self, comparisons: Sequence[Comparison]) -> np.ndarray | None:
        """int32 [n]: each comparison's row in the table of users; None where there is none."""
        return None

    def step_users(
        self, examples: Examples, members: np.ndarray, step: int
    ) -> tuple[np.ndarray | None, Mapping[int, int] | None]:
        """The users of one step, and each comparison's place among them."""
        return None, None

    def step(
        self, batches: Sequence[tuple[TreeBatch, Extras]], users: np.ndarray | None
    ) -> Mapping[str, jax.Array]:
        """One step of the optimiser over its microbatches; the metrics are not waited for."""
        state = self._state
        for batch, extras in batches:
            placed = self._step.place(batch, extras)
            state = self._step.accumulate(state, self._frozen, *placed)
        self._state, metrics = self._step.update(state)
        return metrics

    def score(self, comparisons: Sequence[Comparison]) -> list[np.ndarray]:
        """Rewards by the weights of now, one float32 array [K] a comparison."""
        return self.scorer.score(
            comparisons,
            profile_posts=self.settings.shown_posts,
            max_length=self.settings.max_length,
            batch_tokens=self.settings.batch.tokens,
        )

    def _score_fn(self, _: Params, batch: TreeBatch) -> jax.Array:
        rows, responses = batch.response_lengths.shape
        blank, one = np.zeros((rows, responses), np.float32), np.zeros(rows, np.float32)
        extras = Extras(labels=blank, mask=blank > 0, margin=one, weights=one, users=np.zeros(rows, np.int32))
        placed = jax.tree.map(lambda x: to_global(x, batch_sharding(self.mesh, x.ndim)), extras)
        return self._step.rewards(self._state, self._frozen, batch, placed)

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> None:
        """Starts writing a checkpoint."""
        checkpoints.save(step, self._arrays(), {**facts, "seed": self.settings.seed})

    def restore(self, checkpoints: Checkpoints) -> int:
        """Continues from the newest checkpoint that can be read; the number of steps made by then."""
        saved = checkpoints.restore_newest(self._abstract())
        if saved is None:
            return 0
        self._take(saved.arrays)
        return saved.step

    def load_step(self, checkpoints: Checkpoints, step: int) -> None:
        """Goes to the weights of one checkpoint."""
        self._take(checkpoints.restore(step, self._abstract()).arrays)

    def params(self) -> Params:
        """All parameters, adapters included."""
        return merge(self._state["trainable"], self._frozen)

    def export(self, folder: Path) -> None:
        """Writes the weights of now as a Hugging Face folder."""
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
        )

    def _arrays(self) -> dict[str, jax.Array]:
        """What a checkpoint holds: not the sums of a step, which are zero between steps."""
        return flat_arrays({name: self._state[name] for name in _CHECKPOINTED})

    def _abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in self._arrays().items()
        }

    def _take(self, arrays: Mapping[str, jax.Array]) -> None:
        kept = {name: self._state[name] for name in _CHECKPOINTED}
        self._state = {**self._state, **from_flat(kept, arrays)}


def make_trainer(settings: TrainSettings, start: Start, data: TrainingData, *, mesh: Mesh) -> Trainer:
    """Loads the weights onto the mesh and compiles nothing yet.

    Raises:
      RunError, DataError, CheckpointError, MeshError: settings that this model or mesh cannot have.
    """
    if settings.method == "persona_embedding":
        raise RunError("persona_embedding: not here yet")
    loss = LossConfig(
        kind=settings.loss.kind,
        label_smoothing=settings.loss.label_smoothing,
        center_rewards_coefficient=settings.loss.center_rewards_coefficient,
        use_margin=settings.loss.use_margin,
    )
    lora = None
    if settings.tuning == "lora":
        lora = LoraConfig(**dataclasses.asdict(settings.lora))
    params = start.load(mesh)
    trainable, frozen = split_params(params, tuning=settings.tuning, lora=lora, seed=settings.seed)
    step = make_train_step(
        start.config,
        mesh=mesh,
        dtype=jnp.dtype(settings.dtype),
        loss=loss,
        optimizer=optimizer_config(settings),
        trainable=trainable,
        frozen=frozen,
        lora_scale=1.0 if lora is None else lora.scale,
        remat=settings.remat,
    )
    return Trainer(
        settings,
        start,
        mesh=mesh,
        step=step,
        state=step.init(trainable),
        frozen=frozen,
        loss=loss,
        lora=lora,
    )


def optimizer_config(settings: TrainSettings) -> OptimizerConfig:
    """The optimiser's options with shares of the run turned into steps."""
    options = settings.optimizer
    return OptimizerConfig(
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        schedule=options.schedule,
        warmup_steps=round(options.warmup_share * settings.steps),
        final_share=options.final_share,
        decay_share=options.decay_share,
        weight_decay=options.weight_decay,
        b1=options.b1,
        b2=options.b2,
        eps=options.eps,
        clip_norm=options.clip_norm,
    )


def _size(tree: Any) -> int:
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))
