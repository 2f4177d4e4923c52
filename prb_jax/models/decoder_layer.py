"""One layer of the decoder as a pure function, and what stands around it in every program that runs layers.

Letters as in :mod:`prb_jax.models.decoder`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import quote
from prb_jax.models import REMAT_POLICIES
from prb_jax.models.attention.choice import Attention
from prb_jax.models.attention.reads import take_places
from prb_jax.models.attention.walk import ATTENTION_RESULTS
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.layers import gated, rms_norm, rotate
from prb_jax.models.lora import PROJECTED, adapted_project
from prb_jax.sharding import RULES, Constrain, parameter_axes, partition_spec

Params = dict[str, Any]

GATHERED = "gathered_weights"
"""The name of weights brought together for one layer: a backward pass gathers them again, and never keeps them."""


def embedded(params: Params, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the embedding for tokens int32 [B, T], before Gemma's factor: [B, T, D] in ``dtype``."""
    return jnp.take(params["embed"], tokens, axis=0).astype(dtype)


def scaled_embedding(x: jax.Array, config: DecoderConfig) -> jax.Array:
    """x times the factor that Gemma's embeddings have; x itself in other families."""
    if config.embedding_scale is None:
        return x
    # The factor is rounded to the activations' dtype, as Gemma was trained.
    return x * jnp.asarray(config.embedding_scale, x.dtype)


def _norm(config: DecoderConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    kind = {"plus_one": config.norm_plus_one, "scale_after_cast": config.norm_scale_after_cast}
    return functools.partial(rms_norm, eps=config.rms_norm_eps, **kind)


def last_norm(params: Params, states: jax.Array, config: DecoderConfig) -> jax.Array:
    """Return the states [..., D] after the model's last norm, float32."""
    return _norm(config)(states.astype(jnp.float32), params["final_norm"])


def decoder_layer(
    x: jax.Array,
    w: Params,
    *,
    config: DecoderConfig,
    angles: tuple[jax.Array, jax.Array],
    attend: Attention,
    constrain: Constrain,
    lora_scale: float,
    places: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer: x [B, T, D], w its parameters without the layer axis; [B, K, D] where places [B, K] are given.

    Returns:
        The states, and the layer's keys and values [B, T, G, H].
    """
    norm = _norm(config)
    rows, tokens, _ = x.shape
    line = "tokens" if places is None else None
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    project = functools.partial(adapted_project, weights=w, scale=lora_scale)
    y = norm(x, w["input_norm"])
    k = project(y, name="k").reshape(rows, tokens, kv_heads, head_dim)
    v = project(y, name="v").reshape(rows, tokens, kv_heads, head_dim)
    query_angles = angles
    if places is not None:
        x, y = take_places(x, places), take_places(y, places)
        query_angles = tuple(take_places(angle, places) for angle in angles)
        tokens = places.shape[1]
    q = project(y, name="q").reshape(rows, tokens, heads, head_dim)
    if config.qk_norm:  # before rope
        q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
    q = rotate(q, *query_angles, scale=config.attention_scale)
    k = rotate(k, *angles)
    q, k, v = (constrain(z, ("batch", line, "heads", None)) for z in (q, k, v))
    y = attend(q, k, v, softcap=config.attn_logit_softcapping)
    y = project(y.reshape(rows, tokens, heads * head_dim), name="o")
    if config.post_norms:
        y = norm(y, w["post_attention_norm"])
    x = constrain(x + y, ("batch", line, None))

    y = norm(x, w["mlp_norm"])
    y = project(gated(project(y, name="gate"), project(y, name="up"), config.hidden_activation), name="down")
    if config.post_norms:
        y = norm(y, w["post_mlp_norm"])
    return constrain(x + y, ("batch", line, None)), (k, v)


def rematerialised(body: Callable[..., Any], policy: str, *, gathers: bool) -> Callable[..., Any]:
    """A layer's body that keeps less for its backward pass, and computes the same.

    Args:
        body: of the scan over layers.
        policy: ``none`` keeps all that derivatives need; ``dots`` the results of projections and of
            attention; ``full`` nothing but the layer's input.
        gathers: the body brings weights together that are split over devices; no policy keeps them whole.

    Raises:
        ValueError: an unknown policy.
    """
    policies = jax.checkpoint_policies
    kept = {
        "none": policies.save_anything_except_these_names(GATHERED),
        "dots": policies.save_only_these_names(PROJECTED, *ATTENTION_RESULTS),
        "full": None,
    }
    if policy not in kept:
        raise ValueError(f"remat: expected one of {', '.join(REMAT_POLICIES)}, found {quote(policy)}")
    if policy == "none" and not gathers:
        return body
    return jax.checkpoint(body, prevent_cse=False, policy=kept[policy])


def splits_weights(mesh: Mesh | None) -> bool:
    """Whether matrices are split over axes on which the trees, or their tokens, are."""
    return mesh is not None and math.prod(mesh.shape[name] for name in RULES["model"] or ()) > 1


def gatherer(mesh: Mesh | None) -> Callable[[Params], Params]:
    """A function of one layer's weights that brings their ``model`` axis together on every device.

    Left to itself the compiler may split a product instead, and then moves the same bytes in many small steps and keeps
    more of them. Gradients go the other way: each device keeps the sum of its own part. Without a mesh, or where
    nothing is split, it changes nothing.
    """
    if mesh is None or not splits_weights(mesh):
        return lambda weights: weights

    def gather(weights: Params) -> Params:
        whole = dict(weights)
        for name, weight in weights.items():
            axes = parameter_axes(f"layers/{name}")[1:]  # the first one is that of the layers
            if "model" in axes:
                kept = [None if axis == "model" else axis for axis in axes]
                split, together = (NamedSharding(mesh, partition_spec(of)) for of in (axes, kept))
                whole[name] = checkpoint_name(_resharded(split, together, weight), GATHERED)
        return whole

    return gather


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _resharded(split: NamedSharding, together: NamedSharding, weight: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(weight, together)


_resharded.defvjp(
    lambda split, together, weight: (_resharded(split, together, weight), None),
    lambda split, together, kept, gradient: (jax.lax.with_sharding_constraint(gradient, split),),
)
