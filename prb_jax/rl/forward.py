"""What policy and value function say of every token of the responses of a batch of trees.

The state before a token is that of the token in front of it: before the first one it is the last token of the prompt,
which all responses of a tree share. So there are R + 1 states for R tokens, and the last one has seen all of them.

Letters: B trees, K responses, R response tokens, V vocabulary, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.models.attention.choice import Attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_tree
from prb_jax.models.decoder_layer import last_norm
from prb_jax.models.head import LanguageHead, dense
from prb_jax.models.states import states_before_tokens
from prb_jax.sharding import constrainer
from prb_jax.trees.batches import TreeBatch

LOGITS_AT_ONCE = 1 << 24
"""About so many logits are in memory at a time: the tokens of a response are taken in runs."""


@dataclass(frozen=True, kw_only=True)
class Actor:
    """All that is static of a policy in training.

    Attributes:
      config: architecture, with a :class:`prb_jax.models.head.LanguageHead`.
      mesh: devices.
      dtype: of activations.
      temperature: at which tokens are drawn.
      attention: an implementation; None for the machine's own.
      lora_scale: of adapters, where parameters have any.
      remat: of the decoder's layers.
    """

    config: DecoderConfig
    mesh: Mesh
    dtype: jnp.dtype
    temperature: float = 1.0
    attention: Attention | None = None
    lora_scale: float = 1.0
    remat: str = "none"


def token_states(actor: Actor, params: Params, batch: TreeBatch) -> jax.Array:
    """Return the normed states before each token and after the last one: float32 [B, K, R + 1, D]."""
    x = decode_tree(
        params,
        batch,
        config=actor.config,
        dtype=actor.dtype,
        attention=actor.attention,
        mesh=actor.mesh,
        lora_scale=actor.lora_scale,
        remat=actor.remat,
    )
    return last_norm(params, states_before_tokens(x, batch), actor.config)


def token_logprobs(
    actor: Actor, params: Params, states: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each token, and the entropy of the distribution that it was drawn from.

    Both are float32 [B, K, R] and at the temperature of the actor. The logits of a run of tokens are computed, used and
    let go, in the backward pass once more.

    Args:
      actor: of the policy.
      params: its parameters.
      states: float32 [B, K, R, D], before each token.
      tokens: int32 [B, K, R].
    """
    head = actor.config.head
    assert isinstance(head, LanguageHead)
    rows, responses, length, _ = states.shape
    run = max(1, min(length, LOGITS_AT_ONCE // (rows * responses * actor.config.vocab_size)))
    runs = -(-length // run)
    constrain = constrainer(actor.mesh)

    def divided(x: jax.Array) -> jax.Array:
        missing = [(0, 0)] * x.ndim
        missing[2] = (0, runs * run - length)
        x = jnp.pad(x, missing).reshape(rows, responses, runs, run, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    @jax.checkpoint
    def one(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, drawn = part
        logits = head.logits(params, x) / actor.temperature
        logits = constrain(logits, ("batch", None, None, "vocab"))
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
        return jnp.take_along_axis(logprobs, drawn[..., None], axis=-1)[..., 0], entropy

    found, entropies = lax.map(one, (divided(states), divided(tokens)))

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(rows, responses, runs * run)[:, :, :length]

    return joined(found), joined(entropies)


def token_values(params: Params, states: jax.Array) -> jax.Array:
    """Return what the value head says of states [..., D]: float32 [...]."""
    return dense(states, params["score"])[..., 0]
