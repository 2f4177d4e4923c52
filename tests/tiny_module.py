"""A reward model of ten lines that a user might write, which reads plain sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.training.tiny import CONFIG

VOCABULARY: int = CONFIG["vocab_size"]


class Tiny(nnx.Module):
    """The mean of the embeddings of a sequence, through a layer with a norm and dropout."""

    def __init__(self, width: int = 16, *, vocabulary: int = VOCABULARY, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.hidden = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        mean = jnp.where(inside[..., None], self.embed(tokens), 0.0).sum(1) / lengths[:, None]
        return self.head(self.norm(nnx.gelu(self.dropout(self.hidden(mean)))))[:, 0]


def tiny_module(seed: int = 0, **options: Any) -> Any:
    return Tiny(rngs=nnx.Rngs(seed), **options)


def by_hand(module: nnx.Module, sequences: list[Any]) -> jax.Array:
    """The rewards of whole sequences, each alone, by a call of the module in evaluation mode."""
    own: Any = nnx.merge(*nnx.split(module))
    own.eval()
    rows = [own.score_tokens(jnp.asarray([ids]), jnp.asarray([len(ids)])) for ids in sequences]
    return jnp.concatenate(rows)
