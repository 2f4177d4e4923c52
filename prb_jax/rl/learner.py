"""The policy in training: its weights, those of its value function, the reference, updates, checkpoints and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.checkpoints.array_folder import flat_arrays, from_flat
from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.generation.policy import Policy, read_stop_ids
from prb_jax.generation.programs import decoding_mesh, make_program
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.decoder import Params
from prb_jax.models.lora import init_lora
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import OpenedModel, open_language_model
from prb_jax.rl.forward import Actor, token_logprobs, token_states, token_values
from prb_jax.rl.objective import POLICY, VALUE, loss_of, no_sums
from prb_jax.rl.rollouts import TokenStats
from prb_jax.rl.sections import LABELLED
from prb_jax.rl.settings import PpoSettings
from prb_jax.runs.progress import compiling
from prb_jax.sharding import check_heads, parameter_shardings, replicated
from prb_jax.training.export import copy_file, export_adapter, export_model
from prb_jax.training.groups import ParameterGroup, Weights, merge, split_params
from prb_jax.training.saved_states import Checkpoints, abstract_state, empty_sums
from prb_jax.training.settings import OptimizerSettings
from prb_jax.training.start import with_pad_token
from prb_jax.training.step import TrainState, TrainStep, make_train_step, without_sums
from prb_jax.trees.batches import TreeBatch


class Learner:
    """One policy in training. Build with :func:`make_learner`; :meth:`begin` gives it weights."""

    def __init__(
        self, settings: PpoSettings, opened: OpenedModel, *, policy: Policy, actor: Actor, step: TrainStep
    ) -> None:
        self.settings, self.opened, self.policy, self.actor = settings, opened, policy, actor
        self._step = step
        self._state: TrainState = {}
        self._frozen: Params = {}
        self._reference: Params | None = None
        sources = jax.eval_shape(
            lambda params: sources_of(settings, params)[0], abstract_params(actor.config)
        )
        self._abstract = abstract_state(step, sources)
        self._look = make_look(settings, actor, step)

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.actor.mesh

    def begin(self, checkpoints: Checkpoints) -> tuple[int, dict[str, Any]]:
        """Continue from the newest checkpoint that can be read, or start from the model.

        Returns:
          The number of steps made by then, and the facts that were saved with them.
        """
        params = self._load()
        sources, self._frozen = sources_of(self.settings, params)
        if self.settings.tuning == "full" and self.settings.algorithm != "sft":
            self._reference = reference_of(params, self.actor.dtype)
        saved = checkpoints.restore_newest(flat_arrays(without_sums(self._abstract)))
        if saved is None:
            self._state = self._step.init(sources)
            return 0, {}
        kept = from_flat(without_sums(self._abstract), saved.arrays)
        self._state = {**kept, **empty_sums(self._step, self._abstract)}
        return saved.step, saved.facts

    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> None:
        """Start writing a checkpoint."""
        checkpoints.save(step, flat_arrays(without_sums(self._state)), facts)

    def params(self) -> Params:
        """Return all parameters of the policy, adapters included."""
        return merge(self._step.inputs(self._state)[POLICY], self._frozen)

    def look(self, batch: TreeBatch) -> TokenStats:
        """Return what policy, reference and value function of now say of a microbatch of the host."""
        with compiling(self._look, batch.prefix.shape, batch.responses.shape):
            placed = self._step.place(batch, ())[0]
            found = self._look(self._state, self._frozen, self._reference, placed)
        return TokenStats(*(np.asarray(array) for array in found))

    def update(self, batches: Sequence[tuple[TreeBatch, Any]]) -> dict[str, float]:
        """Make one update from the microbatches of a minibatch. Nothing changes where ``finite`` is 0."""
        state = self._state
        for batch, targets in batches:
            placed = self._step.place(batch, targets)
            with compiling(self._step.accumulate, batch.prefix.shape, batch.responses.shape):
                state = self._step.accumulate(state, self._frozen, *placed)
        with compiling(self._step.update):
            self._state, metrics = self._step.update(state)
        return {name: float(np.asarray(value)) for name, value in metrics.items()}

    def export(self, folder: Path) -> None:
        """Write the policy of now as a Hugging Face folder, with adapters merged."""
        export_model(
            self.params(),
            self.actor.config,
            folder,
            raw_config=with_pad_token(self.actor.config.original, self.policy.tokenizer),
            tokenizer=self.policy.tokenizer,
            tokenizer_folder=self.opened.tokenizer_folder.path,
            dtype=self.settings.export_dtype or self.settings.dtype,
            mesh=self.mesh,
            lora_scale=self.actor.lora_scale,
            extra=self._generation_config,
        )

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters of now as PEFT loads them."""
        export_adapter(
            self.params(),
            self.actor.config,
            folder,
            lora=self.settings.lora,
            base=self.opened.name,
            tokenizer=self.policy.tokenizer,
            tokenizer_folder=self.opened.tokenizer_folder.path,
            mesh=self.mesh,
        )

    def _generation_config(self, partial: Path) -> None:
        name = "generation_config.json"
        copy_file(self.opened.folder.path / name, partial / name)

    def _load(self) -> Params:
        config = self.actor.config
        dtype = jnp.dtype("float32") if self.settings.tuning == "full" else self.actor.dtype
        shardings = parameter_shardings(abstract_params(config), self.mesh)
        return load_params(self.opened.folder.path, config, dtype=dtype, shardings=shardings).params


def make_learner(settings: PpoSettings) -> Learner:
    """Return a learner without weights: headers of the model's files are read, and nothing is compiled yet.

    Raises:
      CheckpointError: no causal language model, or one that cannot be used.
      MeshError: the mesh does not fit the devices or the model.
    """
    options = LoadOptions(
        mesh=settings.mesh,
        dtype=settings.dtype,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
        attention=settings.attention,
    )
    assert settings.model is not None
    opened = open_language_model(settings.model, options)
    config, mesh, dtype = opened.decoder.config, opened.mesh, jnp.dtype(settings.dtype)
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    lora_scale = settings.lora.scale if settings.tuning == "lora" else 1.0
    chat = opened.chat()
    policy = Policy(
        name=opened.name,
        program=make_program(
            config,
            mesh=decoding_mesh(config, mesh),
            dtype=dtype,
            attention=settings.attention,
            lora_scale=lora_scale,
        ),
        params={},
        tokenizer=chat,
        stop_ids=read_stop_ids(opened.folder.path, chat, raw=config.original),
        mesh=mesh,
        dtype=settings.dtype,
        source=opened.source,
    )
    actor = Actor(
        config=config,
        mesh=mesh,
        dtype=dtype,
        temperature=1.0 if settings.algorithm in LABELLED else settings.rollout.temperature,
        attention=wanted_attention(mesh, dtype, settings.attention),
        lora_scale=lora_scale,
        remat=settings.remat,
    )
    return Learner(settings, opened, policy=policy, actor=actor, step=make_policy_step(settings, actor))


def make_policy_step(settings: PpoSettings, actor: Actor) -> TrainStep:
    """Return the compiled functions of an update, of policy and value function together."""
    sources, frozen = jax.eval_shape(
        lambda params: sources_of(settings, params), abstract_params(actor.config)
    )
    lengths = (settings.steps * settings.batch.updates,)
    policy = settings.optimizer
    value_rate = (
        policy.learning_rate if settings.value.learning_rate is None else settings.value.learning_rate
    )
    optimizers: dict[str, OptimizerSettings] = {
        POLICY: policy,
        VALUE: replace(policy, learning_rate=value_rate),
    }
    groups: dict[str, ParameterGroup] = {
        name: Weights(optimizer=optimizers[name], lengths=lengths, trainable=source, mesh=actor.mesh)
        for name, source in sources.items()
    }
    first = groups[POLICY]
    assert isinstance(first, Weights)
    return make_train_step(
        loss_of(actor, settings),
        groups=groups,
        frozen=frozen,
        zero=lambda: no_sums(settings),
        learning_rate=first.learning_rate,
        mesh=actor.mesh,
    )


def sources_of(settings: PpoSettings, params: Params) -> tuple[dict[str, Params], Params]:
    """Return the arrays that each group starts with, and those that are not trained.

    The reference is the model as it is, so a value function with a trunk of its own shares the frozen weights too.
    """
    lora = settings.lora if settings.tuning == "lora" else None
    trainable, frozen = split_params(params, tuning=settings.tuning, lora=lora, seed=settings.seed)
    sources = {POLICY: trainable}
    if settings.with_values:
        head = {"score": jnp.zeros((params["embed"].shape[1], 1), jnp.float32)}
        if settings.value.trunk == "shared":
            trunk: Params = {}
        elif lora is None:
            trunk = {name: leaf for name, leaf in params.items() if name != "lm_head"}
        else:
            trunk = init_lora(params, lora, seed=settings.seed + 1)
        sources[VALUE] = {**trunk, **head}
    return sources, frozen


def reference_of(params: Params, dtype: jnp.dtype) -> Params:
    """Return the starting weights, rounded only where a forward pass rounds them anyway: the matrices of the layers."""
    if dtype == jnp.float32:
        return params
    layers = {name: leaf.astype(dtype) if leaf.ndim == 3 else leaf for name, leaf in params["layers"].items()}
    return {**params, "layers": layers}


def make_look(settings: PpoSettings, actor: Actor, step: TrainStep) -> Callable[..., Any]:
    """Return (state, frozen, reference or None, batch) -> log-probabilities, those of the reference, and values."""
    full = settings.tuning == "full"
    everywhere = replicated(actor.mesh)
    reference_shardings = parameter_shardings(abstract_params(actor.config), actor.mesh) if full else None

    def logprobs_of(params: Params, batch: TreeBatch) -> tuple[jax.Array, jax.Array]:
        states = token_states(actor, params, batch)
        return token_logprobs(actor, params, states[:, :, :-1], jnp.asarray(batch.responses))[0], states

    def look(state: TrainState, frozen: Params, reference: Params | None, batch: TreeBatch) -> Any:
        inputs = step.inputs(state)
        under_reference, _ = logprobs_of(frozen if reference is None else reference, batch)
        rows, responses, length = batch.responses.shape
        if settings.algorithm == "dpo":
            return under_reference, under_reference, jnp.zeros((rows, responses, length + 1))
        logprobs, states = logprobs_of(merge(inputs[POLICY], frozen), batch)
        values = jnp.zeros((rows, responses, length + 1))
        if settings.with_values:
            if settings.value.trunk == "own":
                states = token_states(actor, merge(inputs[VALUE], frozen), batch)
            values = token_values(inputs[VALUE], states)
        return logprobs, under_reference, values

    return jax.jit(
        look,
        in_shardings=(step.state_shardings, step.frozen_shardings, reference_shardings, None),
        out_shardings=everywhere,
    )
