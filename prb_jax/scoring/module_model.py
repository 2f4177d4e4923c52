"""Evaluate a user's own `flax.nnx.Module`, with a tokenizer, like any other model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.user_module import METHOD, make_module_fn, open_module
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.sequence_model import SequenceModel


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleModel(SequenceModel):
    """A user's module as a reward model. Build with :func:`load_module`; ``params`` is an `nnx.State`."""

    @property
    def attention(self) -> str:
        """Return a constant: the module itself computes attention."""
        return "the module's own"

    def explain_scores(self) -> str:
        """Return a sentence that names a variable with non-finite values, if there is one."""
        for path, variable in nnx.to_flat_state(cast(nnx.State, self.params)):
            value = variable.get_value()
            if jnp.issubdtype(value.dtype, jnp.inexact) and not bool(jnp.isfinite(value).all()):
                return f"the variable {'/'.join(map(str, path))} of the module has values that are not finite"
        return "all variables of the module are finite"


def load_module(module: Any, options: LoadOptions) -> ModuleModel:
    """Return a module as a scorer, with its state on the devices of the mesh.

    Arguments and errors are as in :func:`prb_jax.models.readouts.user_module.open_module`.
    """
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
