"""Which tensor of a Hugging Face checkpoint fills which leaf of an encoder's parameters, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from prb_jax.checkpoints.hf_map import LeafMap
from prb_jax.checkpoints.load import LoadedParams, LoadReport, abstract_leaves, load_matched, report_match
from prb_jax.checkpoints.matching import Match, match_leaves
from prb_jax.checkpoints.safetensors_reader import WeightIndex, index_folder
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig, parse_encoder_config
from prb_jax.sharding import check_heads, parameter_shardings

_WORDS = "embeddings.word_embeddings.weight"
_PREFIXES = {"bert": ("", "bert."), "deberta-v2": ("", "deberta.")}

_LAYER = "encoder.layer.{layer}."
# Our leaf -> module inside a layer.
_BERT_MODULES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "post_attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "post_mlp_norm": "output.LayerNorm",
}
_MODULES: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT_MODULES,
    "deberta-v2": _BERT_MODULES
    | {
        "q": "attention.self.query_proj",
        "k": "attention.self.key_proj",
        "v": "attention.self.value_proj",
        "relative_k": "attention.self.pos_key_proj",
        "relative_q": "attention.self.pos_query_proj",
    },
}
# Tensors without a leaf, under the prefix or beside it, each with the reason.
_IGNORED = (
    (r"(.*\.)?position_ids", "counts the positions"),
    (r"(bert\.)?pooler\..*", "pooler, not used for embeddings"),
    (
        r"(cls|lm_predictions|mask_predictions|classifier)\..*",
        "head of another task, not used for embeddings",
    ),
)
_UNUSED_POSITIONS = "(deberta\\.)?embeddings\\.position_embeddings\\.weight"


@dataclass(frozen=True)
class EncoderFolder:
    """A checkpoint whose tensors are those of its configuration.

    Attributes:
      config: the encoder.
      index: of its weight files.
      match: how their tensors are used.
    """

    config: EncoderConfig
    index: WeightIndex
    match: Match

    @property
    def report(self) -> LoadReport:
        """What will be read, from the headers alone."""
        return report_match(self.index, self.match)


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
    match = match_leaves(
        index,
        encoder_leaves(config),
        model_type=config.model_type,
        ignored=lambda name: _ignored_reason(name, config),
    )
    return EncoderFolder(config, index, match)


def load_encoder_params(
    found: EncoderFolder,
    *,
    mesh: Mesh,
    dtype: DTypeLike = jnp.float32,
    head_dtype: DTypeLike | None = None,
) -> LoadedParams:
    """The weights, split over ``mesh`` by :data:`prb_jax.sharding.PARAMETER_AXES`.

    Raises:
      CheckpointError: a file that cannot be read.
      MeshError: a mesh axis does not divide what it splits.
    """
    shardings = encoder_shardings(found.config, mesh)
    return load_matched(found.index, found.match, dtype=dtype, shardings=shardings, head_dtype=head_dtype)


def encoder_shardings(config: EncoderConfig, mesh: Mesh) -> dict[str, Any]:
    """NamedSharding for every parameter.

    Raises:
      MeshError: a mesh axis does not divide what it splits.
    """
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_attention_heads)
    return parameter_shardings(abstract_leaves(encoder_leaves(config)), mesh)


def encoder_leaves(config: EncoderConfig) -> tuple[LeafMap, ...]:
    """Every leaf of the parameter tree that ``config`` describes, its head's too."""
    depth, width, size = config.num_hidden_layers, config.hidden_size, config.embedding_size
    modules, leaves = _MODULES[config.model_type], list[LeafMap]()
    weight, bias = config.norm_names

    def table(path: str, key: str, rows: int, columns: int) -> None:
        leaves.append(LeafMap(path=(path,), key=f"{config.prefix}{key}", shape=(rows, columns)))

    def norm(path: str, key: str) -> None:
        for suffix, name in (("", weight), ("_bias", bias)):
            leaves.append(
                LeafMap(path=(f"{path}{suffix}",), key=f"{config.prefix}{key}.{name}", shape=(width,))
            )

    def in_layer(name: str, *shape: int) -> None:
        key = f"{config.prefix}{_LAYER}{modules[name]}"
        first, second = ("weight", "bias") if len(shape) == 2 else config.norm_names
        leaves.append(
            LeafMap(
                path=("layers", name),
                key=f"{key}.{first}",
                shape=(depth, *shape),
                transposed=len(shape) == 2,
            )
        )
        leaves.append(
            LeafMap(path=("layers", f"{name}_bias"), key=f"{key}.{second}", shape=(depth, shape[-1]))
        )

    table("words", _WORDS, config.vocab_size, size)
    if config.absolute_positions:
        rows = config.max_position_embeddings
        table("positions", "embeddings.position_embeddings.weight", rows, size)
    if config.type_vocab_size:
        table("token_types", "embeddings.token_type_embeddings.weight", config.type_vocab_size, size)
    if size != width:
        key = f"{config.prefix}embeddings.embed_proj.weight"
        leaves.append(LeafMap(path=("embed_proj",), key=key, shape=(size, width), transposed=True))
    norm("embed_norm", "embeddings.LayerNorm")
    relative = config.relative
    if relative is not None:
        table("relative", "encoder.rel_embeddings.weight", 2 * relative.span, width)
        if relative.normed:
            norm("relative_norm", "encoder.LayerNorm")
    for name in ("q", "k", "v"):
        in_layer(name, width, width)
    if relative is not None and not relative.shared:
        if relative.content_to_position:
            in_layer("relative_k", width, width)
        if relative.position_to_content:
            in_layer("relative_q", width, width)
    in_layer("o", width, width)
    in_layer("post_attention_norm", width)
    in_layer("up", width, config.intermediate_size)
    in_layer("down", config.intermediate_size, width)
    in_layer("post_mlp_norm", width)
    for tensor in config.head.tensors() if config.head is not None else ():
        shape = tensor.shape[::-1] if tensor.transposed else tensor.shape
        leaves.append(
            LeafMap(path=("head", tensor.key), key=tensor.key, shape=shape, transposed=tensor.transposed)
        )
    return tuple(leaves)


def _ignored_reason(name: str, config: EncoderConfig) -> str | None:
    if not config.absolute_positions and re.fullmatch(_UNUSED_POSITIONS, name):
        return "config.json says that there are no absolute positions"
    return next((reason for pattern, reason in _IGNORED if re.fullmatch(pattern, name)), None)
