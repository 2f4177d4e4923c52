"""The head of a model: what every head does, and the two that transformers has classes for.

A head names its tensors and computes float32 values [B, K, n] from `States`. The heads of other open
reward models are in :mod:`prb_jax.readouts.heads` and :mod:`prb_jax.readouts.gated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from prb_jax.errors import CheckpointError
from prb_jax.models.config.layout import EMBEDDING_KEY, HEAD_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.models.layers import matmul_precision
from prb_jax.models.states import States

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """One tensor of a head: its name, its shape in the file, and whether we keep it the other way round."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x float32 [..., I] times weight [I, O] plus bias [O], in full float32."""
    out = lax.dot_general(
        x,
        weight.astype(jnp.float32),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=matmul_precision(jnp.dtype(jnp.float32)),
        preferred_element_type=jnp.float32,
    )
    return out if bias is None else out + bias.astype(jnp.float32)


class Head(Protocol):
    """What every head does. Heads are frozen and hashable: they are part of a model's configuration."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Head:
        """The head as a checkpoint has it: sizes filled in.

        Args:
          stored: shapes of the checkpoint's tensors by name.
          config: the raw ``config.json``.
          where, what: the checkpoint and the read-out's name, for messages.

        Raises:
          CheckpointError: a tensor that is missing or does not fit; names it and the remedy.
        """
        ...

    def tensors(self) -> tuple[HeadTensor, ...]:
        """The tensors it reads, apart from those of the ``score`` leaf (:class:`Linear`, :class:`Vocabulary`)."""
        ...

    @property
    def needs(self) -> tuple[int, ...]:
        """A run of ids without which a conversation cannot be read; empty where every one can."""
        ...

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        """Values float32 [B, K, n]; n is 1 but for a linear head with several labels.

        Args:
          params: the model's parameters; ``score`` [D, n] and ``head`` (tensors by name) are the heads'.
        """
        ...


class ReadsAnything:
    @property
    def needs(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Linear(ReadsAnything):
    """W x + b at the read position: the head of ``*ForSequenceClassification``.

    Attributes:
      keys: names of the matrix [n, D]; the first one that the checkpoint has is it.
      with_bias: a ``.bias`` beside the matrix is part of the head (else it is a tensor without a place).
      bias: the checkpoint has that bias.
    """

    keys: tuple[str, ...] = (HEAD_KEY,)
    with_bias: bool = False
    bias: bool = False

    @property
    def key(self) -> str:
        return self.keys[0]

    @property
    def bias_key(self) -> str:
        return self.key.removesuffix("weight") + "bias"

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Linear:
        key = next((key for key in self.keys if key in stored), None)
        if key is None:
            raise CheckpointError(
                f"{where}: the score head '{self.key}' of the read-out '{what}' is missing and would have to be "
                "made up at random: get the whole checkpoint, side files too, or name another read-out with "
                "--readout"
            )
        found = replace(self, keys=(key,))
        return replace(found, bias=self.with_bias and found.bias_key in stored)

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return dense(states.read(), params["score"], params["score_bias"] if self.bias else None)


LINEAR = Linear()
"""The head of a ``*ForSequenceClassification`` of transformers."""


@dataclass(frozen=True)
class Vocabulary(ReadsAnything):
    """Logits of the language model's vocabulary at the read position.

    Attributes:
      tokens: one id, whose logit is the value; or two, and the value is the softmax probability of the first
        (A against B, yes against no); or several with numbers.
      numbers: of the tokens; the value is the expected number, under the softmax over these tokens alone.
      key: the matrix they are rows of: the output embedding, or the input embedding that it is tied to.
      softcap: c in c tanh(logits / c), as some language models have it; None for no cap.
      with_mass: a second value beside the first: the probability of all these tokens together, in the softmax over
        the whole vocabulary.
    """

    tokens: tuple[int, ...]
    numbers: tuple[float, ...] = ()
    key: str = OUTPUT_EMBEDDING_KEY
    softcap: float | None = None
    with_mass: bool = False

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

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        normed = states.read()
        logits = dense(normed, params["score"])
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
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
        return jnp.concatenate(
            [value, jnp.exp(named - jax.nn.logsumexp(every, axis=-1, keepdims=True))], axis=-1
        )


@dataclass(frozen=True)
class LanguageHead(ReadsAnything):
    """The logits of the whole vocabulary at the read position: the head of a ``*ForCausalLM``.

    Attributes:
      tied: they are products with the input embedding; there is no ``lm_head`` then.
      softcap: c in c tanh(logits / c), as some language models have it; None for no cap.
    """

    tied: bool = False
    softcap: float | None = None

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> LanguageHead:
        tied = OUTPUT_EMBEDDING_KEY not in stored
        if tied and not config.get("tie_word_embeddings"):
            raise CheckpointError(
                f"{where}: '{OUTPUT_EMBEDDING_KEY}' of the read-out '{what}' is missing: get the whole causal "
                "language model"
            )
        return LanguageHead(tied, config.get("final_logit_softcapping"))

    def tensors(self) -> tuple[HeadTensor, ...]:
        return ()

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return self.logits(params, states.read())

    def logits(self, params: Mapping[str, Any], states: jax.Array) -> jax.Array:
        """Return the logits float32 [..., V] after normed states float32 [..., D], in full float32."""
        return self._capped(dense(states, params["embed"].T if self.tied else params["lm_head"]))

    def next_token(self, params: Mapping[str, Any], states: jax.Array) -> jax.Array:
        """The logits float32 [..., V] after normed states [..., D]; factors in the dtype of the states.

        The sampler's way: a matrix in bfloat16 is not made wide once a token.
        """
        matrix, over = (params["embed"], 1) if self.tied else (params["lm_head"], 0)
        logits = lax.dot_general(
            states,
            matrix.astype(states.dtype),
            (((states.ndim - 1,), (over,)), ((), ())),
            precision=matmul_precision(states.dtype),
            preferred_element_type=jnp.float32,
        )
        return self._capped(logits)

    def _capped(self, logits: jax.Array) -> jax.Array:
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


def is_one_row(head: Head) -> bool:
    """Whether a head is a product with one matrix at the last token, as that of a ``*ForSequenceClassification``."""
    one_token = isinstance(head, Vocabulary) and len(head.tokens) == 1 and head.softcap is None
    return isinstance(head, Linear) or one_token
