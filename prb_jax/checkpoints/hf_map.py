"""Which tensor of a Hugging Face checkpoint fills which leaf of our parameter tree.

One table for all families: a leaf has a path, a key pattern, a shape, and whether the file holds the
matrix the other way round. The map is reversible, so the same table serves loading and saving.

The parameter tree is a nested dict. Layers are stacked on the first axis (L) and every matrix is
``[in, out]``; files hold ``[out, in]``, one tensor a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax

from prb_jax.models.config.decoder import DecoderConfig, WeightLayout
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.head import OUTPUT_EMBEDDING_KEY, Head, LanguageHead, Linear, Vocabulary

# Our leaf -> module of a checkpoint; inside a layer but for the first two. InternLM2 has q, k and v in one matrix: for
# each key-value head its queries, then its key, its value.
_MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "transformers": {
            "embed": "embed_tokens", "final_norm": "norm", "input_norm": "input_layernorm", "q": "self_attn.q_proj",
            "k": "self_attn.k_proj", "v": "self_attn.v_proj", "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
        "internlm2": {
            "embed": "tok_embeddings", "final_norm": "norm", "input_norm": "attention_norm", "mlp_norm": "ffn_norm",
            "q": "attention.wqkv", "k": "attention.wqkv", "v": "attention.wqkv", "o": "attention.wo",
            "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
        },
    }
)  # fmt: skip
_BERT = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "o": "attention.output.dense", "post_attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "post_mlp_norm": "output.LayerNorm",
}  # fmt: skip
_ENCODER_MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "bert": _BERT,
        "deberta-v2": {
            **_BERT,
            "q": "attention.self.query_proj", "k": "attention.self.key_proj", "v": "attention.self.value_proj",
            "relative_k": "attention.self.pos_key_proj", "relative_q": "attention.self.pos_query_proj",
        },
    }
)  # fmt: skip

# Tensors without a leaf, each with the reason why they may be left aside. Some are values that every program computes
# from the configuration; older checkpoints stored them.
_IGNORED = (
    (r"([\w.]+\.)?(layers\.\d+\.(self_attn|attention)\.)?rotary_emb\.inv_freq", "computed from config.json"),
    (re.escape(OUTPUT_EMBEDDING_KEY), "output embedding of the language model, not used by a reward model"),
    (r".*\.num_batches_tracked", "counts the batches of training"),
)
_IGNORED_BY_ENCODERS = (
    (r"(.*\.)?position_ids", "counts the positions"),
    (r"(bert\.)?pooler\..*", "pooler, not used for embeddings"),
    (
        r"(cls|lm_predictions|mask_predictions|classifier)\..*",
        "head of another task, not used for embeddings",
    ),
)
_UNUSED_POSITIONS = (
    (r"(deberta\.)?embeddings\.position_embeddings\.weight", "config.json says that there are no absolute positions"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LeafMap:
    """One leaf of the parameter tree and the tensors that fill it."""

    path: tuple[str, ...]  # keys into the nested dict, e.g. ``("layers", "q")``
    key: str  # the tensor's name; a stacked leaf has ``{layer}`` in it
    shape: tuple[int, ...]  # our shape, with L in front if stacked
    transposed: bool = False  # the file holds the last two axes the other way round
    pieces: tuple[tuple[int, int], ...] | None = None
    """Of a tensor that holds more than this leaf: the rows (start, stop) in the file that, one after the other, are the
    leaf; None for all of them. Such a leaf is transposed."""
    file_rows: int | None = None  # rows of such a tensor

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


def leaf_maps(config: DecoderConfig | EncoderConfig) -> tuple[LeafMap, ...]:
    """Every leaf of the parameter tree that ``config`` describes, in the order of the forward pass."""
    if isinstance(config, EncoderConfig):
        return (*_encoder_leaves(config), *_head_leaves(config.head))
    return (*_decoder_leaves(config), *_score_leaves(config), *_head_leaves(config.head))


def _leaf(path: str, key: str, *shape: int, **more: Any) -> LeafMap:
    return LeafMap(path=tuple(path.split("/")), key=key, shape=shape, **more)


def _decoder_leaves(config: DecoderConfig) -> list[LeafMap]:
    depth, width, mlp = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layout, leaves = config.layout, list[LeafMap]()
    modules = dict(_MODULES[layout.style])
    if layout.style == "transformers" and config.post_norms:
        modules["post_attention_norm"] = "post_attention_layernorm"
        modules["mlp_norm"] = "pre_feedforward_layernorm"
        modules["post_mlp_norm"] = "post_feedforward_layernorm"
    elif layout.style == "transformers":  # here the same name means the norm before the mlp
        modules["mlp_norm"] = "post_attention_layernorm"

    def in_layer(name: str, *shape: int, of: str = "", tensor: str = "weight", **more: Any) -> None:
        key = f"{layout.prefix}layers.{{layer}}.{modules[of or name]}.{tensor}"
        leaves.append(_leaf(f"layers/{name}", key, depth, *shape, **more))

    def linear(name: str, inputs: int, outputs: int, *, bias: bool) -> None:
        fused: dict[str, Any] = {}
        if layout.style == "internlm2" and name in ("q", "k", "v"):
            fused = {"pieces": _fused_pieces(config, name), "file_rows": queries + 2 * keys}
        in_layer(name, inputs, outputs, transposed=True, **fused)
        if bias:
            in_layer(f"{name}_bias", outputs, of=name, tensor="bias")

    leaves.append(_leaf("embed", f"{module_name(layout, 'embed')}.weight", config.vocab_size, width))
    in_layer("input_norm", width)
    for name, size in (("q", queries), ("k", keys), ("v", keys)):
        linear(name, width, size, bias=config.attention_bias)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        in_layer(name, config.head_dim)
    linear("o", queries, width, bias=config.attention_output_bias)
    for name in ("post_attention_norm", "mlp_norm", "post_mlp_norm") if config.post_norms else ("mlp_norm",):
        in_layer(name, width)
    for name, inputs, outputs in (("gate", width, mlp), ("up", width, mlp), ("down", mlp, width)):
        linear(name, inputs, outputs, bias=config.mlp_bias)
    leaves.append(_leaf("final_norm", f"{module_name(layout, 'final_norm')}.weight", width))
    return leaves


def _fused_pieces(config: DecoderConfig, name: str) -> tuple[tuple[int, int], ...]:
    """The rows of q, k or v in the fused matrix: each key-value head with its queries before it."""
    size, kv_heads = config.head_dim, config.num_key_value_heads
    groups = config.num_attention_heads // kv_heads
    first, count = {"q": (0, groups), "k": (groups, 1), "v": (groups + 1, 1)}[name]
    starts = [(head * (groups + 2) + first) * size for head in range(kv_heads)]
    return tuple((start, start + count * size) for start in starts)


def _encoder_leaves(config: EncoderConfig) -> list[LeafMap]:
    depth, width, size = config.num_hidden_layers, config.hidden_size, config.embedding_size
    modules, leaves = _ENCODER_MODULES[config.model_type], list[LeafMap]()

    def outside(path: str, module: str, *shape: int, tensor: str = "weight", **more: Any) -> None:
        leaves.append(_leaf(path, f"{config.prefix}{module}.{tensor}", *shape, **more))

    def norm(path: str, module: str) -> None:
        for suffix, tensor in zip(("", "_bias"), config.norm_names, strict=True):
            outside(f"{path}{suffix}", module, width, tensor=tensor)

    def in_layer(name: str, *shape: int) -> None:
        module, is_matrix = f"encoder.layer.{{layer}}.{modules[name]}", len(shape) == 2
        first, second = ("weight", "bias") if is_matrix else config.norm_names
        outside(f"layers/{name}", module, depth, *shape, tensor=first, transposed=is_matrix)
        outside(f"layers/{name}_bias", module, depth, shape[-1], tensor=second)

    outside("words", "embeddings.word_embeddings", config.vocab_size, size)
    if config.absolute_positions:
        outside("positions", "embeddings.position_embeddings", config.max_position_embeddings, size)
    if config.type_vocab_size:
        outside("token_types", "embeddings.token_type_embeddings", config.type_vocab_size, size)
    if size != width:
        outside("embed_proj", "embeddings.embed_proj", size, width, transposed=True)
    norm("embed_norm", "embeddings.LayerNorm")
    relative = config.relative
    if relative is not None:
        outside("relative", "encoder.rel_embeddings", 2 * relative.span, width)
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
    return leaves


def _score_leaves(config: DecoderConfig) -> list[LeafMap]:
    """Those of a head that is a product with one matrix."""
    head, width = config.head, config.hidden_size
    if isinstance(head, Linear):
        bias = [_leaf("score_bias", head.bias_key, config.num_labels)] if head.bias else []
        return [_leaf("score", head.key, width, config.num_labels, transposed=True), *bias]
    whole = _leaf("lm_head", OUTPUT_EMBEDDING_KEY, width, config.vocab_size, transposed=True)
    if isinstance(head, LanguageHead):
        return [] if head.tied else [whole]
    if not isinstance(head, Vocabulary):
        return []
    rows = {
        "pieces": tuple((token, token + 1) for token in head.tokens),
        "file_rows": config.vocab_size,
    }
    score = _leaf("score", head.key, width, len(head.tokens), transposed=True, **rows)
    return [whole, score] if head.with_mass and head.key == OUTPUT_EMBEDDING_KEY else [score]


def _head_leaves(head: Head | None) -> list[LeafMap]:
    """Those of the tensors that a head names."""
    return [
        LeafMap(
            path=("head", tensor.key),
            key=tensor.key,
            shape=tensor.shape[::-1] if tensor.transposed else tensor.shape,
            transposed=tensor.transposed,
        )
        for tensor in (() if head is None else head.tensors())
    ]


def module_name(layout: WeightLayout, leaf: str) -> str:
    """Name the module of a leaf of a decoder's body outside the layers."""
    return layout.prefix + _MODULES[layout.style][leaf]


def ignored_reason(key: str, config: DecoderConfig | EncoderConfig) -> str | None:
    """Why a tensor that fills no leaf may be left aside, or None if it may not."""
    if isinstance(config, EncoderConfig):
        known = (
            _IGNORED_BY_ENCODERS if config.absolute_positions else _UNUSED_POSITIONS + _IGNORED_BY_ENCODERS
        )
    else:
        known = _IGNORED + config.layout.ignored
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
    """Return the reverse of :func:`nest`: every value of a nested dict by its path."""
    return {tuple(step.key for step in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
