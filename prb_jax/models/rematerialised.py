"""Layers that keep less for their backward pass, and weights that are gathered for one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import quote
from prb_jax.models.attention.streams import ATTENTION_RESULTS
from prb_jax.models.layers import PROJECTED, from_bits, in_bits
from prb_jax.models.parameter import Axes, Declaring
from prb_jax.platform.sharding import partition_spec

GATHERED = "gathered_weights"
"""Name of the gathered weights of a layer: a backward pass gathers them again instead of keeping them."""


def rematerialised(body: Callable[..., Any], policy: str, *, rows: bool) -> Callable[..., Any]:
    """Return an equivalent layer body that keeps less for its backward pass.

    Args:
        body: Body of the scan over layers.
        policy: ``none`` keeps everything that derivatives need; ``dots`` keeps the results of projections and of
          attention; ``full`` keeps only the layer's input. None of them keeps gathered weights.
        rows: If True, keep no row of a stack that a layer reads itself; and keep bfloat16 as integers: see
          :func:`prb_jax.models.layers.in_bits`.

    Raises:
        ValueError: The policy is unknown.
    """
    policies = jax.checkpoint_policies
    kept = {
        "none": policies.save_anything_except_these_names(GATHERED),
        "dots": policies.save_only_these_names(PROJECTED, *ATTENTION_RESULTS),
        "full": policies.nothing_saveable,
    }
    if policy not in kept:
        raise ValueError(f"remat: expected one of {', '.join(kept)}, found {quote(policy)}")
    if not rows:
        return jax.checkpoint(body, prevent_cse=False, policy=kept[policy])

    def keeps(primitive: Any, *of: Any, **options: Any) -> bool:
        reads = primitive.name in ("custom_jvp_call", "dynamic_slice", "squeeze")  # a row of a stack
        return not reads and kept[policy](primitive, *of, **options)

    return _keeping_bits(jax.checkpoint(body, prevent_cse=False, policy=keeps))


def frozen(layers: Declaring, dtype: jnp.dtype) -> Any:
    """Return a filter of flax for the weights of layers that are certainly frozen; False if none are.

    Trained weights of layers are float32, and all of them are adapters where there are any.
    """
    if layers.projection == "adapted":
        return lambda path, variable: not isinstance(variable, nnx.LoRAParam)
    return (lambda path, variable: variable.dtype == dtype) if dtype == jnp.bfloat16 else False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Bits:
    """What is kept of an array of bfloat16."""

    bits: jax.Array

    @staticmethod
    def read(node: Any) -> Any:
        return from_bits(node.bits, jnp.bfloat16) if isinstance(node, _Bits) else node


def _keeping_bits(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a scan with a backward pass for which integers are kept in place of bfloat16."""

    def run(x: jax.Array, inputs: Any) -> Any:
        given, structure = jax.tree.flatten((x, inputs))

        def of_leaves(*leaves: Any) -> Any:
            return body(*jax.tree.unflatten(structure, leaves))

        def forward(*leaves: Any) -> tuple[Any, Any]:
            def of_moved(moved: dict[int, jax.Array]) -> Any:
                return of_leaves(*(moved.get(place, leaf.value) for place, leaf in enumerate(leaves)))

            moved = {place: leaf.value for place, leaf in enumerate(leaves) if leaf.perturbed}
            # What a scan does not change is kept once, if it remains the same array.
            stacks = {id(leaf.value) for leaf in leaves if not leaf.perturbed}

            def kept(leaf: jax.Array) -> Any:
                narrow = leaf.dtype == jnp.bfloat16 and id(leaf) not in stacks
                return _Bits(in_bits(leaf)) if narrow else leaf

            out, pull = jax.vjp(of_moved, moved)
            return out, jax.tree.map(kept, pull)

        def backward(pull: Any, cotangents: Any) -> tuple[Any, ...]:
            pull = jax.tree.map(_Bits.read, pull, is_leaf=lambda node: isinstance(node, _Bits))
            (towards,) = pull(jax.tree.map(_without_symbol, cotangents, is_leaf=_is_symbol))
            return tuple(towards.get(place) for place in range(len(given)))

        layer = jax.custom_vjp(of_leaves)
        layer.defvjp(forward, backward, symbolic_zeros=True)
        return layer(*given)

    return run


def _is_symbol(node: Any) -> bool:
    return isinstance(node, SymbolicZero)


def _without_symbol(cotangent: Any) -> Any:
    return np.zeros(cotangent.shape, cotangent.dtype) if _is_symbol(cotangent) else cotangent


def gatherer(mesh: Mesh) -> Callable[[nnx.State], nnx.State]:
    """Return a function that gathers the ``model`` axis of one layer's weights on every device.

    Otherwise the compiler may split a product, which moves the same bytes in many small steps and keeps more of them.
    Gradients are reduced and scattered: each device keeps the sum of its part.
    """

    def gathered(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
        axes: Axes = variable.get_metadata("axes")
        if "model" not in axes:
            return variable
        kept = [None if axis == "model" else axis for axis in axes]
        split, together = (NamedSharding(mesh, partition_spec(of)) for of in (axes, kept))
        return variable.replace(checkpoint_name(_resharded(split, together, variable[...]), GATHERED))

    return lambda state: jax.tree.map(gathered, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _resharded(split: NamedSharding, together: NamedSharding, weight: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, together)


_resharded.defvjp(
    lambda split, together, weight: (_resharded(split, together, weight), None),
    lambda split, together, kept, gradient: (jax.lax.with_sharding_constraint(gradient, split),),
)
