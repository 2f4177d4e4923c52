"""How the tensors of a decoder's body are named: Hugging Face's names, or those of another code base."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

EMBEDDING_KEY = "model.embed_tokens.weight"
HEAD_KEY = "score.weight"
OUTPUT_EMBEDDING_KEY = "lm_head.weight"

Style = Literal["transformers", "internlm2"]

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


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a checkpoint's tensors.

    Attributes:
      style: the code base whose names the body has.
      prefix: what the body's names start with.
      side_files: files beside the weights that hold further tensors, each with what is put before the names
        in it. Any of those that exist are read.
      ignored: regular expressions of names that are left aside, each with the reason.
    """

    style: Style = "transformers"
    prefix: str = "model."
    side_files: tuple[tuple[str, str], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()

    @property
    def fused_qkv(self) -> bool:
        """q, k and v are rows of one matrix: for each key-value head its queries, then its key, its value."""
        return self.style == "internlm2"

    def module(self, leaf: str) -> str:
        """The module of a leaf of the body outside the layers."""
        return self.prefix + _NAMES[self.style][leaf]

    def layer_module(self, leaf: str) -> str:
        """As :meth:`module` inside a layer, with ``{layer}`` for its number."""
        return f"{self.prefix}layers.{{layer}}.{_NAMES[self.style][leaf]}"


STANDARD = Layout()
"""What transformers writes for a ``*ForSequenceClassification``."""
