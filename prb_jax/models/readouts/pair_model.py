"""Reward models that encode prompt and response as a pair: opening from a folder, and module."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.encoder_folder import EncoderFolder, match_encoder
from prb_jax.models.checkpoints.locate import ModelFolder
from prb_jax.models.checkpoints.weight_index import index_folder
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig, parse_encoder_config, refuse_for_encoder
from prb_jax.models.encoder import HeadedEncoder
from prb_jax.models.head import READOUTS
from prb_jax.models.parameter import arrays
from prb_jax.models.readouts.heads import Pooled
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.module import Program, check_length, of_whole_sequences
from prb_jax.models.readouts.row import ModelRow, known_rows
from prb_jax.models.readouts.score_pairs import pair_rewards
from prb_jax.platform.sharding import mesh_shape, on_any_mesh
from prb_jax.trees.sequences import SequenceBatch


def open_pair_model(folder: ModelFolder, options: LoadOptions) -> tuple[EncoderFolder, ModelRow, str | None]:
    """Open the reward model in a folder of an encoder: its tensors, its row of the table, and the requested rule.

    Args:
      folder: Folder with ``config.json`` and weights.
      options: Options of the user; the read-out is the name of the row, or a rule for several labels.

    Raises:
      CheckpointError: An option applies only to decoders, the encoder has no known head, ``readout`` is another one,
        the head is missing or does not fit, or :func:`prb_jax.models.checkpoints.encoder_folder.open_encoder` fails.
    """
    attention = None if options.attention == "auto" else options.attention
    refuse_for_encoder(
        folder.name, chat_template=options.chat_template, quantize=options.quantize, attention=attention
    )
    path, readout = folder.path, options.readout
    raw = read_raw_config(path)
    where, rule = path / "config.json", readout if readout in READOUTS else None
    config = parse_encoder_config(raw, where=str(where))
    pairs = {row.name: row for row in known_rows().values() if isinstance(row.head, Pooled)}
    if readout is not None and rule is None:
        row, asked = pairs.get(readout), f"readout {quote(readout)}"
    else:
        named = set(config.architectures)
        row = next((row for row in pairs.values() if named & set(row.classes)), None)
        asked = f"'{', '.join(config.architectures) or config.model_type}'"
    if row is None:
        raise CheckpointError(
            f"{where}: {asked} is not a reward model on an encoder; expected a row of the table for them "
            f"({', '.join(pairs)}). An encoder of single texts is for `prb rank-profiles`"
        )
    if config.type_vocab_size:
        raise CheckpointError(
            f"{where}: field 'type_vocab_size': expected 0, found {config.type_vocab_size}: "
            "token types of pairs are not supported"
        )
    index = index_folder(path)
    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    head = row.head.bound(shapes, raw, where=str(path), what=row.name)
    labels = head.labels if isinstance(head, Pooled) else 1
    if labels != config.num_labels:
        raise CheckpointError(
            f"{path}: tensor 'classifier.weight' has {labels} labels, but config.json says {config.num_labels}: set "
            f'"num_labels": {labels} there if the head is right'
        )
    return match_encoder(index, replace(config, head=head)), row, rule


class PairRewardModule(HeadedEncoder):
    """A reward model that consists of an encoder and a head.

    Args:
      config: Architecture and head.
      program: Static settings.
      rngs: Generators for random weights.
      dtype: Dtype of the parameters.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        program: Program,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ) -> None:
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.program = program

    def __call__(self, batch: SequenceBatch) -> jax.Array:
        """Return the rewards float32 [B, K] of a batch from `RewardModel.batch`."""
        program = self.program
        run = functools.partial(
            pair_rewards, config=self.config, mesh=program.mesh, dtype=program.dtype, readout=program.readout
        )
        return on_any_mesh(run, program.mesh)(arrays(self), batch)

    def score_tokens(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Return the rewards float32 [B] of pairs of prompt and response; see `RewardModule.score_tokens`."""
        tokens, lengths = jnp.asarray(tokens), jnp.asarray(lengths)
        check_length(self.config, tokens.shape[1])
        more = -len(lengths) % mesh_shape(self.program.mesh).batch_shards
        padded = SequenceBatch(jnp.pad(tokens, ((0, more), (0, 0))), jnp.pad(lengths, (0, more)))
        return of_whole_sequences(self(padded)[: len(lengths)], tokens, lengths)
