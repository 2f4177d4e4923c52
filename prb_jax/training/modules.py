"""Training of a user's `flax.nnx.Module`: the same run as for any reward model, over plain sequences.

All floating-point `nnx.Param` of the module, or the subset that a filter selects, are trained in float32 and cast to
their original dtypes. Every other variable is left unchanged. The module runs in evaluation mode, so dropout is off.
Parameters that the user sharded over the mesh stay sharded, and so do their moments; all others are replicated.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, RunError, quote
from prb_jax.models.checkpoints.array_folder import flat_arrays
from prb_jax.models.decoder import Params
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.user_module import ModuleConfig, UserModule, open_module, score_sequences
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.platform.sharding import mesh_shape
from prb_jax.records.items import Items
from prb_jax.records.options import flat_settings
from prb_jax.runs.training import MODEL
from prb_jax.scoring.batching import BatchOptions
from prb_jax.training.config import TrainSettings
from prb_jax.training.export import write_whole
from prb_jax.training.memory import ACTIVATIONS
from prb_jax.training.microbatches import first_steps
from prb_jax.training.start import Start
from prb_jax.training.step import Microbatch
from prb_jax.training.trainer import RewardTrainer
from prb_jax.training.weights import TrainedModel
from prb_jax.trees.sequences import (
    MOST_SAVED,
    PackedSequences,
    SequenceBatch,
    SequenceOptions,
    choose_lengths,
    make_sequence_batch,
    sequence_options,
)
from prb_jax.trees.tree import Tree, round_up

PARAMETERS = "parameters.safetensors"
"""File in the model's folder with the trained parameters, keyed by path, e.g. "layers/0/kernel"."""

_DECIDED = ("model", "tuning", "dtype", "remat", "attention", "init_head", "revision", "export.dtype")
_SECTIONS = ("lora.", "user_embedding.", "scratch.")

TRAINED, FROZEN = "trained", "frozen"


@dataclass(frozen=True)
class ModuleStart(Start):
    """Start of a run from a module; its weights are two flat dicts, trained and frozen."""

    given: Any  # module of the user
    module: UserModule
    wrt: Any  # `nnx` filter that selects the trained variables

    @property
    def abstract(self) -> Params:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.parts(self.module.state)
        )

    def parts(self, tree: Any) -> dict[str, dict[str, Any]]:
        """Return the leaves of a state, or of a tree of the same structure, keyed by path."""
        parameters = nnx.filter_state(self.module.state, self.wrt)
        trained = {
            place for place, leaf in _by_place(parameters).items() if jnp.issubdtype(leaf.dtype, jnp.floating)
        }
        parts: dict[str, dict[str, Any]] = {TRAINED: {}, FROZEN: {}}
        for place, leaf in _by_place(tree).items():
            parts[TRAINED if place in trained else FROZEN][place] = leaf
        return parts

    def in_training(self, settings: TrainSettings, mesh: Mesh) -> TrainedModel:
        def split(params: Params) -> tuple[Params, Params]:
            return params[TRAINED], params[FROZEN]

        def rewards(trained: Params, frozen: Params, batch: SequenceBatch, **_: Any) -> jax.Array:
            return score_sequences(self.module.graphdef, self.state({**frozen, **trained}), batch)

        shardings = self.parts(self.module.shardings)
        return TrainedModel(
            split=split,
            rewards=rewards,
            trained=self.abstract[TRAINED],
            trained_shardings=shardings[TRAINED],
            frozen_shardings=shardings[FROZEN],
            width=cast(ModuleConfig, self.config).hidden_size or 1,
        )

    def finished_module(self, out: Path) -> Any:
        """Return a copy of the user's module with the parameters of a finished run.

        Raises:
          CheckpointError: The parameter file cannot be read, or belongs to another module.
        """
        from safetensors.flax import load_file

        path = out / MODEL / PARAMETERS
        try:
            trained = load_file(path)
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        parts = self.parts(self.module.state)
        if trained.keys() != parts[TRAINED].keys():
            raise CheckpointError(
                f"{path}: expected the parameters of {self.name}, found those of another module"
            )
        graphdef, _ = nnx.split(self.given)
        return nnx.merge(graphdef, self.state({**parts[FROZEN], **trained}))

    def state(self, leaves: Mapping[str, Any]) -> Any:
        """Return the state with these leaves, each cast to the dtype of its variable."""
        before = _by_place(self.module.state)
        kinds = {place: leaf.dtype for place, leaf in before.items()}
        after = [leaves[place] for place in before]
        after = [
            leaf if leaf.dtype == kind else leaf.astype(kind) for leaf, kind in zip(after, kinds.values())
        ]
        return jax.tree.unflatten(jax.tree.structure(self.module.state), after)


def _by_place(tree: Any) -> dict[str, Any]:
    return {place.removesuffix("/value"): leaf for place, leaf in flat_arrays(tree).items()}


def start_from_module(
    module: Any, settings: TrainSettings, *, tokenizer: Any, wrt: Any = None, mesh: Mesh
) -> ModuleStart:
    """Return the starting point of a run that trains a module.

    Args:
      module: Module to train; see :func:`prb_jax.models.readouts.user_module.open_module`.
      settings: Settings of the run. Options that the module decides must keep their defaults.
      tokenizer: Tokenizer that replaces the one of the settings.
      wrt: `nnx` filter that selects the trained variables; `nnx.Param` by default.
      mesh: Devices.

    Raises:
      RunError: A setting is changed that the module decides, two tokenizers are given, the learning rate is missing,
        or `open_module` fails.
      CheckpointError: The tokenizer cannot be used.
    """
    flat, default = flat_settings(settings), flat_settings(TrainSettings())
    for key, value in flat.items():
        is_decided = key in _DECIDED or key.startswith(_SECTIONS)
        if (is_decided and value != default[key]) or (key, value) == ("method", "persona_embedding"):
            raise RunError(
                f"config key '{key}': is not used where a module is trained: expected {quote(default[key])}, found "
                f"{quote(value)}"
            )
    if tokenizer is not None and settings.tokenizer is not None:
        raise RunError(
            f"config key 'tokenizer': names {quote(settings.tokenizer)}, but a tokenizer is given instead"
        )
    chosen = settings.tokenizer if tokenizer is None else tokenizer
    opened = open_module(
        module, LoadOptions(tokenizer=chosen, mesh=mesh, chat_template=settings.chat_template)
    )
    if settings.optimizer.learning_rate is None and opened.config.hidden_size is None:
        raise RunError(
            "config key 'optimizer.learning_rate': expected a number, found None: the default follows from the width, "
            f"and {opened.name} has no attribute hidden_size"
        )

    def load(mesh: Mesh) -> Params:
        # Copied because every training step donates the arrays of the state.
        return start.parts(jax.tree.map(_copied, opened.state, opened.shardings))

    start = ModuleStart(
        name=opened.name,
        config=cast(Any, opened.config),
        raw_config={},
        tokenizer=opened.tokenizer,
        tokenizer_folder=Path(opened.tokenizer.name),
        identity={
            "architecture": opened.name,
            "dtype": opened.dtype,
            **opened.source,
            "template": opened.tokenizer.template_hash,
        },
        load=load,
        given=module,
        module=opened,
        wrt=nnx.Param if wrt is None else wrt,
    )
    trained = sorted(start.abstract[TRAINED])
    if not trained:
        raise RunError(
            f"model {opened.name}: expected an nnx.Param of floating-point numbers to train, found none"
        )
    return start if wrt is None else replace(start, identity={**start.identity, "trained": trained})


def _copied(leaf: jax.Array, sharding: Any) -> jax.Array:
    return jax.device_put(jnp.copy(leaf), sharding)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Layout of a step's trees in microbatches of plain sequences with a few shapes. Build with
    :func:`plan_sequence_layout`."""

    options: SequenceOptions
    lengths: Sequence[int]  # padded lengths of the sequences, ascending
    responses: int  # maximum per tree, as far as is known
    per_step: int  # maximum number of trees per step
    flops_per_token: float
    token_bytes: int  # approximate bytes that a backward pass keeps per token

    def microbatches(self, trees: Sequence[Tree]) -> Iterator[Microbatch]:
        """Yield the microbatches of a step's trees, the longest first; no tree is divided between microbatches."""
        longest = np.asarray([max(map(len, tree.responses)) + len(tree.prefix) for tree in trees])
        waiting = np.argsort(-longest, kind="stable").tolist()
        while waiting:
            length = self._length(int(longest[waiting[0]]))
            rows = self._rows(length, most=max(len(tree.responses) for tree in trees))
            room, group = rows, list[int]()
            while waiting and len(trees[waiting[0]].responses) <= room:
                room -= len(trees[waiting[0]].responses)
                group.append(waiting.pop(0))
            sequences = [trees[i].sequence(k) for i in group for k in range(len(trees[i].responses))]
            packed = PackedSequences(rows, length, tuple(range(len(sequences))))
            batch, tokens = make_sequence_batch(sequences, packed), sum(map(len, sequences))
            yield Microbatch(
                batch,
                [group],
                rows,
                tokens,
                tokens * self.flops_per_token,
                0.0,
                rows * length * self.token_bytes,
            )

    def _length(self, longest: int) -> int:
        """Return the padded length for a sequence; a length beyond the plan is rounded up to a power of two."""
        place = bisect.bisect_left(self.lengths, longest)
        return self.lengths[place] if place < len(self.lengths) else 1 << (longest - 1).bit_length()

    def _rows(self, length: int, *, most: int) -> int:
        """Return the rows of a batch of this length: a full batch, or fewer if a step needs fewer; at least one
        tree."""
        needed = round_up(self.per_step * self.responses, self.options.divisor)
        least = round_up(max(most, self.responses), self.options.divisor)
        return max(min(self.options.most_rows(length), needed), least)


def plan_sequence_layout(
    trees: Items[Tree],
    together: Sequence[np.ndarray],
    *,
    per_step: int,
    steps: int,
    config: ModuleConfig,
    mesh: Mesh,
    batch: Any,
) -> SequenceLayout:
    """Choose the padded lengths of a run: each saves more time on padding than its compilation costs.

    For the arguments see :func:`plan_layout`."""
    flops, limit, shards = (
        config.flops_per_token,
        config.max_position_embeddings,
        mesh_shape(mesh).batch_shards,
    )
    options = sequence_options(mesh, limit=limit, flops_per_token=flops)
    most = batch.tokens
    if most is None:
        usual = options.tokens // shards
        most = min(max(int(ACTIVATIONS / config.token_bytes), usual // 2), usual)
    options = replace(options, tokens=most * shards)
    _, known = first_steps(trees, together, per_step=per_step)
    counts = [len(tree.responses) for tree in known]
    longest = np.repeat([max(map(len, tree.responses)) + len(tree.prefix) for tree in known], counts)
    # A backward pass costs twice a forward pass; the cost is divided by the number of epochs.
    cost = options.program_cost / 3 * len(known) / (steps * per_step)
    lengths = choose_lengths(longest, replace(options, program_cost=cost))
    while len(lengths) > batch.max_buckets:
        cost = 2 * max(cost, float(longest.sum()) / MOST_SAVED)
        lengths = choose_lengths(longest, replace(options, program_cost=cost))
    return SequenceLayout(options, lengths, max(counts), per_step, flops, config.token_bytes)


class ModuleTrainer(RewardTrainer):
    """A user's module in training; for the arguments see :class:`RewardTrainer`."""

    start: ModuleStart

    def _plan(self, trees: Items[Tree], together: Sequence[np.ndarray], *, per_step: int, steps: int) -> None:
        sizes: dict[str, Any] = {"per_step": per_step, "steps": steps, "batch": self.settings.batch}
        self._layout = plan_sequence_layout(trees, together, config=self._config, mesh=self.mesh, **sizes)

    def _scoring_options(self) -> BatchOptions:
        limit, flops = self._config.max_position_embeddings, self._config.flops_per_token
        tokens = self.settings.batch.tokens
        given = None if tokens is None else tokens * mesh_shape(self.mesh).batch_shards
        return sequence_options(self.mesh, limit=limit, flops_per_token=flops, batch_tokens=given)

    def export(self, folder: Path) -> None:
        """Write the current trained parameters, each in the dtype of its variable, and the view of the data; a
        collective."""
        whole = self.trained()
        kinds = {name: leaf.dtype for name, leaf in self.start.abstract[TRAINED].items()}

        def write(partial: Path) -> None:
            from safetensors.flax import save_file

            partial.mkdir(parents=True)
            save_file(
                {name: jnp.asarray(leaf, kinds[name]) for name, leaf in whole.items()}, partial / PARAMETERS
            )
            self.view.save(partial)

        on_first_process(lambda: write_whole(folder, write))

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole module."""
        state = nnx.filter_state(self.start.module.state, nnx.Param)
        return sum(int(leaf.size) for leaf in jax.tree.leaves(state))

    @property
    def _config(self) -> ModuleConfig:
        return cast(Any, self.start.config)
