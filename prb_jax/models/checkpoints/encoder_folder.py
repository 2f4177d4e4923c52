"""Checkpoint of an encoder: tensors from the headers of a folder, and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.checkpoints.fill import match_tensors
from prb_jax.models.checkpoints.load import (
    LoadedParams,
    LoadReport,
    abstract_params,
    inspect_checkpoint,
    load_params,
)
from prb_jax.models.checkpoints.weight_index import WeightIndex, index_folder
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig, parse_encoder_config
from prb_jax.models.model import parameter_shardings
from prb_jax.platform.sharding import check_heads

_WORDS = {"modernbert": "embeddings.tok_embeddings.weight"}
_PREFIXES = {"bert": ("", "bert."), "deberta-v2": ("", "deberta."), "modernbert": ("", "model.")}


@dataclass(frozen=True)
class EncoderFolder:
    """Checkpoint of an encoder, with tensors that match its configuration."""

    folder: Path
    config: EncoderConfig

    @property
    def report(self) -> LoadReport:
        """Return a report on the tensors to read, only from headers."""
        return inspect_checkpoint(self.folder, self.config)


def open_encoder(folder: str | Path) -> EncoderFolder:
    """Open the encoder in a folder, without a head; reads the headers of weight files but no weights.

    Raises:
      CheckpointError: ``config.json`` does not describe a known encoder, or a tensor is missing, unexpected, has
        another shape, or is not floating-point.
    """
    folder = Path(folder)
    config = parse_encoder_config(read_raw_config(folder), where=str(folder / "config.json"))
    return match_encoder(index_folder(folder), config)


def match_encoder(index: WeightIndex, config: EncoderConfig) -> EncoderFolder:
    """Pair the tensors of a folder with the leaves of a configuration; for errors see :func:`open_encoder`."""
    words = _WORDS.get(config.model_type, "embeddings.word_embeddings.weight")
    prefix = next((p for p in _PREFIXES[config.model_type] if p + words in index.tensors), "")
    # Names from TensorFlow in converted checkpoints.
    old = f"{prefix}embeddings.LayerNorm.gamma" in index.tensors
    config = replace(config, prefix=prefix, norm_names=("gamma", "beta") if old else ("weight", "bias"))
    match_tensors(index, config)
    return EncoderFolder(index.folder, config)


def load_encoder_params(
    opened: EncoderFolder, *, mesh: Mesh, dtype: DTypeLike = jnp.float32, head_dtype: DTypeLike | None = None
) -> LoadedParams:
    """Load the weights, sharded over ``mesh`` by :func:`encoder_shardings`; for errors see :func:`load_params`."""
    shardings = encoder_shardings(opened.config, mesh)
    return load_params(opened.folder, opened.config, dtype=dtype, shardings=shardings, head_dtype=head_dtype)


def encoder_shardings(config: EncoderConfig, mesh: Mesh) -> dict[str, Any]:
    """Return the declared NamedSharding of every parameter.

    Raises:
      MeshError: A mesh axis does not divide the dimension that it splits.
    """
    check_heads(mesh, heads={"num_attention_heads": config.num_attention_heads})
    return parameter_shardings(abstract_params(config), mesh, config=config)
