"""A reward model that scores plain sequences instead of packed streams: an encoder of pairs, or a user's module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from prb_jax.models.checkpoints.encoder_folder import load_encoder_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.readouts.open_model import OpenedModel
from prb_jax.models.readouts.score_pairs import make_pair_fn
from prb_jax.scoring.batching import Batch
from prb_jax.scoring.reader import open_reader
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.sequences import SequenceOptions, batch_of_trees, sequence_options
from prb_jax.trees.tree import Tree


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceModel(RewardModel):
    """A reward model that scores plain sequences. Build with :func:`load_pair_model`."""

    __repr__ = RewardModel.__repr__

    @property
    def decoder(self) -> DecoderConfig:
        """Raise TypeError: only streams need the configuration of a decoder."""
        raise TypeError(f"{self.name}: expected a decoder, found the encoder {self.config.model_type}")

    @property
    def attention(self) -> str:
        """Return a constant: every token attends to all others."""
        return "whole, both ways"

    def batch(self, trees: Sequence[Tree]) -> Batch:
        """Return one batch with all sequences of the trees, for ``score_fn``; ValueError if `trees` is empty."""
        if not trees:
            raise ValueError("a batch needs at least one tree, found none")
        return self.place(batch_of_trees(trees, self.batch_options()))

    def batch_options(self, batch_tokens: int | None = None) -> SequenceOptions:
        """Return the options that shape batches."""
        config: Any = self.reader.config  # ModuleConfig for a module
        limit, flops = config.max_position_embeddings, config.flops_per_token
        return sequence_options(self.mesh, limit=limit, flops_per_token=flops, batch_tokens=batch_tokens)


def load_pair_model(opened: OpenedModel) -> SequenceModel:
    """Load an encoder of pairs; errors as in :func:`prb_jax.scoring.reward_model.load_reward_model`."""
    reader, _ = open_reader(opened)
    folder, mesh, dtype = opened.encoder, opened.mesh, jnp.dtype(opened.dtype)
    score_fn = make_pair_fn(folder.config, mesh=mesh, dtype=dtype, readout=opened.labels)
    loaded = load_encoder_params(folder, mesh=mesh, dtype=dtype, head_dtype=jnp.float32)
    return SequenceModel(
        reader=reader,
        params=loaded.params,
        score_fn=score_fn,
        mesh=mesh,
        dtype=opened.dtype,
        readout=opened.readout,
        labels=opened.labels,
        quantize=opened.options.quantize,
        report=loaded.report,
        source=opened.source,
    )
