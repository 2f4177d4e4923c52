"""What each model family is, as far as ``config.json`` does not say it.

One row a family: the class name that reward-model checkpoints carry, the values transformers takes
for fields that are absent, and the structural facts that are fixed in that family's code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from prb_jax.errors import CheckpointError

ENCODERS = ("bert", "deberta-v2")
"""Values of ``model_type`` that are encoders; DeBERTa-v3 calls itself v2. They are behind a seam: see the `encoder` of
:mod:`prb_jax.seams`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about one ``model_type``."""

    architecture: str  # name of the class with a score head, as in ``architectures``
    defaults: Mapping[str, Any]  # transformers' values for absent fields (None: derived from other fields)
    bias: Literal["none", "qkv", "field"]
    """Which linear layers of attention have a bias: those of q, k, v (``qkv``), as ``attention_bias`` says for q, k, v
    and o (``field``), or none."""
    windows: Literal["none", "every", "upper", "pattern"]
    """Which layers see only a sliding window: none, every one, by ``use_sliding_window`` and ``max_window_layers``, or
    every layer but each n-th."""
    window_period: int = 0  # for ``pattern``: each layer whose number (from 1) this divides is a full one
    mlp_bias_field: bool = False  # ``mlp_bias`` says whether gate, up and down have biases (else none)
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rope
    gemma: bool = False  # Gemma's norms (1 + w, multiplied in float32), embeddings scaled by sqrt(D), gelu
    post_norms: bool = False
    """Norms after attention and mlp, and attention scaled by ``query_pre_attn_scalar`` (Gemma since 2)."""
    local_rope: bool = False  # sliding layers have their own rope
    softcaps_attention: bool = False  # ``attn_logit_softcapping`` is honoured
    softcaps_vocabulary: bool = False  # ``final_logit_softcapping`` is, in the logits of a vocabulary

    @property
    def language_model(self) -> str:
        """The name of the class with the same body and the head of a language model."""
        body = self.architecture.removesuffix("ForSequenceClassification").removesuffix("Text")
        return f"{body}ForCausalLM"


_SHARED = {
    "head_dim": None, "pad_token_id": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
}  # fmt: skip
_QWEN = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_GEMMA = {"max_position_embeddings": 8192, "head_dim": 256, "pad_token_id": 0, "tie_word_embeddings": True}
_LATER_GEMMA = _GEMMA | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}


def _family(name: str, *defaults: Mapping[str, Any], **facts: Any) -> Family:
    merged = dict(_SHARED)
    for values in defaults:
        merged |= values
    return Family(architecture=f"{name}ForSequenceClassification", defaults=MappingProxyType(merged), **facts)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _family(
            "Llama", {"max_position_embeddings": 2048, "num_key_value_heads": None},
            bias="field", mlp_bias_field=True, windows="none",
        ),
        "mistral": _family(
            "Mistral", {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
            bias="none", windows="every",
        ),
        "qwen2": _family("Qwen2", _QWEN, bias="qkv", windows="upper"),
        "qwen3": _family("Qwen3", _QWEN, {"head_dim": 128}, bias="field", windows="upper", qk_norm=True),
        "gemma": _family("Gemma", _GEMMA, {"num_key_value_heads": 16}, bias="field", windows="none", gemma=True),
        "gemma2": _family(
            "Gemma2", _LATER_GEMMA, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            bias="field", windows="pattern", window_period=2, gemma=True, post_norms=True,
            softcaps_attention=True, softcaps_vocabulary=True,
        ),
        "gemma3_text": _family(
            "Gemma3Text", _LATER_GEMMA,
            {
                "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
                "final_logit_softcapping": None,
            },
            bias="field", windows="pattern", window_period=6, qk_norm=True, gemma=True, post_norms=True,
            local_rope=True, softcaps_vocabulary=True,
        ),
    }
)  # fmt: skip


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Whether a raw ``config.json`` is one of an encoder known here."""
    return raw.get("model_type") in ENCODERS


def refuse_encoder(raw: Mapping[str, Any], *, where: str) -> None:
    """For what needs a decoder: training, conversion.

    Raises:
      CheckpointError: the raw ``config.json`` is that of an encoder.
    """
    if is_encoder(raw):
        named = raw.get("architectures") or [raw["model_type"]]
        raise CheckpointError(
            f"{where}: '{named[0]}' is an encoder, which this command cannot use: `prb evaluate` scores with those "
            "that have a known head, and `prb rank-profiles` ranks with those of single texts"
        )
