"""The decoder's configuration, parsed from the raw ``config.json`` of a Hugging Face checkpoint.

The raw file is read instead of transformers' own classes, because those accept what they do not know:
here an unknown architecture, rope type, or field value that would change numbers is an error that
names it. Absent fields take the value that transformers gives them for that family.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prb_jax.data.reading import read_object
from prb_jax.errors import CheckpointError, short_repr
from prb_jax.models.config.families import FAMILIES, Family
from prb_jax.models.config.fields import LARGEST_EPSILON, MOST_LAYERS, FieldReader
from prb_jax.models.config.layout import STANDARD, Layout
from prb_jax.models.config.rope import ROPE_TYPES, RopeConfig, parse_rope, parse_rope_per_layer_type
from prb_jax.models.config.shared import (
    WITHOUT_EFFECT,
    choose_dtype,
    parse_architectures,
    parse_dtype,
    parse_num_labels,
    refuse_unless_neutral,
)
from prb_jax.models.head import LINEAR, Head

__all__ = ["ROPE_TYPES", "DecoderConfig", "RopeConfig", "load_config", "parse_config"]

Activation = Literal["silu", "gelu_pytorch_tanh"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}
_SLIDES = {"full_attention": False, "sliding_attention": True}
# Fields that would change scores unless they have one of these values (or are null).
_ONLY_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder with a score head. Hashable; ``original`` takes no part in comparison.

    Attributes:
      model_type: family, e.g. ``llama``.
      vocab_size, hidden_size, intermediate_size, num_hidden_layers: V, D, F, number of layers.
      num_attention_heads, num_key_value_heads, head_dim: N, G, H.
      rms_norm_eps: added to the mean square in every norm.
      hidden_activation: of the gated mlp.
      attention_bias: q, k and v have biases.
      attention_output_bias: o has a bias.
      mlp_bias: gate, up and down have biases.
      qk_norm: each head of q and k is normalised before rope.
      norm_plus_one: norms multiply by 1 + w.
      norm_scale_after_cast: norms cast to the activations' dtype first and multiply by w then
        (llama); False multiplies in float32 and casts the product (gemma).
      post_norms: norms also after attention and after the mlp.
      embedding_scale: multiplies the embeddings (transformers rounds it to the weights' dtype); None for 1.
      attention_scale: multiplies q k^T.
      attn_logit_softcapping: c in c tanh(logits / c); None for no cap.
      final_logit_softcapping: the same for the logits of the vocabulary, where a read-out takes those.
      sliding_window: w: a sliding layer sees keys at distance 0 to w - 1. None when there is none.
      layer_windows: for each layer, whether it slides.
      rope: (full layers, sliding layers); the second is None where both are the same.
      max_position_embeddings: context length in tokens.
      num_labels: outputs of the score head.
      pad_token_id, tie_word_embeddings, architectures: as in the file.
      torch_dtype: dtype the weights were saved in, or None.
      ignored_keys: fields that have no meaning for this family, in transformers as here; to be reported.
      original: the raw JSON object.
      head: the read-out; as parsed, the linear one of ``*ForSequenceClassification``
        (:func:`prb_jax.readouts.resolve.resolve_model` finds others).
      layout: names of the checkpoint's tensors.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_activation: Activation
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_plus_one: bool
    norm_scale_after_cast: bool
    post_norms: bool
    embedding_scale: float | None
    attention_scale: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    sliding_window: int | None
    layer_windows: tuple[bool, ...]
    rope: tuple[RopeConfig, RopeConfig | None]
    max_position_embeddings: int
    num_labels: int
    pad_token_id: int | None
    tie_word_embeddings: bool
    architectures: tuple[str, ...]
    torch_dtype: str | None
    ignored_keys: tuple[str, ...] = ()
    original: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    head: Head = LINEAR
    layout: Layout = STANDARD

    __repr__ = short_repr

    @property
    def default_dtype(self) -> str:
        """In which the model is run if nothing else is asked for: as it was saved, bfloat16 for float16."""
        return choose_dtype(None, self.torch_dtype, where=self.model_type)

    @property
    def attention_length(self) -> int:
        """Context length at which a token's attention costs as many FLOPs as the matrices of its layer."""
        heads, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        matrices = self.hidden_size * (2 * heads + 2 * kv + 3 * self.intermediate_size)
        return max(1, matrices // (2 * heads))


def load_config(folder: str | Path) -> DecoderConfig:
    """Parse ``config.json`` of a reward model's folder.

    Raises:
      CheckpointError: the file is missing, is not a JSON object, is that of a language model, or
        :func:`parse_config` refuses it.
    """
    path = Path(folder) / "config.json"
    config = parse_config(read_raw_config(folder), where=str(path))
    refuse_language_model(config, where=str(path))
    return config


def refuse_language_model(config: DecoderConfig, *, where: str) -> None:
    """Refuse a model without a score head.

    Raises:
      CheckpointError: the configuration names the class of a language model.
    """
    family = FAMILIES[config.model_type]
    if family.language_model in config.architectures[:1]:
        raise CheckpointError(
            f"{where}: '{family.language_model}' is a causal language model, not a reward model: it has no score "
            f"head, and one made up at random would give meaningless scores. Expected {family.architecture}; if its "
            "reward is a logit of its vocabulary, name it: --readout vocabulary:ID; if it was exported by "
            "LLaMA-Factory or TRL, the file value_head.safetensors or value_head.bin is missing beside its weights; "
            "`prb train ... init_head=true` trains a new head"
        )


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """The JSON object in ``config.json`` of a model folder.

    Raises:
      CheckpointError: the file is missing, or is not a JSON object.
    """
    path = Path(folder) / "config.json"
    hint = "" if path.exists() else "expected a model folder"
    return read_object(path, error=CheckpointError, hint=hint)


def parse_config(raw: dict[str, Any], *, where: str) -> DecoderConfig:
    """The configuration that a raw ``config.json`` object describes, in either spelling.

    That of a language model (``*ForCausalLM``) is parsed as that of the reward model with its body.

    Args:
      raw: the JSON object (of transformers 4 or 5).
      where: what error messages start with, usually the path.

    Raises:
      CheckpointError: unknown architecture or rope type, quantised weights, a field that is missing,
        mistyped or inconsistent, or one that would change numbers in a way this decoder does not follow.
    """
    fields = FieldReader(raw, where=where)
    family = _family(fields)
    refuse_unless_neutral(fields, _ONLY_NEUTRAL)
    defaults = family.defaults

    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kv_heads = (
        fields.optional_integer("num_key_value_heads", default=defaults["num_key_value_heads"]) or heads
    )
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads ({heads})", found=kv_heads
        )
    head_dim = _head_dim(fields, family, hidden_size=hidden_size, heads=heads)
    max_positions = fields.integer("max_position_embeddings", default=defaults["max_position_embeddings"])
    sliding_window, layer_windows = _layer_windows(fields, family, layers=layers)
    attention_bias = (
        fields.flag("attention_bias", default=False) if family.bias == "field" else family.bias == "qkv"
    )

    return DecoderConfig(
        model_type=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=defaults["rms_norm_eps"], maximum=LARGEST_EPSILON),
        hidden_activation=_activation(fields, family),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and family.bias == "field",
        mlp_bias=family.mlp_bias_field and fields.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        norm_plus_one=family.gemma,
        norm_scale_after_cast=not family.gemma,
        post_norms=family.post_norms,
        embedding_scale=hidden_size**0.5 if family.gemma else None,
        attention_scale=_attention_scale(fields, family, head_dim=head_dim),
        attn_logit_softcapping=_softcap(fields, family),
        final_logit_softcapping=fields.optional_number(
            "final_logit_softcapping", default=family.defaults["final_logit_softcapping"]
        )
        if family.softcaps_vocabulary
        else None,
        sliding_window=sliding_window,
        layer_windows=layer_windows,
        rope=_rope(fields, family, head_dim=head_dim, max_position_embeddings=max_positions),
        max_position_embeddings=max_positions,
        num_labels=parse_num_labels(fields),
        pad_token_id=fields.optional_integer("pad_token_id", default=defaults["pad_token_id"], minimum=None),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=defaults["tie_word_embeddings"]),
        architectures=parse_architectures(fields),
        torch_dtype=parse_dtype(fields),
        ignored_keys=tuple(sorted(set(raw) - fields.read - WITHOUT_EFFECT)),
        original=copy.deepcopy(raw),
    )


def _family(fields: FieldReader) -> Family:
    model_type = fields.text("model_type")
    architectures = parse_architectures(fields)
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    named = architectures[0] if architectures else None
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(
            f"{fields.where}: unknown architecture: model_type '{model_type}'"
            f"{f' ({named})' if named else ''}. Supported: {supported}"
        )
    if named not in (None, family.architecture, family.language_model):
        raise CheckpointError(
            f"{fields.where}: unknown architecture '{named}' for model_type '{model_type}': "
            f"expected '{family.architecture}', or a class of the table of reward models; if you know that its "
            "head is one of that table, name the row with --readout"
            + (
                " (code of its repository, which auto_map names, is never run)"
                if fields.has("auto_map")
                else ""
            )
        )
    return family


def _head_dim(fields: FieldReader, family: Family, *, hidden_size: int, heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", default=family.defaults["head_dim"])
    if head_dim is not None:
        return head_dim
    if hidden_size % heads:
        raise fields.error(
            "hidden_size", f"a multiple of num_attention_heads ({heads}), as head_dim is not given"
        )
    return hidden_size // heads


def _activation(fields: FieldReader, family: Family) -> Activation:
    # Files of Gemma since 2 may also hold the older 'hidden_act', which transformers does not read for them.
    name = "hidden_activation" if family.post_norms else "hidden_act"
    found = fields.text(name, default="gelu_pytorch_tanh" if family.gemma else "silu")
    if family.gemma and not family.post_norms and found == "gelu":
        found = "gelu_pytorch_tanh"  # what the first Gemma's files mean by it, as in transformers
    if found not in _ACTIVATIONS:
        raise fields.error(name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


def _attention_scale(fields: FieldReader, family: Family, *, head_dim: int) -> float:
    if not family.post_norms:
        return head_dim**-0.5
    return fields.number("query_pre_attn_scalar", default=family.defaults["query_pre_attn_scalar"]) ** -0.5


def _softcap(fields: FieldReader, family: Family) -> float | None:
    name = "attn_logit_softcapping"
    if family.softcaps_attention:
        return fields.optional_number(name, default=family.defaults[name])
    if family.gemma and fields.has(name):
        # transformers stores it for Gemma 3 but never applies it: which one the weights want is unknown.
        raise fields.error(name, "null, as transformers does not apply it in this family")
    return None


def _rope(
    fields: FieldReader, family: Family, *, head_dim: int, max_position_embeddings: int
) -> tuple[RopeConfig, RopeConfig | None]:
    if not family.local_rope:
        only = parse_rope(
            fields,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            default_theta=family.defaults["rope_theta"],
        )
        return only, None
    return parse_rope_per_layer_type(
        fields,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        default_theta=family.defaults["rope_theta"],
        default_local=family.defaults["rope_local_base_freq"],
    )


def _layer_windows(
    fields: FieldReader, family: Family, *, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window in tokens (None: none) and, for each layer, whether it attends to that alone."""
    if family.windows == "none":
        return None, (False,) * layers
    default = family.defaults["sliding_window"]
    window = fields.optional_integer("sliding_window", default=default)
    if family.windows == "upper" and not fields.flag("use_sliding_window", default=False):
        window = None
    slides = _listed_windows(fields, layers=layers)

    if family.windows == "every":
        uniform = (window is not None,) * layers
        if slides is not None and slides != uniform:
            # transformers warns and then ignores the list for this family.
            kind = "sliding_attention" if window is not None else "full_attention"
            raise fields.error(
                "layer_types", f"'{kind}' for every layer (as sliding_window says), or no such field"
            )
        return window, uniform
    if slides is None and family.windows == "upper":
        first = fields.integer("max_window_layers", default=family.defaults["max_window_layers"], minimum=0)
        slides = tuple(window is not None and layer >= first for layer in range(layers))
    elif slides is None:
        period = family.window_period
        if family.local_rope:
            period = fields.integer("sliding_window_pattern", default=period)
        slides = tuple((layer + 1) % period != 0 for layer in range(layers))
    if window is None and any(slides):
        raise fields.error("sliding_window", "a number of tokens, as some layers have a sliding window")
    return window, slides


def _listed_windows(fields: FieldReader, *, layers: int) -> tuple[bool, ...] | None:
    """The field ``layer_types`` as flags, or None where it is absent."""
    listed = fields.value("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list) or any(str(kind) not in _SLIDES for kind in listed):
        raise fields.error("layer_types", f"a list of {' and '.join(repr(kind) for kind in _SLIDES)}")
    if len(listed) != layers:
        raise fields.error(
            "layer_types", f"{layers} entries (num_hidden_layers)", found=f"{len(listed)} entries"
        )
    return tuple(_SLIDES[kind] for kind in listed)
