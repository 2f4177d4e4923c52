"""How the tensors of a decoder's body are named: Hugging Face's names, or those of another code base."""

from collections.abc import Mapping
from types import MappingProxyType

from prb_jax.models.config.layout import Layout, Style

#: Our leaf -> module of a checkpoint; inside a layer for those of ``_OF_A_LAYER``.
_NAMES: Mapping[Style, Mapping[str, str]] = MappingProxyType(
    {
        "transformers": MappingProxyType(
            {
                "embed": "embed_tokens",
                "final_norm": "norm",
                "input_norm": "input_layernorm",
                "q": "self_attn.q_proj",
                "k": "self_attn.k_proj",
                "v": "self_attn.v_proj",
                "q_norm": "self_attn.q_norm",
                "k_norm": "self_attn.k_norm",
                "o": "self_attn.o_proj",
                "gate": "mlp.gate_proj",
                "up": "mlp.up_proj",
                "down": "mlp.down_proj",
            }
        ),
        "internlm2": MappingProxyType(
            {
                "embed": "tok_embeddings",
                "final_norm": "norm",
                "input_norm": "attention_norm",
                "mlp_norm": "ffn_norm",
                "q": "attention.wqkv",
                "k": "attention.wqkv",
                "v": "attention.wqkv",
                "o": "attention.wo",
                "gate": "feed_forward.w1",
                "up": "feed_forward.w3",
                "down": "feed_forward.w2",
            }
        ),
    }
)


def has_fused_qkv(layout: Layout) -> bool:
    """Whether q, k and v are rows of one matrix: for each key-value head its queries, then its key, its value."""
    return layout.style == "internlm2"


def module_name(layout: Layout, leaf: str) -> str:
    """Name the module of a leaf of the body outside the layers."""
    return layout.prefix + _NAMES[layout.style][leaf]


def layer_module_name(layout: Layout, leaf: str) -> str:
    """As :func:`module_name` inside a layer, with ``{layer}`` for its number."""
    return f"{layout.prefix}layers.{{layer}}.{_NAMES[layout.style][leaf]}"
