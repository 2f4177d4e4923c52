"""A user's own `flax.nnx.Module` with a tokenizer as a model that is evaluated like any other one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.user_module import METHOD, ModuleConfig, make_module_fn, open_module
from prb_jax.scoring.batching import BatchOptions
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.sequences import sequence_options


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleModel(RewardModel):
    """A reward model that scores plain sequences. Build with :func:`load_module`; ``params`` is an `nnx.State`."""

    @property
    def attention(self) -> str:
        """The module decides it."""
        return "the module's own"

    def batch_options(self, batch_tokens: int | None = None) -> BatchOptions:
        """Return how sequences are put into batches."""
        config = cast(ModuleConfig, self.reader.config)
        limit, flops = config.max_position_embeddings, config.flops_per_token
        return sequence_options(self.mesh, limit=limit, flops_per_token=flops, batch_tokens=batch_tokens)

    def explain_scores(self) -> str:
        """Return in words whether a parameter may be why the scores cannot be used."""
        for path, variable in nnx.to_flat_state(cast(nnx.State, self.params)):
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.inexact) and not bool(jnp.isfinite(value).all()):
                return f"the variable {'/'.join(map(str, path))} of the module has values that are not finite"
        return "all variables of the module are finite"


def load_module(module: Any, options: LoadOptions) -> ModuleModel:
    """Return a module as a scorer, its state on the devices of the mesh; arguments and errors as of
    :func:`prb_jax.models.readouts.user_module.open_module`."""
    opened = open_module(module, options)
    return ModuleModel(
        reader=Reader(name=opened.name, config=opened.config, tokenizer=opened.tokenizer),
        params=cast(dict, jax.device_put(opened.state, opened.shardings)),
        score_fn=make_module_fn(opened),
        mesh=opened.mesh,
        dtype=opened.dtype,
        readout=METHOD,
        source=opened.source,
    )
