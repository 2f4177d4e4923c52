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

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.layers import product
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


READOUTS = ("logit", "first-logit", "last-softmax")


ALL_VALUES = "all-values"
"""Internal rule for callers that read every value of the head; not available to users."""


PAPER_READOUT = "last-softmax"
"""Rule of the paper protocol for a head with several labels, if none is named."""


def choose_readout(name: str | None, *, num_labels: int, where: str) -> str:
    """Return the rule that reduces ``num_labels`` logits to a reward.

    ``logit`` takes the only logit. A head with several logits requires a named rule: ``first-logit`` takes the first,
    as in RewardBench; ``last-softmax`` takes the last entry of the softmax, as in the scripts of Personalised
    RewardBench.

    Raises:
      CheckpointError: The rule is unknown, or no rule fits the head.
    """
    if name is not None and name not in READOUTS:
        raise CheckpointError(
            f"{where}: unknown readout {quote(name)}: expected one of {', '.join(READOUTS)}"
        )
    if num_labels == 1:
        if name not in (None, "logit"):
            raise CheckpointError(
                f"{where}: readout {quote(name)} needs several labels, the score head has one"
            )
        return "logit"
    if name in (None, "logit"):
        raise CheckpointError(
            f"{where}: the score head has {num_labels} labels, and none is named as the reward: "
            f"choose --readout first-logit or last-softmax (only protocol paper has a default, {PAPER_READOUT})"
        )
    return str(name)


def read_out(logits: jax.Array, readout: str) -> jax.Array:
    """Return rewards float32 [...] from logits float32 [..., num_labels]; with :data:`ALL_VALUES` all logits."""
    if readout == ALL_VALUES:
        return logits
    if readout == "last-softmax":
        return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)[..., -1]
    return logits[..., 0]
