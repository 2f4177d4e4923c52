"""Which tensor of a Hugging Face checkpoint fills which leaf of our parameter tree.

One table for all families: a leaf has a path, a key pattern, a shape, and whether the file holds the
matrix the other way round. The map is reversible, so the same table serves loading and saving.

The parameter tree is a nested dict. Layers are stacked on the first axis (L) and every matrix is
``[in, out]``; files hold ``[out, in]``, one tensor a layer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from prb_jax.checkpoints.layout import has_fused_qkv, layer_module_name, module_name
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.layout import OUTPUT_EMBEDDING_KEY, STANDARD, Layout
from prb_jax.models.head import LanguageHead, Linear, Vocabulary

# Values that every program computes from the configuration; older checkpoints stored them.
_DERIVED = re.compile(r"([\w.]+\.)?(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq")
_COUNTED = re.compile(r".*\.num_batches_tracked")


@dataclass(frozen=True, kw_only=True)
class LeafMap:
    """One leaf of the parameter tree and the tensors that fill it.

    Attributes:
      path: keys into the nested dict, e.g. ``("layers", "q")``.
      key: the tensor's name; a stacked leaf has ``{layer}`` in it.
      shape: our shape, with L in front if stacked.
      transposed: the file holds the last two axes the other way round.
      pieces: of a tensor that holds more than this leaf: the rows (start, stop) in the file that, one after
        the other, are the leaf; None for all of them. Such a leaf is transposed.
      file_rows: rows of such a tensor.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    transposed: bool = False
    pieces: tuple[tuple[int, int], ...] | None = None
    file_rows: int | None = None

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.key

    @property
    def name(self) -> str:
        """The path with slashes, for messages."""
        return "/".join(self.path)

    @property
    def is_head(self) -> bool:
        """Part of the read-out, not of the body."""
        return self.path[0] in ("score", "score_bias", "head")

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each of its tensors in the file."""
        shape = self.shape[1:] if self.stacked else self.shape
        shape = shape[::-1] if self.transposed else shape
        return shape if self.file_rows is None else (self.file_rows, *shape[1:])

    @property
    def file_keys(self) -> tuple[str, ...]:
        """Its tensors, in the order of the layers."""
        if not self.stacked:
            return (self.key,)
        return tuple(self.key.format(layer=layer) for layer in range(self.shape[0]))


def leaf_maps(config: DecoderConfig) -> tuple[LeafMap, ...]:
    """Every leaf of the parameter tree that ``config`` describes, in the order of the forward pass."""
    depth, width, mlp = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layout = config.layout
    leaves: list[LeafMap] = []

    def vector(name: str, size: int, key: str | None = None) -> None:
        key = key or f"{layer_module_name(layout, name)}.weight"
        leaves.append(LeafMap(path=("layers", name), key=key, shape=(depth, size)))

    def linear(name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        pieces = _fused_pieces(config, name) if has_fused_qkv(layout) and name in "qkv" else None
        leaves.append(
            LeafMap(
                path=("layers", name),
                key=f"{layer_module_name(layout, name)}.weight",
                shape=(depth, inputs, outputs),
                transposed=True,
                pieces=pieces,
                file_rows=None if pieces is None else queries + 2 * keys,
            )
        )
        if bias:
            vector(f"{name}_bias", outputs, f"{layer_module_name(layout, name)}.bias")

    leaves.append(
        LeafMap(
            path=("embed",), key=f"{module_name(layout, 'embed')}.weight", shape=(config.vocab_size, width)
        )
    )
    vector("input_norm", width)
    linear("q", width, queries, bias=config.attention_bias)
    linear("k", width, keys, bias=config.attention_bias)
    linear("v", width, keys, bias=config.attention_bias)
    if config.qk_norm:
        vector("q_norm", config.head_dim)
        vector("k_norm", config.head_dim)
    linear("o", queries, width, bias=config.attention_output_bias)
    if layout.style == "transformers":
        # The same name means two things: the norm before the mlp, or, where there are four norms, the one
        # on the output of attention.
        layer = f"{layout.prefix}layers.{{layer}}."
        if config.post_norms:
            vector("post_attention_norm", width, f"{layer}post_attention_layernorm.weight")
            vector("mlp_norm", width, f"{layer}pre_feedforward_layernorm.weight")
            vector("post_mlp_norm", width, f"{layer}post_feedforward_layernorm.weight")
        else:
            vector("mlp_norm", width, f"{layer}post_attention_layernorm.weight")
    else:
        vector("mlp_norm", width)
    linear("gate", width, mlp, bias=config.mlp_bias)
    linear("up", width, mlp, bias=config.mlp_bias)
    linear("down", mlp, width, bias=config.mlp_bias)
    leaves.append(
        LeafMap(path=("final_norm",), key=f"{module_name(layout, 'final_norm')}.weight", shape=(width,))
    )
    return (*leaves, *_head_leaves(config))


def _head_leaves(config: DecoderConfig) -> list[LeafMap]:
    head, width = config.head, config.hidden_size
    if isinstance(head, Linear):
        shape = (width, config.num_labels)
        leaves = [LeafMap(path=("score",), key=head.key, shape=shape, transposed=True)]
        if head.bias:
            leaves.append(LeafMap(path=("score_bias",), key=head.bias_key, shape=shape[1:]))
        return leaves
    key, shape = OUTPUT_EMBEDDING_KEY, (width, config.vocab_size)
    whole = LeafMap(path=("lm_head",), key=key, shape=shape, transposed=True)
    if isinstance(head, LanguageHead):
        return [] if head.tied else [whole]
    if isinstance(head, Vocabulary):
        return [
            *([whole] if head.with_mass and head.key == OUTPUT_EMBEDDING_KEY else []),
            LeafMap(
                path=("score",),
                key=head.key,
                shape=(width, len(head.tokens)),
                transposed=True,
                pieces=tuple((token, token + 1) for token in head.tokens),
                file_rows=config.vocab_size,
            ),
        ]
    return [
        LeafMap(
            path=("head", tensor.key),
            key=tensor.key,
            shape=tensor.shape[::-1] if tensor.transposed else tensor.shape,
            transposed=tensor.transposed,
        )
        for tensor in head.tensors()
    ]


def _fused_pieces(config: DecoderConfig, name: str) -> tuple[tuple[int, int], ...]:
    """The rows of q, k or v in the fused matrix: each key-value head with its queries before it."""
    size, kv_heads = config.head_dim, config.num_key_value_heads
    groups = config.num_attention_heads // kv_heads
    first, count = {"q": (0, groups), "k": (groups, 1), "v": (groups + 1, 1)}[name]
    starts = [(head * (groups + 2) + first) * size for head in range(kv_heads)]
    return tuple((start, start + count * size) for start in starts)


def ignored_reason(key: str, layout: Layout = STANDARD) -> str | None:
    """Why a tensor that fills no leaf may be left aside, or None if it may not."""
    if _DERIVED.fullmatch(key):
        return "computed from config.json"
    if key == OUTPUT_EMBEDDING_KEY:
        return "output embedding of the language model, not used by a reward model"
    if _COUNTED.fullmatch(key):
        return "counts the batches of training"
    return next((reason for pattern, reason in layout.ignored if re.fullmatch(pattern, key)), None)


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
    """Return the reverse of :func:`nest`: every value of a nested dict by its path."""
    return {tuple(step.key for step in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
