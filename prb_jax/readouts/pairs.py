"""Scores of text pairs: every response is read together with its prompt, in both directions.

A tree's prefix cannot be computed once here, as its states depend on what follows. Each response's
sequence, prefix and response side by side, is one run of columns, so that batches are those of trees.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from prb_jax.checkpoints.encoder_map import EncoderFolder, match_encoder
from prb_jax.checkpoints.safetensors_reader import index_folder
from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig, parse_encoder_config
from prb_jax.models.encoder import Params, encode_tokens
from prb_jax.models.states import TreeStates
from prb_jax.readouts.heads import Pooled
from prb_jax.readouts.labels import READOUTS
from prb_jax.readouts.registry import REGISTRY, ROWS, ModelRow
from prb_jax.trees.batches import TreeBatch


def open_pair_model(
    folder: str | Path, *, readout: str | None = None
) -> tuple[EncoderFolder, ModelRow, str | None]:
    """The reward model in a folder of an encoder: its tensors, its row of the table, and the rule asked for.

    Args:
      folder: with ``config.json`` and weights.
      readout: the name of the row, or a rule for several labels.

    Raises:
      CheckpointError: an encoder without a known head, another ``readout``, a head that is missing or does
        not fit, or what :func:`prb_jax.checkpoints.encoder_map.open_encoder` refuses.
    """
    folder = Path(folder)
    raw = read_raw_config(folder)
    config = parse_encoder_config(raw, where=str(folder / "config.json"))
    rule = readout if readout in READOUTS else None
    row = _row(config, None if rule else readout, where=str(folder / "config.json"))
    if config.type_vocab_size:
        raise CheckpointError(
            f"{folder / 'config.json'}: field 'type_vocab_size': expected 0, found {config.type_vocab_size}: "
            "token types of pairs are not followed"
        )
    index = index_folder(folder)
    shapes = {name: tensor.shape for name, tensor in index.tensors.items()}
    head = row.head.bound(shapes, raw, where=str(folder), what=row.name)
    labels = head.labels if isinstance(head, Pooled) else 1
    if labels != config.num_labels:
        raise CheckpointError(
            f"{folder}: tensor 'classifier.weight' has {labels} labels, but config.json says {config.num_labels}: set "
            f'"num_labels": {labels} there if the head is right'
        )
    return match_encoder(index, replace(config, head=head)), row, rule


def score_pairs(
    params: Params,
    batch: TreeBatch,
    *,
    config: EncoderConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Logits float32 [B, K, n] of every response with its prompt.

    Args:
      params: nested dict, with the tensors of the head under ``head``.
      batch: B trees.
      config: architecture, with a head.
      dtype: of activations; head and logits are float32.
      mesh: how activations are split; None for one device.
    """
    assert config.head is not None
    prefix, prefix_lengths = jnp.asarray(batch.prefix), jnp.asarray(batch.prefix_lengths)
    starts = prefix.shape[1] - prefix_lengths

    def first_state(response: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, lengths = response
        states = encode_tokens(
            params,
            jnp.concatenate([prefix, tokens], axis=1),
            lengths=prefix_lengths + lengths,
            starts=starts,
            config=config,
            dtype=dtype,
            mesh=mesh,
        )
        return jnp.take_along_axis(states, starts[:, None, None], axis=1)[:, 0]

    # One response after the other: memory does not grow with their number.
    responses = (
        jnp.asarray(batch.responses).swapaxes(0, 1),
        jnp.asarray(batch.response_lengths).swapaxes(0, 1),
    )
    first = lax.map(first_state, responses).swapaxes(0, 1)
    return config.head(params, TreeStates(first, batch, lambda x: x, at_reads=True))


def _row(config: EncoderConfig, readout: str | None, *, where: str) -> ModelRow:
    fitting = [
        row
        for row in REGISTRY
        if isinstance(row.head, Pooled) and set(row.classes) & set(config.architectures)
    ]
    if readout is not None:
        fitting = [ROWS[readout]] if readout in ROWS and isinstance(ROWS[readout].head, Pooled) else []
    if not fitting:
        known = ", ".join(row.name for row in REGISTRY if isinstance(row.head, Pooled))
        named = (
            f"readout {quote(readout)}"
            if readout
            else f"'{', '.join(config.architectures) or config.model_type}'"
        )
        raise CheckpointError(
            f"{where}: {named} is not a reward model on an encoder; expected a row of the table for them ({known}). An "
            "encoder of single texts is for `prb rank-profiles`"
        )
    return fitting[0]
