"""Modules of configurations: abstract, with random values, or with given arrays.

All code that needs the parameters of a model reads them from the abstract module, which allocates no memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Decoder, Params
from prb_jax.models.head import Head, Sizes
from prb_jax.models.parameter import Axes, Declaring, HeadTensors, Path, arrays, of_head, parameters
from prb_jax.platform.sharding import sharding_of
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.config.encoder import EncoderConfig
    from prb_jax.models.encoder import HeadedEncoder

    Config = DecoderConfig | EncoderConfig


class HeadedDecoder(Decoder):
    """A decoder with the tensors of its head; for arguments see :class:`Decoder`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        super().__init__(config, rngs=rngs, dtype=dtype)
        add_head(self, config.head, config, rngs=rngs, dtype=dtype)


def add_head(model: Declaring, head: Head, sizes: Sizes, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
    """Declare the tensors of a head as the last parameters of a model."""
    tensors = head.tensors(sizes)
    for tensor in tensors:
        if tensor.name:
            setattr(model, tensor.name, of_head(tensor, rngs=rngs, dtype=dtype))
    if unnamed := tuple(tensor for tensor in tensors if not tensor.name):
        setattr(model, "head", HeadTensors(unnamed, rngs=rngs, dtype=dtype))  # noqa: B010 - of no base class
    model.close()


def _headed(config: Config) -> Any:
    """Return the class of a body with a head."""
    return HeadedDecoder if isinstance(config, DecoderConfig) else get("encoder", "module").value


def abstract_model(config: Config, *, layers: Sequence[str] = ()) -> HeadedDecoder | HeadedEncoder:
    """Return the module of a configuration with shapes instead of arrays. It is shared: do not modify it.

    Args:
      config: Architecture and head.
      layers: Names of the layers' arrays; names of adapters and scales determine the adapted and quantised matrices.
    """
    return abstract(_headed(config), config, frozenset(layers))


def bind(config: DecoderConfig, params: Mapping[str, Any]) -> Decoder:
    """Return the body of a decoder with these arrays, in any trace; further entries, such as a head, are ignored.

    Adapters and quantised matrices are recognised by the names of their arrays.
    """
    names = ("embed", "layers", "final_norm")
    graph = _graph(Decoder, config, frozenset(params["layers"]))
    return nnx.merge(graph, {name: params[name] for name in names})


@functools.cache
def _graph(kind: type[Any], config: Config, layers: frozenset[str]) -> Any:
    return nnx.graphdef(abstract(kind, config, layers))


@functools.cache
def abstract(kind: type[Any], config: Config, layers: frozenset[str]) -> Any:
    """Return a shared abstract module of a class; see :func:`abstract_model`."""

    def make() -> Declaring:
        model = kind(config, rngs=nnx.Rngs(0))
        add_beside(model.layers, layers)
        return model

    return nnx.eval_shape(make)


def add_beside(layers: Declaring, names: frozenset[str]) -> None:
    """Quantise and adapt matrices of stacked layers to match arrays with these names.

    Raises:
      CheckpointError: A name belongs to no matrix.
    """
    if names - vars(layers).keys():
        get("projections", "add").value(layers, names)


def init_params(config: Config, *, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random parameters of a model as a nested dict, for training from scratch and benchmarks."""
    return arrays(_headed(config)(config, rngs=nnx.Rngs(seed), dtype=dtype))


def parameter_shardings(params: Mapping[str, Any], mesh: Mesh, *, config: Config) -> dict[str, Any]:
    """Return the declared NamedSharding of every leaf in a nested dict of parameters.

    Args:
      params: Arrays or shapes of the whole model or a part.
      mesh: Devices.
      config: Configuration of the model.

    Raises:
      MeshError: A mesh axis does not divide the dimension that it splits.
    """
    axes = _axes(config, frozenset(params.get("layers", ())))

    def one(path: Any, leaf: Any) -> Any:
        place = tuple(step.key for step in path)
        return sharding_of(leaf.shape, axes[place], mesh, name="/".join(place))

    return jax.tree.map_with_path(one, dict(params))


@functools.cache
def _axes(config: Config, layers: frozenset[str]) -> Mapping[Path, Axes]:
    """Return the logical axes of every parameter; parameters of layers have a leading axis of layers."""
    flat = nnx.to_flat_state(nnx.state(abstract_model(config, layers=tuple(layers))))
    stacked = {path: ((None,) if path[0] == "layers" else ()) for path, _ in flat}
    return {tuple(map(str, path)): stacked[path] + variable.get_metadata("axes") for path, variable in flat}


def narrow_matrices(
    layers: Mapping[str, jax.Array], config: DecoderConfig, dtype: DTypeLike
) -> dict[str, jax.Array]:
    """Return the arrays of stacked layers, with the float32 matrices that a forward pass in ``dtype`` rounds anyway in
    this dtype. Others are used in float32: routers, taps of convolutions, biases of experts."""
    module = abstract_model(config, layers=tuple(layers)).layers

    def one(name: str, leaf: jax.Array) -> jax.Array:
        variable = getattr(module, name)
        rounds = isinstance(variable, nnx.LoRAParam) or variable.get_metadata("adaptable", False)
        return leaf.astype(dtype) if rounds and leaf.dtype == jnp.float32 else leaf

    return {name: one(name, leaf) for name, leaf in layers.items()}


def matrix_flops_per_token(config: DecoderConfig) -> float:
    """Return the FLOPs per token in matrices: twice the weights of all layers, counting only the experts of a token.
    The embedding and the score head are not counted."""
    return sum(matrix_flops(config))


def matrix_flops(config: DecoderConfig) -> list[float]:
    """Return the FLOPs per token in the matrices of each layer."""
    flops, experts = [0.0] * config.num_hidden_layers, config.experts
    for _, matrix in parameters(abstract_model(config).layers):
        axes, part = matrix.get_metadata("axes"), matrix.get_metadata("part")
        # Routers are matrices without adapters; the taps of convolutions count as recurrence.
        if not (matrix.get_metadata("adaptable") or (matrix.get_metadata("turned") and "model" in axes)):
            continue
        share = experts.chosen / experts.count if experts is not None and axes[0] == "experts" else 1.0
        for layer, kind in enumerate(config.kinds):
            if part is None or part in kind:
                flops[layer] += 2.0 * math.prod(matrix.shape[1:]) * share
    return flops
