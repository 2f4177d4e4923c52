"""The checkpoint of an encoder: its tensors, found in the headers of a folder, and its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.models.checkpoints.load import (
    LoadedParams,
    LoadReport,
    abstract_params,
    inspect_checkpoint,
    load_params,
)
from prb_jax.models.checkpoints.matching import match_tensors
from prb_jax.models.checkpoints.weight_index import WeightIndex, index_folder
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig, parse_encoder_config
from prb_jax.models.model import parameter_shardings
from prb_jax.platform.sharding import check_heads

_WORDS = "embeddings.word_embeddings.weight"
_PREFIXES = {"bert": ("", "bert."), "deberta-v2": ("", "deberta.")}


@dataclass(frozen=True)
class EncoderFolder:
    """The checkpoint of an encoder, whose tensors are those of its configuration."""

    folder: Path
    config: EncoderConfig

    @property
    def report(self) -> LoadReport:
        """What will be read, from the headers alone."""
        return inspect_checkpoint(self.folder, self.config)


def open_encoder(folder: str | Path) -> EncoderFolder:
    """The encoder in a folder, without a head; headers of weights are read, and no weights.

    Raises:
      CheckpointError: ``config.json`` is not one of an encoder known here, or a tensor is missing, has no
        place, has another shape, or is not floating-point.
    """
    folder = Path(folder)
    config = parse_encoder_config(read_raw_config(folder), where=str(folder / "config.json"))
    return match_encoder(index_folder(folder), config)


def match_encoder(index: WeightIndex, config: EncoderConfig) -> EncoderFolder:
    """Pair the tensors of a folder with the leaves of a configuration; errors as of :func:`open_encoder`."""
    prefix = next((p for p in _PREFIXES[config.model_type] if p + _WORDS in index.tensors), "")
    # TensorFlow's names, in files converted from its checkpoints.
    old = f"{prefix}embeddings.LayerNorm.gamma" in index.tensors
    config = replace(config, prefix=prefix, norm_names=("gamma", "beta") if old else ("weight", "bias"))
    match_tensors(index, config)
    return EncoderFolder(index.folder, config)


def load_encoder_params(
    opened: EncoderFolder, *, mesh: Mesh, dtype: DTypeLike = jnp.float32, head_dtype: DTypeLike | None = None
) -> LoadedParams:
    """The weights, split over ``mesh`` by :func:`encoder_shardings`; errors as of :func:`load_params`."""
    shardings = encoder_shardings(opened.config, mesh)
    return load_params(opened.folder, opened.config, dtype=dtype, shardings=shardings, head_dtype=head_dtype)


def encoder_shardings(config: EncoderConfig, mesh: Mesh) -> dict[str, Any]:
    """NamedSharding for every parameter, as they declare it.

    Raises:
      MeshError: a mesh axis does not divide what it splits.
    """
    check_heads(mesh, heads={"num_attention_heads": config.num_attention_heads})
    return parameter_shardings(abstract_params(config), mesh, config=config)
