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

from prb_jax.models.config import DecoderConfig

EMBEDDING_KEY = "model.embed_tokens.weight"
HEAD_KEY = "score.weight"
OUTPUT_EMBEDDING_KEY = "lm_head.weight"

# Values that every program computes from the configuration; older checkpoints stored them.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER = "model.layers.{layer}."


@dataclass(frozen=True, kw_only=True)
class LeafMap:
    """One leaf of the parameter tree and the tensors that fill it.

    Attributes:
      path: keys into the nested dict, e.g. ``("layers", "q")``.
      key: the tensor's name; a stacked leaf has ``{layer}`` in it.
      shape: our shape, with L in front if stacked.
      transposed: the file holds the last two axes the other way round.
    """

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.key

    @property
    def name(self) -> str:
        """The path with slashes, for messages."""
        return "/".join(self.path)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of each of its tensors in the file."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

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
    leaves: list[LeafMap] = []

    def vector(name: str, tensor: str, size: int) -> None:
        leaves.append(LeafMap(path=("layers", name), key=_LAYER + tensor, shape=(depth, size)))

    def linear(name: str, module: str, inputs: int, outputs: int, *, bias: bool) -> None:
        leaves.append(
            LeafMap(
                path=("layers", name),
                key=f"{_LAYER}{module}.weight",
                shape=(depth, inputs, outputs),
                transposed=True,
            )
        )
        if bias:
            vector(f"{name}_bias", f"{module}.bias", outputs)

    leaves.append(LeafMap(path=("embed",), key=EMBEDDING_KEY, shape=(config.vocab_size, width)))
    vector("input_norm", "input_layernorm.weight", width)
    linear("q", "self_attn.q_proj", width, queries, bias=config.attention_bias)
    linear("k", "self_attn.k_proj", width, keys, bias=config.attention_bias)
    linear("v", "self_attn.v_proj", width, keys, bias=config.attention_bias)
    if config.qk_norm:
        vector("q_norm", "self_attn.q_norm.weight", config.head_dim)
        vector("k_norm", "self_attn.k_norm.weight", config.head_dim)
    linear("o", "self_attn.o_proj", queries, width, bias=config.attention_output_bias)
    # The same name means two things: the norm before the mlp, or, where there are four norms, the one
    # on the output of attention.
    if config.post_norms:
        vector("post_attention_norm", "post_attention_layernorm.weight", width)
        vector("mlp_norm", "pre_feedforward_layernorm.weight", width)
        vector("post_mlp_norm", "post_feedforward_layernorm.weight", width)
    else:
        vector("mlp_norm", "post_attention_layernorm.weight", width)
    linear("gate", "mlp.gate_proj", width, mlp, bias=config.mlp_bias)
    linear("up", "mlp.up_proj", width, mlp, bias=config.mlp_bias)
    linear("down", "mlp.down_proj", mlp, width, bias=config.mlp_bias)
    leaves.append(LeafMap(path=("final_norm",), key="model.norm.weight", shape=(width,)))
    leaves.append(LeafMap(path=("score",), key=HEAD_KEY, shape=(width, config.num_labels), transposed=True))
    return tuple(leaves)


def ignored_reason(key: str) -> str | None:
    """Why a tensor that fills no leaf may be left aside, or None if it may not."""
    if _DERIVED.fullmatch(key):
        return "computed from config.json"
    if key == OUTPUT_EMBEDDING_KEY:
        return "output embedding of the language model, not used by a reward model"
    return None


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The nested dict with these values at these paths."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The reverse of :func:`nest`: every value of a nested dict by its path."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {(key, *path): leaf for path, leaf in flatten(value).items()}
        else:
            leaves[(key,)] = value
    return leaves
