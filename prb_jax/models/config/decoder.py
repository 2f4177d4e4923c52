"""Configuration of a decoder, parsed from the raw ``config.json`` of a Hugging Face checkpoint.

The raw file is read instead of transformers' classes, because those accept unknown values. Here an unknown
architecture, rope type, or field value that would change numbers raises an error that names it. Absent fields get the
default of transformers for the family.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prb_jax.errors import CheckpointError, short_repr
from prb_jax.models.config.family import (
    ATTENTION,
    BESIDE_VISION,
    EXPERTS,
    MLP,
    RECURRENT,
    Family,
    Kind,
    Norms,
    known_families,
    layer_kinds,
)
from prb_jax.models.config.fields import (
    LARGEST_EPSILON,
    MOST_LAYERS,
    WITHOUT_EFFECT,
    FieldReader,
    choose_dtype,
)
from prb_jax.models.head import LINEAR, Head
from prb_jax.models.layers import Activation, RopeConfig, parse_ropes
from prb_jax.platform.paths import folder_hint
from prb_jax.records.reading import read_object
from prb_jax.seams import get
from prb_jax.text.template import PLACEHOLDERS

if TYPE_CHECKING:
    from prb_jax.models.config.experts import Experts
    from prb_jax.models.config.recurrence import Recurrence

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh",
}  # fmt: skip
# Fields that change scores unless they have this value (or are null).
_ONLY_NEUTRAL: Mapping[str, Any] = {
    "partial_rotary_factor": 1, "per_layer_config": {}, "use_bidirectional_attention": False, "is_causal": True,
    "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """Names of a checkpoint's tensors."""

    style: Literal["transformers", "internlm2"] = "transformers"  # code base that defines the body's names
    prefix: str = "model."  # prefix of the body's names
    side_files: tuple[tuple[str, str], ...] = ()
    """Files beside the weights with further tensors, each with a prefix for its names. Files that do not exist are
    skipped."""
    ignored: tuple[tuple[str, str], ...] = ()
    """Regular expressions of names that are ignored, each with the reason."""


STANDARD = WeightLayout()  # layout of a ``*ForSequenceClassification`` of transformers


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder with a score head. Hashable; comparison ignores ``original``."""

    model_type: str  # family, e.g. ``llama``
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # G
    head_dim: int  # H
    rms_norm_eps: float  # added to the mean square in every norm
    hidden_activation: Activation  # activation of the gated mlp; a plug-in's layer may have another one
    attention_bias: bool  # q, k and v have biases
    attention_output_bias: bool  # o has a bias
    mlp_bias: bool  # gate, up and down have biases
    qk_norm: Literal["head", "width"] | None  # q and k are normalised before rope, per head or over all heads
    norm_plus_one: bool  # norms multiply by 1 + w
    norm_scale_after_cast: bool
    """If True, norms cast to the activations' dtype and then multiply by w (llama); if False, they multiply in float32
    and cast the product (gemma)."""
    norms: Norms  # norms of a layer
    embedding_scale: float | None
    """Factor of the embeddings (transformers rounds it to the weights' dtype); None for 1."""
    attention_scale: float  # factor of q k^T
    attn_logit_softcapping: float | None  # c in c tanh(logits / c); None for no cap
    final_logit_softcapping: float | None  # the same for the logits of the vocabulary
    sliding_window: (
        int | None
    )  # w: a sliding layer sees keys at distance 0 to w - 1; None without sliding layers
    layer_windows: tuple[bool, ...]  # True for each sliding layer
    layer_rotates: tuple[bool, ...]  # True for each layer with a rotary embedding
    layer_mixers: tuple[str, ...]
    """Mixer of each layer: ``full_attention`` (also for sliding layers) or ``linear_attention``."""
    recurrence: Recurrence | None  # sizes of ``linear_attention`` layers; None without such layers
    attention_gate: bool  # the attention output is multiplied by the sigmoid of a projection of the input
    rope: tuple[RopeConfig, RopeConfig | None]  # (full, sliding layers); the second is None if both are equal
    interleaved_rope: (
        bool  # rotated pairs are adjacent channels; otherwise they are half the rotated channels apart
    )
    fused: tuple[str, ...]  # fused tensors in the file: ``qkv_proj`` and ``gate_up_proj``
    sinks: bool  # each head has an attention sink: an extra softmax logit without a value
    experts: Experts | None  # the mlp is a mixture of experts
    fields: tuple[tuple[str, Any], ...]  # names and values of fields that only a plug-in's layer reads
    max_position_embeddings: int  # context length in tokens
    num_labels: int  # outputs of the score head
    pad_token_id: int | None
    tie_word_embeddings: bool
    architectures: tuple[str, ...]
    torch_dtype: str | None  # dtype of the saved weights, if the file names it
    ignored_keys: tuple[str, ...] = ()
    """Fields without meaning for this family, here and in transformers; reported to the user."""
    original: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the raw JSON object
    head: Head = LINEAR
    """Read-out; parsing sets the linear head of ``*ForSequenceClassification``
    (:func:`prb_jax.models.readouts.open_model.resolve_model` finds others)."""
    layout: WeightLayout = STANDARD

    __repr__ = short_repr

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Parts of each layer."""
        experts = self.experts
        return tuple(
            (mixer, MLP if experts is None or layer in experts.dense else EXPERTS)
            for layer, mixer in enumerate(self.layer_mixers)
        )

    @property
    def active_mlps(self) -> Mapping[str, int]:
        """Width of the mlp for one token, summed over its experts, by part of a layer."""
        return {MLP: self.intermediate_size, EXPERTS: 0 if self.experts is None else self.experts.active}

    @property
    def head_counts(self) -> dict[str, int]:
        """Numbers of heads by field; a mesh never splits a head."""
        counts = {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
        }
        if self.recurrence is not None:
            counts |= {"linear_num_key_heads": self.recurrence.key_heads}
            counts |= {"linear_num_value_heads": self.recurrence.value_heads}
        return counts

    @property
    def rope_switch(self) -> int | None:
        """Tokens up to which conversations have the usual rotary angles; longer ones have others from their first
        token on. None if all have the same."""
        lengths = [rope.original_max_position_embeddings for rope in self.rope if rope and rope.long_factor]
        return min(lengths) if lengths and min(lengths) < self.max_position_embeddings else None

    @property
    def taps(self) -> int | None:
        """Tokens that the convolution of recurrent layers sees; None without such layers."""
        return None if self.recurrence is None else self.recurrence.taps

    @property
    def default_dtype(self) -> str:
        """Default dtype of the model: the saved dtype, or bfloat16 for float16."""
        return choose_dtype(None, self.torch_dtype, where=self.model_type)


def load_config(folder: str | Path) -> DecoderConfig:
    """Parse ``config.json`` of a reward model's folder.

    Raises:
      CheckpointError: The file is missing, is not a JSON object, describes a language model, or
        :func:`parse_config` refuses it.
    """
    path = Path(folder) / "config.json"
    config = parse_config(read_raw_config(folder), where=str(path))
    refuse_language_model(config, where=str(path))
    return config


def refuse_language_model(config: DecoderConfig, *, where: str) -> None:
    """Reject a model without a score head.

    Raises:
      CheckpointError: The configuration names the class of a language model.
    """
    family = known_families()[config.model_type]
    if family.language_model in config.architectures[:1]:
        raise CheckpointError(
            f"{where}: '{family.language_model}' is a causal language model, not a reward model: it has no score "
            f"head, and a random one would give meaningless scores. Expected {family.architecture}; if its "
            "reward is a logit of its vocabulary, name it: --readout vocabulary:ID; if it was exported by "
            "LLaMA-Factory or TRL, the file value_head.safetensors or value_head.bin is missing beside its weights; "
            "`prb train ... init_head=true` trains a new head"
        )


def no_model(folder: str | Path) -> CheckpointError:
    """Return the error for a folder without a config."""
    hint = folder_hint(Path(folder))
    return CheckpointError(f"{folder}: expected a model folder, found no config.json in it{hint}")


def read_raw_config(folder: str | Path) -> dict[str, Any]:
    """Return the JSON object in ``config.json`` of a model folder, after type checks of the fields that are read
    before the family is known.

    Raises:
      CheckpointError: The file is missing or is not a JSON object, or a field has another type.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise no_model(folder)
    raw = read_object(path, error=CheckpointError, finite=False)
    fields = FieldReader(raw, str(path))
    fields.architectures()
    if fields.has("model_type"):
        fields.text("model_type")
    for name in PLACEHOLDERS:
        fields.optional_integer(name, minimum=None)
    for name in ("auto_map", "text_config", "rope_scaling", "rope_parameters"):
        if fields.has(name) and not isinstance(raw[name], Mapping):
            raise fields.error(name, "an object")
    return _text_part(raw, where=str(path))


def _text_part(raw: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return the text model's part of a ``config.json``: of a model with a vision tower it is an object within."""
    has_tower = raw.get("model_type") in BESIDE_VISION
    return get("models", "text part").value(raw, where=where) if has_tower else raw


def parse_config(raw: dict[str, Any], *, where: str) -> DecoderConfig:
    """Parse a raw ``config.json`` object of transformers 4 or 5.

    The configuration of a language model (``*ForCausalLM``) is parsed as a reward model with the same body.

    Args:
      raw: JSON object.
      where: Prefix of error messages, usually the path.

    Raises:
      CheckpointError: The architecture or rope type is unknown, the weights are quantised, or a field is missing,
        mistyped, inconsistent, or would change numbers in a way this decoder does not support.
    """
    raw = _text_part(raw, where=where)
    fields = FieldReader(raw, where)
    model_type, named = fields.text("model_type"), next(iter(fields.architectures()), None)
    family = known_families().get(model_type)
    if family is None or named not in (None, family.architecture, family.language_model):
        raise get("models", "unknown architecture").value(fields, family, named)
    absent = family.defaults
    fields.refuse_unless({name: value for name, value in _ONLY_NEUTRAL.items() if name not in absent})
    if family.attention_gate:
        fields.refuse_unless({"attn_output_gate": True})

    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kv_heads = fields.optional_integer("num_key_value_heads", default=absent["num_key_value_heads"]) or heads
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"a divisor of num_attention_heads ({heads})", found=kv_heads
        )
    head_dim = fields.optional_integer("head_dim", default=absent["head_dim"])
    if head_dim is None and hidden_size % heads:
        raise fields.error(
            "hidden_size", f"a multiple of num_attention_heads ({heads}), as head_dim is not given"
        )
    head_dim = head_dim or hidden_size // heads
    longest = fields.integer("max_position_embeddings", default=absent["max_position_embeddings"])
    kinds = layer_kinds(fields, family, layers=layers)
    mixers, recurrence, experts = (ATTENTION,) * layers, None, None
    if family.recurrent:
        mixers = get("recurrent layers", "mixers").value(fields, family, layers=layers)
        recurrence = get("recurrent layers", "sizes").value(fields, family) if RECURRENT in mixers else None
    if family.experts is not None:
        experts = get("experts", "sizes").value(fields, family.experts, absent, layers=layers)
    ropes = parse_ropes(fields, family, head_dim=head_dim, longest=longest)
    attention_scale, final_cap = head_dim, None
    if "query_pre_attn_scalar" in absent:
        attention_scale = fields.number("query_pre_attn_scalar", default=absent["query_pre_attn_scalar"])
    if family.softcaps_vocabulary:
        final_cap = fields.optional_number(
            "final_logit_softcapping", default=absent["final_logit_softcapping"]
        )

    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", default=absent.get("intermediate_size")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=absent["rms_norm_eps"], maximum=LARGEST_EPSILON),
        hidden_activation=_activation(fields, family),
        attention_bias=_has_bias(fields, family.qkv_bias, family),
        attention_output_bias=_has_bias(fields, family.output_bias, family),
        mlp_bias=_has_bias(fields, family.mlp_bias, family),
        qk_norm=family.qk_norm,
        norm_plus_one=family.gemma or family.centred_norms,
        norm_scale_after_cast=not (family.gemma or family.centred_norms or family.wide_norms),
        norms=family.norms,
        embedding_scale=hidden_size**0.5 if family.gemma else None,
        attention_scale=attention_scale**-0.5,
        attn_logit_softcapping=_attention_softcap(fields, family),
        final_logit_softcapping=final_cap,
        sliding_window=kinds.window,
        layer_windows=kinds.slides,
        layer_rotates=kinds.rotates,
        layer_mixers=mixers,
        recurrence=recurrence,
        attention_gate=family.attention_gate,
        rope=ropes,
        interleaved_rope=family.interleaved_rope,
        fused=family.fused,
        sinks=family.sinks,
        experts=experts,
        fields=tuple((name, fields.like(name, default=value)) for name, value in family.fields.items()),
        max_position_embeddings=longest,
        num_labels=fields.num_labels(),
        pad_token_id=fields.optional_integer("pad_token_id", default=absent["pad_token_id"], minimum=None),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=absent["tie_word_embeddings"]),
        architectures=fields.architectures(),
        torch_dtype=fields.dtype(),
        ignored_keys=tuple(sorted(set(raw) - fields.read - WITHOUT_EFFECT)),
        original=copy.deepcopy(raw),
    )


def _has_bias(fields: FieldReader, said: bool | str, family: Family) -> bool:
    return said if isinstance(said, bool) else fields.flag(said, default=family.defaults.get(said, False))


def _activation(fields: FieldReader, family: Family) -> Any:
    if family.activation is not None:
        if fields.text("hidden_act", default=family.activation) != family.activation:
            raise fields.error("hidden_act", family.activation)
        return family.activation
    # Files of Gemma 2 and later may also contain the older 'hidden_act', which transformers ignores for them.
    name = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    activation = fields.text(name, default="gelu_pytorch_tanh" if family.gemma else "silu")
    if family.gemma and name == "hidden_act" and activation == "gelu":
        activation = (
            "gelu_pytorch_tanh"  # meaning of the value in files of the first Gemma, as in transformers
        )
    if activation not in _ACTIVATIONS:
        raise fields.error(name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _attention_softcap(fields: FieldReader, family: Family) -> float | None:
    name = "attn_logit_softcapping"
    if family.softcaps_attention:
        return fields.optional_number(name, default=family.defaults[name])
    if family.gemma and fields.has(name):
        # transformers stores the field for Gemma 3 but never applies it, so the intended value is unknown.
        raise fields.error(name, "null, as transformers does not apply it in this family")
    return None
