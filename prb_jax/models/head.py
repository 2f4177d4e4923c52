"""Heads of models: their inputs, their common interface, and the heads of transformers.

A head names its tensors and computes float32 values [B, K, n] from `States`, the hidden states of a forward pass.
Heads of other open reward models are in :mod:`prb_jax.models.readouts.heads` and :mod:`prb_jax.models.readouts.gated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from prb_jax.errors import CheckpointError
from prb_jax.models.layers import product, soft_capped
from prb_jax.trees.streams import StreamBatch

EMBEDDING_KEY = "model.embed_tokens.weight"
HEAD_KEY = "score.weight"
OUTPUT_EMBEDDING_KEY = "lm_head.weight"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class States:
    """Hidden states of S streams of N tokens, M of which are read."""

    hidden: jax.Array
    """States before the last norm, in the activations' dtype: [S, N, D], or [S, M, D] if `at_reads`."""
    batch: StreamBatch | None
    """Batch of the streams; None only with `at_reads`, for the sequences of an encoder."""
    norm: Callable[[jax.Array], jax.Array]
    """Last norm of the model, on float32 states."""
    at_reads: bool = False
    """If True, the states are only those at the read places, and only :meth:`read` is available."""

    def read(self) -> jax.Array:
        """Return the state at each read place, float32 [S, M, D]."""
        return self.at(None if self.at_reads else jnp.asarray(self.whole.reads))

    @property
    def whole(self) -> StreamBatch:
        """Return the batch of streams if the states of all tokens are available."""
        assert self.batch is not None
        return self.batch

    def at(self, places: jax.Array | None) -> jax.Array:
        """Return the normed states at these places, int32 [S, M]: float32 [S, M, D]; at all places if None."""
        states = self.hidden
        if places is not None:
            states = jnp.take_along_axis(states, places[:, :, None], axis=1)
        # float32 from here on, regardless of the activations' dtype: bfloat16 rewards would produce ties.
        return self.norm(states.astype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """One tensor of a head: its name and shape in the file, and whether we transpose it."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    name: str = ""  # name of the parameter; if empty, it is stored under ``head`` by its key
    axes: tuple[str | None, ...] | None = None  # logical axes of the parameter; None: replicated
    readout: bool = True  # float32, and trained with the head; an output embedding belongs to the body
    pieces: tuple[tuple[int, int], ...] | None = None
    """Rows (start, stop) of this tensor in a larger tensor of the file with `file_rows` rows."""
    file_rows: int | None = None


class Sizes(Protocol):
    """Sizes of a model that determine the tensors of its head."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_labels(self) -> int: ...


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


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return x float32 [..., I] times weight [I, O] plus bias [O], in full float32."""
    out = product(x, weight.astype(jnp.float32))
    return out if bias is None else out + bias.astype(jnp.float32)


class Head(Protocol):
    """Interface of heads. Heads are frozen and hashable because they are part of a model's configuration."""

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> Head:
        """Return the head with the sizes of a checkpoint.

        Args:
          stored: Shapes of the checkpoint's tensors by name.
          config: Raw ``config.json``.
          where, what: Names of the checkpoint and the read-out, for messages.

        Raises:
          CheckpointError: A tensor is missing or does not fit; the message names it and the remedy.
        """
        ...

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        """Return the tensors that the head reads, besides the input embedding."""
        ...

    @property
    def needs(self) -> tuple[int, ...]:
        """Return a run of ids that a conversation must contain; empty if every conversation can be read."""
        ...

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        """Return values float32 [B, K, n]; n is 1 except for a linear head with several labels.

        Args:
          params: Arrays of the model as a nested dict; :meth:`tensors` defines the paths of the head's arrays.
        """
        ...


class ReadsAnything:
    """A head that can read every conversation."""

    @property
    def needs(self) -> tuple[int, ...]:
        return ()

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        return ()


@dataclass(frozen=True)
class Linear(ReadsAnything):
    """W x + b at the read position: the head of ``*ForSequenceClassification``."""

    keys: tuple[str, ...] = (HEAD_KEY,)  # names of the matrix [n, D]; the first one in the checkpoint is used
    with_bias: bool = (
        False  # if True, a ``.bias`` of the matrix belongs to the head; otherwise it is an unexpected tensor
    )
    bias: bool = False  # the checkpoint has this bias

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
        bound = replace(self, keys=(key,))
        return replace(bound, bias=self.with_bias and bound.bias_key in stored)

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        labels = sizes.num_labels
        matrix = HeadTensor(key=self.key, shape=(labels, sizes.hidden_size), transposed=True, name="score")
        bias = HeadTensor(key=self.bias_key, shape=(labels,), name="score_bias")
        return (matrix, bias) if self.bias else (matrix,)

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        return dense(states.read(), params["score"], params["score_bias"] if self.bias else None)


LINEAR = Linear()  # head of a ``*ForSequenceClassification`` of transformers


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
