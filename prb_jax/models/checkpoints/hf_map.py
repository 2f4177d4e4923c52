"""Map between tensors of a Hugging Face checkpoint and leaves of our parameter tree.

A leaf has a path, a key pattern, a shape, and a flag for transposed matrices, all computed from the abstract module of
the model. The map is reversible and serves both loading and saving.

The parameter tree is a nested dict. Layers are stacked on the first axis (L) and every matrix is
``[in, out]``; files contain ``[out, in]``, one tensor per layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from prb_jax.models.config.decoder import DecoderConfig, WeightLayout
from prb_jax.models.head import OUTPUT_EMBEDDING_KEY
from prb_jax.models.model import abstract_model
from prb_jax.models.parameter import Path, parameters

# Module names of InternLM2 by their names in transformers. InternLM2 fuses q, k and v: for each key-value head its
# queries, then its key and its value.
_FUSED = "attention.wqkv"
_INTERNLM2: Mapping[str, str] = {
    "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": _FUSED, "self_attn.k_proj": _FUSED, "self_attn.v_proj": _FUSED,
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
_OUTSIDE = {"embed": "embed_tokens", "final_norm": "norm"}

# Tensors without a leaf, each with the reason to ignore it. Some are computed from the configuration, but older
# checkpoints stored them.
_IGNORED = (
    (r"([\w.]+\.)?(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq", "computed from config.json"),
    (re.escape(OUTPUT_EMBEDDING_KEY), "output embedding of the language model, not used by a reward model"),
    (r"(model\.)?(vision_tower|multi_modal_projector)\..*", "reads images, not used for text"),
    (r"model\.visual\..*", "reads images, not used for text"),
    (r"mtp\..*", "predicts tokens after the next one, not used by a reward model"),
    (r".*\.num_batches_tracked", "counts the batches of training"),
)

if TYPE_CHECKING:
    from prb_jax.models.model import Config


@dataclass(frozen=True, kw_only=True)
class LeafMap:
    """One leaf of the parameter tree and its tensors in the file."""

    path: tuple[str, ...]  # keys in the nested dict, e.g. ``("layers", "q")``
    key: str
    """Tensor name; contains ``{layer}`` for a stacked leaf, and also ``{expert}`` for a leaf of all experts."""
    shape: tuple[int, ...]  # our shape, with leading axes L and E if stacked
    transposed: bool = False  # the file stores the last two axes transposed
    pieces: tuple[tuple[int, int], ...] | None = None
    """Rows (start, stop) of the tensor that form the leaf when concatenated, if the tensor contains more than this
    leaf; None for all rows. Such a leaf is transposed."""
    file_rows: int | None = None  # total rows of such a tensor
    is_head: bool = False  # True for parameters of the read-out
    quantisable: bool = False  # may be stored in eight bits
    layers: tuple[int, ...] = ()  # numbers of the layers in a stacked leaf

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.key

    @property
    def name(self) -> str:
        """Path with slashes, for messages."""
        return "/".join(self.path)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Shape of the grid of its tensors: [], [L] or [L, E]."""
        return self.shape[: self.stacked + ("{expert}" in self.key)]

    @property
    def of_all_experts(self) -> bool:
        """True if it is written as one tensor of all experts; reading treats each expert as separate."""
        return "{expert}" in self.key and not self.transposed

    @property
    def written(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors to write, in order."""
        if not self.of_all_experts:
            return dict.fromkeys(self.file_keys, self.file_shape)
        key = self.key.replace(".{expert}", "")
        return {key.format(layer=layer): self.shape[1:] for layer in self.layers}

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each of its tensors in the file."""
        shape = self.shape[len(self.tensors) :]
        shape = shape[::-1] if self.transposed else shape
        return shape if self.file_rows is None else (self.file_rows, *shape[1:])

    @property
    def file_keys(self) -> tuple[str, ...]:
        """Names of its tensors, ordered by layer, then by expert."""
        if not self.stacked:
            return (self.key,)
        experts = range(self.tensors[1] if len(self.tensors) > 1 else 1)
        return tuple(
            self.key.format(layer=layer, expert=expert) for layer in self.layers for expert in experts
        )


def file_tensors(leaves: Mapping[Path, Any], config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and values of a checkpoint's tensors from arrays by parameter path.

    Layers of a leaf are consecutive, and the host keeps only the leaves of one tensor at a time.
    """
    by_key: dict[str, list[LeafMap]] = {}
    for leaf in leaf_maps(config):
        by_key.setdefault(leaf.key, []).append(leaf)
    for maps in by_key.values():
        hosts = [np.asarray(leaves[leaf.path]) for leaf in maps]
        grid = maps[0].tensors[: 1 if maps[0].of_all_experts else None]
        for place, key in zip(np.ndindex(grid), maps[0].written, strict=True):
            parts = [host[place] for host in hosts]
            yield key, _joined(maps, [part.T if leaf.transposed else part for leaf, part in zip(maps, parts)])


def _joined(maps: Sequence[LeafMap], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the leaves of one tensor of the file."""
    if maps[0].pieces is None:
        return parts[0]
    whole = np.empty(maps[0].file_shape, parts[0].dtype)
    for leaf, part in zip(maps, parts):
        done = 0
        for start, stop in leaf.pieces or ():
            whole[start:stop] = part[done : done + stop - start]
            done += stop - start
    return whole


def leaf_maps(config: Config) -> tuple[LeafMap, ...]:
    """Return every leaf of the parameter tree of ``config``, in forward order."""
    return tuple(_leaf(path, variable, config) for path, variable in parameters(abstract_model(config)))


def _leaf(path: Path, variable: nnx.Variable[Any], config: Config) -> LeafMap:
    """Return the storage of a parameter from its declaration and the names of the checkpoint's code base."""
    key, pieces, file_rows = (variable.get_metadata(name) for name in ("hf", "pieces", "file_rows"))
    numbers: tuple[int, ...] = ()
    if path[0] == "layers":
        numbers = tuple(range(variable.shape[0]))
        if (part := variable.get_metadata("part")) is not None:
            numbers = tuple(number for number, kind in enumerate(config.kinds) if part in kind)
    if variable.get_metadata("in_body"):
        if not isinstance(config, DecoderConfig):
            prefix, layers = config.prefix, config.layers_name
        else:
            module, tensor = key.rsplit(".", 1)
            key, prefix, layers = f"{_module(config.layout, module)}.{tensor}", config.layout.prefix, "layers"
            if _module(config.layout, module) == _FUSED:
                pieces = _fused_pieces(config, path[-1])
                file_rows = sum(stop - start for name in "qkv" for start, stop in _fused_pieces(config, name))
        key = f"{prefix}{layers}.{{layer}}.{key}" if path[0] == "layers" else f"{prefix}{key}"
    return LeafMap(
        path=path,
        key=key,
        shape=variable.shape,
        transposed=variable.get_metadata("turned"),
        pieces=pieces,
        file_rows=file_rows,
        is_head=variable.get_metadata("readout"),
        quantisable=variable.get_metadata("quantisable"),
        layers=numbers,
    )


def _fused_pieces(config: DecoderConfig, name: str) -> tuple[tuple[int, int], ...]:
    """Return the rows of q, k or v in the fused matrix: the queries of each key-value head come before its key."""
    size, kv_heads = config.head_dim, config.num_key_value_heads
    groups = config.num_attention_heads // kv_heads
    first, count = {"q": (0, groups), "k": (groups, 1), "v": (groups + 1, 1)}[name]
    starts = [(head * (groups + 2) + first) * size for head in range(kv_heads)]
    return tuple((start, start + count * size) for start in starts)


def module_name(layout: WeightLayout, leaf: str) -> str:
    """Return the module name of a leaf in a decoder's body outside the layers."""
    return layout.prefix + _module(layout, _OUTSIDE[leaf])


def _module(layout: WeightLayout, name: str) -> str:
    return _INTERNLM2.get(name, name) if layout.style == "internlm2" else name


def ignored_reason(key: str, config: Config) -> str | None:
    """Return the reason to ignore a tensor without a leaf, or None if it must not be ignored."""
    known = _IGNORED + config.layout.ignored if isinstance(config, DecoderConfig) else config.ignored
    return next((reason for pattern, reason in known if re.fullmatch(pattern, key)), None)


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return the nested dict with these values at these paths."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Invert :func:`nest`: return every value of a nested dict by path."""
    return {tuple(step.key for step in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
