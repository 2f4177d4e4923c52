"""Heads of language models: logits of the vocabulary, some of them or all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError
from prb_jax.models.head import (
    EMBEDDING_KEY,
    OUTPUT_EMBEDDING_KEY,
    Head,
    HeadTensor,
    Linear,
    ReadsAnything,
    Shapes,
    Sizes,
    States,
    dense,
)
from prb_jax.models.layers import product, soft_capped


def output_embedding(sizes: Sizes) -> HeadTensor:
    """Return the output embedding of a language model, not tied to its input embedding."""
    return HeadTensor(
        key=OUTPUT_EMBEDDING_KEY,
        shape=(sizes.vocab_size, sizes.hidden_size),
        transposed=True,
        name="lm_head",
        axes=("model", "vocab"),
        readout=False,
    )


@dataclass(frozen=True)
class Vocabulary(ReadsAnything):
    """Vocabulary logits of a language model at the read position."""

    tokens: tuple[int, ...]
    """Token ids. The value is the logit of one id; or, of two ids, the softmax probability of the first (A against B,
    yes against no); or an expected number of several ids with `numbers`."""
    numbers: tuple[float, ...] = ()
    """Numbers of the tokens; the value is the expected number under the softmax over only these tokens."""
    key: str = OUTPUT_EMBEDDING_KEY
    """Matrix with the tokens' rows: the output embedding, or the input embedding that it is tied to."""
    softcap: float | None = None
    """c in c tanh(logits / c), used in some language models; None for no cap."""
    with_mass: bool = False
    """Add a second value: the total probability of these tokens in the softmax over the whole vocabulary."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Vocabulary:
        key = OUTPUT_EMBEDDING_KEY
        if key not in stored:
            if not config.get("tie_word_embeddings"):
                raise CheckpointError(
                    f"{where}: the read-out '{what}' reads rows of '{key}', which is missing: get the whole "
                    "causal language model"
                )
            key = EMBEDDING_KEY
        rows = stored.get(key, (0,))[0]
        if not all(0 <= token < rows for token in self.tokens):
            raise CheckpointError(
                f"{where}: the read-out '{what}' reads rows {list(self.tokens)}, but '{key}' has {rows}"
            )
        return replace(self, key=key, softcap=config.get("final_logit_softcapping"))

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        score = HeadTensor(
            key=self.key,
            shape=(len(self.tokens), sizes.hidden_size),
            transposed=True,
            name="score",
            pieces=tuple((token, token + 1) for token in self.tokens),
            file_rows=sizes.vocab_size,
        )
        whole = self.with_mass and self.key == OUTPUT_EMBEDDING_KEY
        return (output_embedding(sizes), score) if whole else (score,)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        normed = states.read()
        logits = soft_capped(dense(normed, params["score"]), self.softcap)
        if self.numbers:
            expected = jax.nn.softmax(logits, axis=-1) * jnp.asarray(self.numbers, jnp.float32)
            value = expected.sum(axis=-1, keepdims=True)
        else:
            value = logits if len(self.tokens) == 1 else jax.nn.softmax(logits, axis=-1)[..., :1]
        if not self.with_mass:
            return value
        whole = LanguageHead(self.key == EMBEDDING_KEY, self.softcap)
        matrix = params["embed" if whole.tied else "lm_head"]
        every = whole.next_token(params, normed.astype(matrix.dtype))
        named = jax.nn.logsumexp(every[..., jnp.asarray(self.tokens)], axis=-1, keepdims=True)
        mass = jnp.exp(named - jax.nn.logsumexp(every, axis=-1, keepdims=True))
        return jnp.concatenate([value, mass], axis=-1)


@dataclass(frozen=True)
class LanguageHead(ReadsAnything):
    """Logits of the whole vocabulary at the read position: the head of a ``*ForCausalLM``."""

    tied: bool = False  # the input embedding replaces ``lm_head``
    softcap: float | None = None  # c in c tanh(logits / c), used in some language models; None for no cap

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> LanguageHead:
        tied = OUTPUT_EMBEDDING_KEY not in stored
        if tied and not config.get("tie_word_embeddings"):
            raise CheckpointError(
                f"{where}: '{OUTPUT_EMBEDDING_KEY}' of the read-out '{what}' is missing: get the whole causal "
                "language model"
            )
        return LanguageHead(tied, config.get("final_logit_softcapping"))

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        return () if self.tied else (output_embedding(sizes),)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return self.logits(params, states.read())

    def logits(self, params: Mapping[str, Any], states: jax.Array) -> jax.Array:
        """Return the logits float32 [..., V] for normed states float32 [..., D], in full float32."""
        matrix = params["embed"].T if self.tied else params["lm_head"]
        return soft_capped(dense(states, matrix), self.softcap)

    def next_token(self, params: Mapping[str, Any], states: jax.Array) -> jax.Array:
        """Return the logits float32 [..., V] for normed states [..., D], with factors in the dtype of the states.

        Used by the sampler, to avoid converting a bfloat16 matrix to float32 for every token.
        """
        matrix, over = (params["embed"], 1) if self.tied else (params["lm_head"], 0)
        return soft_capped(product(states, matrix.astype(states.dtype), (-1, over)), self.softcap)


def is_one_row(head: Head) -> bool:
    """Return True if a head is a product with one matrix at the last token, as in ``*ForSequenceClassification``."""
    one_token = isinstance(head, Vocabulary) and len(head.tokens) == 1 and head.softcap is None
    return isinstance(head, Linear) or one_token
