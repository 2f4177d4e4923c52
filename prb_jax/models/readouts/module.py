"""A loaded reward model as a `flax.nnx` module, for batches and plain sequences."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.model import HeadedDecoder, add_beside
from prb_jax.models.parameter import arrays
from prb_jax.models.readouts.score_tree import stream_rewards
from prb_jax.platform.sharding import mesh_shape, on_any_mesh
from prb_jax.seams import get
from prb_jax.trees.streams import PackedStream, StreamBatch, StreamOptions, StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, Tree, round_up

if TYPE_CHECKING:
    from prb_jax.models.model import Config
    from prb_jax.models.readouts.pair_model import PairRewardModule


@dataclass(frozen=True, kw_only=True)
class Program:
    """Static settings of a reward model."""

    mesh: Mesh
    dtype: jnp.dtype  # dtype of activations
    readout: str | None  # reduction of the head's values to a reward; see :mod:`prb_jax.models.head`
    attention: StreamAttention | None = None  # over packed streams; None for an encoder


class RewardModule(HeadedDecoder):
    """A reward model: a decoder with its head. Build with :attr:`prb_jax.scoring.reward_model.RewardModel.module`.

    Args:
      config: Architecture and head.
      program: Static settings.
      layers: Names of the layers' arrays, including adapters and scales of quantised matrices.
      rngs: Generators for random weights.
      dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        program: Program,
        layers: frozenset[str] = frozenset(),
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.program = program
        add_beside(self.layers, layers)

    def __call__(
        self,
        inputs: StreamBatch | jax.Array,
        *,
        positions: jax.Array | None = None,
        cache: None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Return the rewards of a batch, or of tokens as trainers such as tunix call a reward model.

        Args:
          inputs: Batch from `RewardModel.batch`, or tokens int32 [B, T].
          positions: Ignored; positions follow from the padding.
          cache: Must be None.
          attention_mask: Mask of tokens, bool [B, T, T]; padding does not see itself.
          segment_ids: Segments of tokens with such a mask, int32 [B, T], 0 for padding.

        Returns:
          Rewards float32 [B, K]; for tokens [B, T, 1], the reward of the conversation up to each token.

        Raises:
          ValueError: Tokens come with a cache, or a row has several segments.
        """
        if isinstance(inputs, StreamBatch):
            return self._rewards(inputs)
        if cache is not None or (segment_ids is not None and attention_mask is None):
            raise ValueError(
                "a reward model reads whole rows of one conversation: expected no cache, no segments"
            )
        if self.config.head.needs:
            raise ValueError("this model's head needs the end of a conversation: use score_tokens")
        tokens = jnp.asarray(inputs)
        real = jnp.ones(tokens.shape, bool)
        if attention_mask is not None:
            real = jnp.diagonal(attention_mask.astype(bool), axis1=1, axis2=2)
        # Move padding to the right of each row, then move the rewards back to the tokens' positions.
        order = jnp.argsort(~real, axis=1, stable=True)
        batch = self._plain(jnp.take_along_axis(tokens, order, axis=1), every=True)
        rewards = self._rewards(batch)[: tokens.shape[0], : tokens.shape[1]]
        rewards = jnp.take_along_axis(rewards, jnp.argsort(order, axis=1), axis=1)
        return jnp.where(jnp.cumsum(real & (tokens < 0), axis=1) > 0, jnp.nan, rewards)[..., None]

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the rewards float32 [B] of plain sequences, each a complete conversation.

        Args:
          tokens: Tokens int32 [B, T], padded on the right; the reward of an unknown id, also below 0, is NaN.
          lengths: Number of tokens of each sequence, int32 [B], 1 to T; the reward for another length is NaN.

        Raises:
          ValueError: T exceeds the model's number of positions.
        """
        tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
        batch = self._plain(tokens, every=False)
        last = jnp.pad(lengths - 1, (0, batch.tokens.shape[0] - len(lengths)))[:, None]
        if (most := self.config.rope_switch) is not None:
            batch = replace(batch, long=jnp.broadcast_to(last >= most, batch.tokens.shape))
        rewards = self._rewards(replace(batch, reads=last, ends=last))[: len(lengths), 0]
        return of_whole_sequences(rewards, tokens, lengths)

    def _rewards(self, batch: StreamBatch) -> jax.Array:
        program = self.program
        run = functools.partial(
            stream_rewards,
            config=self.config,
            mesh=program.mesh,
            dtype=program.dtype,
            readout=program.readout,
        )
        return on_any_mesh(run, program.mesh)(arrays(self), batch)

    def _plain(self, tokens: jax.Array, *, every: bool) -> StreamBatch:
        """Return streams of one conversation each, as long as the stream; read `every` token, or only the first."""
        attention, (rows, length) = self.program.attention, tokens.shape
        check_length(self.config, length)
        if every and self.config.rope_switch is not None and length > self.config.rope_switch:
            raise ValueError(
                f"tokens: expected at most {self.config.rope_switch} a row, found {length}: longer conversations have "
                "other rotary angles, so their beginnings have other rewards"
            )
        assert attention is not None
        streams = round_up(rows, mesh_shape(self.program.mesh).batch_shards)
        options = StreamOptions(
            tokens=round_up(length, BLOCK),
            streams=streams,
            window=self.config.sliding_window,
            taps=self.config.taps,
        )
        options = attention.shaped(options)
        size = options.tokens
        row = np.zeros(size, np.int32)
        tree = Tree(row[:-1], (row[-1:],), (0,))
        shape = StreamShape(size, size if every else 1)
        packed = tuple(PackedStream(shape, (number,), (0,), size) for number in range(streams))
        batch = make_stream_batch([tree] * streams, packed, options)
        padded = jnp.pad(tokens, ((0, streams - rows), (0, size - length)))
        if not every:
            return replace(batch, tokens=padded)
        places = np.tile(np.arange(size, dtype=np.int32), (streams, 1))
        return replace(batch, tokens=padded, reads=places, ends=places)


def of_whole_sequences(rewards: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the rewards [B] of tokens [B, T]; NaN for a length not in 1 to T, or an id below 0, which `take` wraps."""
    known = jnp.all((tokens >= 0) | (jnp.arange(tokens.shape[1]) >= lengths[:, None]), axis=1)
    return jnp.where(known & (lengths >= 1) & (lengths <= tokens.shape[1]), rewards, jnp.nan)


def check_length(config: Config, length: int) -> None:
    """Raise ValueError if rows have more tokens than the model has positions."""
    if length > config.max_position_embeddings:
        raise ValueError(f"tokens: expected at most {config.max_position_embeddings} a row, found {length}")


def reward_module(
    config: Config, params: Mapping[str, Any], **settings: Any
) -> RewardModule | PairRewardModule:
    """Return a reward model as a module with these arrays; `settings` are fields of its `Program`."""
    program = Program(**settings)
    if isinstance(config, DecoderConfig):
        make: Any = functools.partial(RewardModule, config, layers=frozenset(params["layers"]))
    else:
        make = functools.partial(get("encoder", "rewards").value, config)
    abstract = nnx.eval_shape(lambda: make(program=program, rngs=nnx.Rngs(0)))
    return nnx.merge(nnx.graphdef(abstract), dict(params))
