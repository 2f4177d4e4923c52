"""Configuration of an encoder, parsed from the raw ``config.json`` of a Hugging Face checkpoint.

As for decoders (:mod:`prb_jax.models.config.decoder`), an unsupported value that would change numbers raises an error
that names the field. Absent fields get the default of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prb_jax.errors import CheckpointError, short_repr
from prb_jax.models.config.family import ENCODERS
from prb_jax.models.config.fields import LARGEST_EPSILON, MOST_LAYERS, WITHOUT_EFFECT, FieldReader
from prb_jax.models.encoder_layers import ACTIVATIONS, EncoderActivation
from prb_jax.models.head import Head
from prb_jax.models.layers import RopeConfig

_IGNORED = (
    (r"(.*\.)?position_ids", "counts the positions"),
    (r"(bert\.)?pooler\..*", "pooler, not used for embeddings"),
    (
        r"(cls|lm_predictions|mask_predictions|classifier)\..*",
        "head of another task, not used for embeddings",
    ),
)
_IGNORED_BESIDE_MODERN = (
    (r"(head|decoder|classifier)\..*", "head of another task, not used for embeddings"),
)
_UNUSED_POSITIONS = (
    (r"(deberta\.)?embeddings\.position_embeddings\.weight", "config.json says that there are no absolute positions"),
)  # fmt: skip

# Fields that cannot change an embedding: dropout, and BERT's fields for other tasks.
_OTHER_TASKS = """
attention_probs_dropout_prob hidden_dropout_prob classifier_dropout pooler_dropout cls_dropout gradient_checkpointing
directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type legacy
tie_word_embeddings num_labels id2label architectures summary_type summary_use_proj summary_activation
summary_first_dropout pooler_hidden_size pooler_hidden_act is_decoder conv_act conv_groups pooling
classifier_pooling classifier_bias classifier_activation decoder_bias sparse_prediction sparse_pred_ignore_index
embedding_dropout mlp_dropout initializer_cutoff_factor cls_token_id reference_compile deterministic_flash_attn
repad_logits_with_grad
"""
_WITHOUT_EFFECT = WITHOUT_EFFECT | frozenset(_OTHER_TASKS.split())
_ONLY_NEUTRAL: Mapping[str, Any] = {
    "is_decoder": False, "is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {},
    "position_embedding_type": "absolute",
    # The convolution in the first layer of DeBERTa-v2-xlarge and -xxlarge.
    "conv_kernel_size": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """DeBERTa's disentangled attention (He et al., 2021): scores from distances in addition to contents."""

    buckets: int
    """Distances beyond half of this are bucketed by their logarithm; 0 gives every distance a separate embedding."""
    max_distance: int  # larger distances are clamped to this value
    content_to_position: bool  # this term is part of the scores; same for the next field
    position_to_content: bool
    shared: bool  # distances use the query and key matrices of the contents
    normed: bool  # a layer norm is applied to the embeddings of distances

    @property
    def span(self) -> int:
        """Half the number of distance embeddings."""
        return self.buckets or self.max_distance


LATER = "later"
"""Part of every layer except the first."""


@dataclass(frozen=True, kw_only=True)
class Modern:
    """Differences of ModernBERT from BERT: norms before each block, a gated mlp, rotary positions."""

    slides: tuple[bool, ...]  # True for each layer that attends only to near tokens
    reach: int  # largest distance of a near token, on both sides
    rope: tuple[RopeConfig, RopeConfig]  # full, sliding layers
    attention_bias: bool  # q, k, v and o have biases; same for the next two fields
    mlp_bias: bool
    norm_bias: bool
    mean_pooled: bool  # the head reads the mean of a text's states instead of the first one


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One encoder with attention in both directions. Hashable."""

    model_type: str  # ``bert``, ``deberta-v2`` or ``modernbert``
    vocab_size: int  # V
    embedding_size: int  # E
    hidden_size: int  # D
    intermediate_size: int  # F
    num_hidden_layers: int
    num_attention_heads: int  # N
    layer_norm_eps: float  # added to the variance in every norm
    hidden_activation: EncoderActivation  # activation of the mlp
    max_position_embeddings: int  # maximum text length in tokens
    absolute_positions: bool  # the model has position embeddings
    type_vocab_size: int  # number of token types; 0 for none
    relative: RelativePositions | None  # distances in attention; None without them
    modern: Modern | None = None  # layers of ModernBERT; None for layers of BERT
    pad_token_id: int | None
    num_labels: int  # outputs of the head; 0 without one
    architectures: tuple[str, ...]
    torch_dtype: str | None
    ignored_keys: tuple[str, ...] = ()  # fields without meaning here; reported to the user
    original: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the raw JSON object
    head: Head | None = None  # read-out of a reward model; None for an encoder of single texts
    prefix: str = ""  # prefix of the body's tensor names
    norm_names: tuple[str, str] = ("weight", "bias")  # names of the two tensors of a layer norm

    __repr__ = short_repr

    @property
    def head_dim(self) -> int:
        """H, the width of each attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layers_name(self) -> str:
        """Name of the list of layers in a checkpoint."""
        return "encoder.layer" if self.modern is None else "layers"

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """Parts of each layer."""
        return tuple((LATER,) if layer else () for layer in range(self.num_hidden_layers))

    @property
    def ignored(self) -> tuple[tuple[str, str], ...]:
        """Patterns of tensors that are not loaded, each with the reason."""
        if self.modern is not None:
            return _IGNORED_BESIDE_MODERN
        return _IGNORED if self.absolute_positions else _UNUSED_POSITIONS + _IGNORED

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token: twice the number of weights in the layers' matrices."""
        width, matrices = self.hidden_size, 2 if self.modern is None else 3
        return 2.0 * self.num_hidden_layers * width * (4 * width + matrices * self.intermediate_size)


def refuse_for_encoder(where: str, **options: object) -> None:
    """Reject options that apply only to decoders.

    Args:
      where: Name of the model, for messages.
      options: Options by name; None if not given.

    Raises:
      CheckpointError: One of the options is given.
    """
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise CheckpointError(
            f"{where}: an encoder, which reads prompt and response as a pair of texts: leave out {', '.join(given)}"
        )


def parse_encoder_config(raw: Mapping[str, Any], *, where: str) -> EncoderConfig:
    """Parse the encoder, without a head, from a raw ``config.json`` object.

    Args:
      raw: JSON object.
      where: Prefix of error messages, usually the path.

    Raises:
      CheckpointError: The architecture is not an encoder, or a field is missing, mistyped, inconsistent, or would
        change numbers in an unsupported way.
    """
    fields = FieldReader(raw, where)
    model_type = fields.text("model_type")
    if model_type not in ENCODERS:
        raise fields.error("model_type", f"an encoder, one of {', '.join(ENCODERS)}")
    fields.refuse_unless(_ONLY_NEUTRAL)
    bert, modern = model_type == "bert", model_type == "modernbert"
    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if hidden_size % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("attention_head_size", default=hidden_size // heads)
    if head_dim != hidden_size // heads:
        raise fields.error(
            "attention_head_size", f"{hidden_size // heads}, hidden_size / num_attention_heads"
        )
    act = "hidden_activation" if modern else "hidden_act"
    activation = fields.text(act, default="gelu")
    if activation not in ACTIVATIONS:
        raise fields.error(act, f"one of {', '.join(ACTIVATIONS)}")
    max_positions = fields.integer("max_position_embeddings", default=8192 if modern else 512)
    eps, default = ("norm_eps", 1e-5) if modern else ("layer_norm_eps", 1e-12 if bert else 1e-7)
    layers = fields.integer("num_hidden_layers", maximum=MOST_LAYERS)
    kinds = 0 if modern else fields.integer("type_vocab_size", default=2 if bert else 0, minimum=0)
    relative = None if bert or modern else _relative_positions(fields, max_positions=max_positions)
    return EncoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        embedding_size=hidden_size
        if bert or modern
        else fields.integer("embedding_size", default=hidden_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        layer_norm_eps=fields.number(eps, default=default, maximum=LARGEST_EPSILON),
        hidden_activation=ACTIVATIONS[activation],
        max_position_embeddings=max_positions,
        absolute_positions=bert or (not modern and fields.flag("position_biased_input", default=True)),
        type_vocab_size=kinds,
        relative=relative,
        modern=_modern(fields, layers=layers, head_dim=head_dim) if modern else None,
        pad_token_id=fields.optional_integer("pad_token_id", default=50_283 if modern else 0, minimum=None),
        num_labels=fields.num_labels(),
        architectures=fields.architectures(),
        torch_dtype=fields.dtype(),
        ignored_keys=tuple(sorted(set(raw) - fields.read - _WITHOUT_EFFECT)),
        original=copy.deepcopy(dict(raw)),
    )


def _modern(fields: FieldReader, *, layers: int, head_dim: int) -> Modern:
    fields.refuse_unless({"head_dim": head_dim, "rope_scaling": None})
    local = fields.integer("local_attention", default=128)
    fields.refuse_unless({"sliding_window": local // 2})
    period = fields.integer("global_attn_every_n_layers", default=3)
    kinds = fields.value("layer_types")
    if kinds is None:
        kinds = [_KINDS_OF_LAYERS[bool(layer % period)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {*_KINDS_OF_LAYERS}:
        raise fields.error("layer_types", f"{layers} entries of {' and '.join(_KINDS_OF_LAYERS)}")
    pooling = fields.text("classifier_pooling", default="cls")
    if pooling not in ("cls", "mean"):
        raise fields.error("classifier_pooling", "cls or mean")
    ropes = fields.value("rope_parameters") or {}
    if not isinstance(ropes, Mapping) or not set(ropes) <= {*_KINDS_OF_LAYERS}:
        raise fields.error("rope_parameters", f"objects {' and '.join(_KINDS_OF_LAYERS)}")

    def rope(kind: str, older: str, default: float) -> RopeConfig:
        inner = ropes.get(kind) or {}
        if not isinstance(inner, Mapping):
            raise fields.error("rope_parameters", f"an object as '{kind}'", found=inner)
        own = FieldReader(inner, fields.where, f"rope_parameters.{kind}.")
        own.refuse_unless({"rope_type": "default"})
        if unknown := sorted(set(inner) - {"rope_type", "rope_theta"}):
            raise own.error(unknown[0], "no such field")
        theta = own.number("rope_theta", default=fields.number(older, default=default))
        if fields.has(older) and theta != fields.number(older):
            raise own.error("rope_theta", f"the same value as '{older}'")
        return RopeConfig(rope_type="default", theta=theta, rotary_dim=head_dim)

    return Modern(
        slides=tuple(kind == _KINDS_OF_LAYERS[1] for kind in kinds),
        reach=local // 2,
        rope=(
            rope("full_attention", "global_rope_theta", 160_000.0),
            rope("sliding_attention", "local_rope_theta", 10_000.0),
        ),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        norm_bias=fields.flag("norm_bias", default=False),
        mean_pooled=pooling == "mean",
    )


_KINDS_OF_LAYERS = ("full_attention", "sliding_attention")


def _relative_positions(fields: FieldReader, *, max_positions: int) -> RelativePositions | None:
    terms = fields.value("pos_att_type") or []
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|") if term.strip()]
    if not isinstance(terms, list) or not all(term in ("c2p", "p2c") for term in terms):
        raise fields.error("pos_att_type", "c2p, p2c, both or neither")
    norms = {part.strip() for part in fields.text("norm_rel_ebd", default="none").lower().split("|")}
    if not norms <= {"none", "layer_norm"}:
        raise fields.error("norm_rel_ebd", "none or layer_norm")
    shared = fields.flag("share_att_key", default=False)
    distance = fields.integer("max_relative_positions", default=-1, minimum=None)
    buckets = fields.integer("position_buckets", default=-1, minimum=None)
    if not fields.flag("relative_attention", default=False):
        if terms:
            raise fields.error("pos_att_type", "none, as relative_attention is not set", found=terms)
        return None
    return RelativePositions(
        buckets=max(buckets, 0),
        max_distance=distance if distance >= 1 else max_positions,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        shared=shared,
        normed="layer_norm" in norms,
    )
