"""One family of decoders: the properties that ``config.json`` does not contain, and the kinds of its layers.

The families of this package are the rows of :mod:`prb_jax.models.config.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from prb_jax.errors import CheckpointError
from prb_jax.models.config.fields import FieldReader
from prb_jax.seams import get

if TYPE_CHECKING:
    from prb_jax.models.config.experts import ExpertNames


ENCODERS = ("bert", "deberta-v2", "modernbert")
"""Values of ``model_type`` that are encoders; DeBERTa-v3 uses the name of v2. Encoders are optional: see `encoder` in
:mod:`prb_jax.seams`."""


BESIDE_VISION = ("gemma3", "qwen3_5", "qwen3_5_moe")
"""Values of ``model_type`` of files that describe a text model beside a vision tower."""

Norms = tuple[tuple[str, str], ...]
"""Norms of a layer in forward order: ``input_norm`` and ``post_attention_norm`` around attention, ``mlp_norm`` and
``post_mlp_norm`` around the mlp; each with its name in a file of transformers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Properties of one ``model_type``."""

    architecture: str  # class with a score head, as in ``architectures``
    defaults: Mapping[str, Any]  # transformers' defaults for absent fields (None: derived from other fields)
    windows: Literal["none", "every", "used", "refused", "upper", "unrotated", "pattern"]
    """Layers with a sliding window, in the order of the values: none; all; all if ``use_sliding_window``; none, and
    ``use_sliding_window`` is refused; by ``use_sliding_window`` and ``max_window_layers``; the layers without rope if
    ``use_sliding_window``; or all except each n-th."""
    window_period: int = 0  # for ``pattern``: each layer number (from 1) divisible by this has full attention
    qkv_bias: bool | str = False  # q, k and v have biases; a string names the field that decides
    output_bias: bool | str = False  # same for o
    mlp_bias: bool | str = False  # same for gate, up and down
    qk_norm: Literal["head", "width"] | None = (
        None  # RMSNorm of q and k before rope, per head or over all heads
    )
    recurrent: bool = False  # some layers use the gated delta rule, by ``layer_types`` (``linear_*`` fields)
    grouped_recurrence: bool = (
        False  # files store their queries, keys, values and gates head by head in one tensor
    )
    attention_gate: bool = (
        False  # the attention output is multiplied by the sigmoid of a gate, stored in ``q_proj``
    )
    norms: Norms = (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
    gemma: bool = False  # Gemma's norms (1 + w, multiplied in float32), embeddings scaled by sqrt(D), gelu
    wide_norms: bool = False  # norms multiply by w in float32
    centred_norms: bool = False  # norms multiply by 1 + w in float32
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    unused_rope_fields: tuple[str, ...] = ()  # fields of the rope that do not affect text
    interleaved_rope: bool = False  # rotated pairs are adjacent channels
    query_growth: bool = False  # queries are scaled by position, with ``llama_4_scaling_beta`` of the rope
    unrotated: Literal["none", "listed", "full"] = "none"
    """Layers without rope: none; by ``no_rope_layers``; or the full layers of a model with sliding layers."""
    fused: tuple[str, ...] = ()  # matrices fused in one tensor: ``qkv_proj``, ``gate_up_proj``
    local_theta: str | None = None  # field with the theta of a separate rope for sliding layers
    softcaps_attention: bool = False  # ``attn_logit_softcapping`` is applied
    sinks: bool = False  # each head has an attention sink: an extra softmax logit without a value
    layer: type[Any] | None = None
    """Subclass of :class:`prb_jax.models.decoder_layer.DecoderLayer` that a plug-in defines."""
    activation: str | None = None  # the only ``hidden_act`` that a plug-in's layer supports
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``config.json`` for a plug-in's layer, with defaults; `DecoderConfig.fields` contains the
    values of a file."""
    experts: ExpertNames | None = None  # names of the mixture of experts, if the mlp is one
    softcaps_vocabulary: bool = False  # ``final_logit_softcapping`` is applied to vocabulary logits

    @property
    def plain_rope(self) -> bool:
        """True if all heads of all layers are rotated whole, by one rope that needs no scaling."""
        own = self.local_theta is not None or self.query_growth or "partial_rotary_factor" in self.defaults
        return "default" in self.rope_types and not own

    @property
    def language_model(self) -> str:
        """Name of the class with the same body and a language-model head."""
        body = self.architecture.removesuffix("ForSequenceClassification").removesuffix("Text")
        return f"{body}ForCausalLM"


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Return True if a raw ``config.json`` describes a known encoder."""
    return raw.get("model_type") in ENCODERS


def refuse_encoder(raw: Mapping[str, Any], *, where: str) -> None:
    """Reject an encoder for uses that require a decoder: training, conversion.

    Raises:
      CheckpointError: The raw ``config.json`` describes an encoder.
    """
    if is_encoder(raw):
        named = raw.get("architectures") or [raw["model_type"]]
        raise CheckpointError(
            f"{where}: '{named[0]}' is an encoder, which this command cannot use: `prb evaluate` scores with those "
            "that have a known head, and `prb rank-profiles` ranks with those of single texts"
        )


def known_families() -> Mapping[str, Family]:
    """Return the families by ``model_type``: of this package, then of plug-ins of the kind "backbones"."""
    return get("tables", "families").value


ATTENTION, RECURRENT = "full_attention", "linear_attention"
"""Token mixers: softmax attention (also for sliding layers), or a recurrent state. Names as in ``layer_types``."""


MLP, EXPERTS = "mlp", "experts"
"""Second halves of a layer: one gated mlp, or a mixture of experts."""


Kind = tuple[str, str]
"""Parts of a layer: its token mixer, and its :data:`MLP` or :data:`EXPERTS`."""


@dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """Differences between the layers of a decoder."""

    window: int | None  # window of sliding layers in tokens; None without sliding layers
    slides: tuple[bool, ...]  # True for each layer that attends only to the window
    rotates: tuple[bool, ...]  # True for each layer with a rotary embedding


def layer_kinds(fields: FieldReader, family: Family, *, layers: int) -> LayerKinds:
    """Read the differences between layers; :mod:`prb_jax.models.config.mixed_layers` reads families that have some.

    Raises:
      CheckpointError: A list has the wrong length or unknown entries, or sliding layers have no window.
    """
    if family.windows == "none" and family.unrotated == "none":
        return LayerKinds(window=None, slides=(False,) * layers, rotates=(True,) * layers)
    return get("mixed layers", "kinds").value(fields, family, layers=layers)
