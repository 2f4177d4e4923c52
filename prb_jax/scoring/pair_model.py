"""A reward model whose body is an encoder: prompt and response are scored as a pair of texts."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.encoder_map import load_encoder_params
from prb_jax.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.models.config.shared import choose_dtype
from prb_jax.readouts.labels import choose_readout
from prb_jax.readouts.pairs import make_pair_score_fn, open_pair_model
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import make_mesh
from prb_jax.text.pair_tokenizer import load_pair_tokenizer
from prb_jax.text.view import read_trained_view


def load_pair_model(
    folder: ModelFolder,
    *,
    mesh: str | Mesh | None,
    dtype: str | None,
    readout: str | None,
    tokenizer: str | Path | None,
) -> RewardModel:
    """The reward model in a folder of an encoder.

    Args:
      folder: with ``config.json``, weights and tokenizer files.
      mesh, dtype, readout, tokenizer: as of :func:`prb_jax.load`.

    Raises:
      CheckpointError, MeshError: as of :func:`prb_jax.load`.
    """
    found, row, asked = open_pair_model(folder.path, readout=readout)
    config = found.config
    chosen_dtype = choose_dtype(dtype, config.torch_dtype, where=folder.name)
    rule = choose_readout(asked, num_labels=config.num_labels, where=folder.name)
    source = describe(folder)
    if tokenizer is not None:
        source["tokenizer"] = describe(locate(tokenizer))
    devices = mesh if isinstance(mesh, Mesh) else make_mesh(mesh)
    kind = jnp.dtype(chosen_dtype)
    loaded = load_encoder_params(found, mesh=devices, dtype=kind, head_dtype=jnp.float32)
    return RewardModel(
        name=folder.name,
        config=config,
        params=loaded.params,
        score_fn=make_pair_score_fn(config, mesh=devices, dtype=kind, readout=rule),
        tokenizer=load_pair_tokenizer(folder.path if tokenizer is None else locate(tokenizer).path),
        mesh=devices,
        dtype=chosen_dtype,
        readout=row.name if rule == "logit" else rule,
        report=loaded.report,
        source=source,
        trained=read_trained_view(folder.path),
    )
