"""The head of a model: what a head sees of a forward pass, what every head does, and those that transformers has.

A head names its tensors and computes float32 values [B, K, n] from `States`, the hidden states where it reads them. The
heads of other open reward models are in :mod:`prb_jax.models.readouts.heads` and :mod:`prb_jax.models.readouts.gated`.
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
    """The states of S streams of N tokens, M of which are read."""

    hidden: jax.Array
    """[S, N, D], before the last norm, in the activations' dtype; [S, M, D] where `at_reads`."""
    batch: StreamBatch | None
    """None, with `at_reads` only, for the sequences of an encoder."""
    norm: Callable[[jax.Array], jax.Array]
    """The model's last norm, of float32 states."""
    at_reads: bool = False
    """These are the states of the read places alone, and only :meth:`read` can be asked for."""

    def read(self) -> jax.Array:
        """float32 [S, M, D]: the state at each read place."""
        return self.at(None if self.at_reads else jnp.asarray(self.whole.reads))

    @property
    def whole(self) -> StreamBatch:
        """The streams, where all their states are there."""
        assert self.batch is not None
        return self.batch

    def at(self, places: jax.Array | None) -> jax.Array:
        """float32 [S, M, D]: the normed states at these places, int32 [S, M]; of all that there are if None."""
        states = self.hidden
        if places is not None:
            states = jnp.take_along_axis(states, places[:, :, None], axis=1)
        # From here on float32, whatever the rest runs in: bfloat16 rewards make ties.
        return self.norm(states.astype(jnp.float32))


@dataclass(frozen=True, kw_only=True)
class HeadTensor:
    """One tensor of a head: its name in the file, its shape there, and whether we keep it the other way round."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    name: str = ""  # of the parameter; if empty, it is held under ``head`` by its key
    axes: tuple[str | None, ...] | None = (
        None  # logical axes of the parameter; None: every device has it whole
    )
    readout: bool = True  # float32, and trained with the head; an output embedding belongs to the body
    pieces: tuple[tuple[int, int], ...] | None = None
    """Rows (start, stop) of a larger tensor of the file, with `file_rows` rows, that are this one."""
    file_rows: int | None = None


class Sizes(Protocol):
    """Sizes of a model on which the tensors of its head depend."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_labels(self) -> int: ...


def output_embedding(sizes: Sizes) -> HeadTensor:
    """Return the matrix of a language model that is not tied to its input embedding."""
    return HeadTensor(
        key=OUTPUT_EMBEDDING_KEY,
        shape=(sizes.vocab_size, sizes.hidden_size),
        transposed=True,
        name="lm_head",
        axes=("model", "vocab"),
        readout=False,
    )


def dense(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x float32 [..., I] times weight [I, O] plus bias [O], in full float32."""
    out = product(x, weight.astype(jnp.float32))
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

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        """The tensors it reads, besides the input embedding."""
        ...

    @property
    def needs(self) -> tuple[int, ...]:
        """A run of ids without which a conversation cannot be read; empty where every one can."""
        ...

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        """Values float32 [B, K, n]; n is 1 but for a linear head with several labels.

        Args:
          params: the arrays of the model as a nested dict; its own are where :meth:`tensors` says.
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

    keys: tuple[str, ...] = (HEAD_KEY,)  # names of the matrix [n, D]; the first that the checkpoint has is it
    with_bias: bool = (
        False  # a ``.bias`` beside the matrix is part of the head, else a tensor without a place
    )
    bias: bool = False  # the checkpoint has that bias

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


LINEAR = Linear()  # the head of a ``*ForSequenceClassification`` of transformers


@dataclass(frozen=True)
class Vocabulary(ReadsAnything):
    """Logits of the language model's vocabulary at the read position."""

    tokens: tuple[int, ...]
    """One id, whose logit is the value; or two, and the value is the softmax probability of the first (A against B,
    yes against no); or several with `numbers`."""
    numbers: tuple[float, ...] = ()
    """Of the tokens; the value is the expected number, under the softmax over these tokens alone."""
    key: str = OUTPUT_EMBEDDING_KEY
    """The matrix they are rows of: the output embedding, or the input embedding that it is tied to."""
    softcap: float | None = None
    """c in c tanh(logits / c), as some language models have it; None for no cap."""
    with_mass: bool = False
    """A second value beside the first: the probability of all these tokens together, in the softmax over the whole
    vocabulary."""

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
    """The logits of the whole vocabulary at the read position: the head of a ``*ForCausalLM``."""

    tied: bool = False  # they are products with the input embedding; there is no ``lm_head`` then
    softcap: float | None = None  # c in c tanh(logits / c), as some language models have it; None for no cap

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
        """Return the logits float32 [..., V] after normed states float32 [..., D], in full float32."""
        matrix = params["embed"].T if self.tied else params["lm_head"]
        return soft_capped(dense(states, matrix), self.softcap)

    def next_token(self, params: Mapping[str, Any], states: jax.Array) -> jax.Array:
        """The logits float32 [..., V] after normed states [..., D]; factors in the dtype of the states.

        The sampler's way: a matrix in bfloat16 is not made wide once a token.
        """
        matrix, over = (params["embed"], 1) if self.tied else (params["lm_head"], 0)
        return soft_capped(product(states, matrix.astype(states.dtype), (-1, over)), self.softcap)


def is_one_row(head: Head) -> bool:
    """Whether a head is a product with one matrix at the last token, as that of a ``*ForSequenceClassification``."""
    one_token = isinstance(head, Vocabulary) and len(head.tokens) == 1 and head.softcap is None
    return isinstance(head, Linear) or one_token
