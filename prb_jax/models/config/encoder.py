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
from prb_jax.models.config.families import ENCODERS
from prb_jax.models.config.fields import LARGEST_EPSILON, MOST_LAYERS, WITHOUT_EFFECT, FieldReader
from prb_jax.models.head import Head
from prb_jax.models.layers import ACTIVATIONS, EncoderActivation

_IGNORED = (
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

# Fields that cannot change an embedding: dropout, and BERT's fields for other tasks.
_OTHER_TASKS = """
attention_probs_dropout_prob hidden_dropout_prob classifier_dropout pooler_dropout cls_dropout gradient_checkpointing
directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type legacy
tie_word_embeddings num_labels id2label architectures summary_type summary_use_proj summary_activation
summary_first_dropout pooler_hidden_size pooler_hidden_act is_decoder conv_act conv_groups pooling
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


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One encoder: layer norms after each block, attention in both directions. Hashable."""

    model_type: str  # ``bert`` or ``deberta-v2``
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
    def ignored(self) -> tuple[tuple[str, str], ...]:
        """Patterns of tensors that are not loaded, each with the reason."""
        return _IGNORED if self.absolute_positions else _UNUSED_POSITIONS + _IGNORED

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token: twice the number of weights in the layers' matrices."""
        width = self.hidden_size
        return 4.0 * self.num_hidden_layers * width * (2 * width + self.intermediate_size)


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
    bert = model_type == "bert"
    hidden_size = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    if hidden_size % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads})")
    head_dim = fields.integer("attention_head_size", default=hidden_size // heads)
    if head_dim != hidden_size // heads:
        raise fields.error(
            "attention_head_size", f"{hidden_size // heads}, hidden_size / num_attention_heads"
        )
    activation = fields.text("hidden_act", default="gelu")
    if activation not in ACTIVATIONS:
        raise fields.error("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    max_positions = fields.integer("max_position_embeddings", default=512)
    relative = None if bert else _relative_positions(fields, max_positions=max_positions)
    return EncoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        embedding_size=hidden_size if bert else fields.integer("embedding_size", default=hidden_size),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers", maximum=MOST_LAYERS),
        num_attention_heads=heads,
        layer_norm_eps=fields.number(
            "layer_norm_eps", default=1e-12 if bert else 1e-7, maximum=LARGEST_EPSILON
        ),
        hidden_activation=ACTIVATIONS[activation],
        max_position_embeddings=max_positions,
        absolute_positions=bert or fields.flag("position_biased_input", default=True),
        type_vocab_size=fields.integer("type_vocab_size", default=2 if bert else 0, minimum=0),
        relative=relative,
        pad_token_id=fields.optional_integer("pad_token_id", default=0, minimum=None),
        num_labels=fields.num_labels(),
        architectures=fields.architectures(),
        torch_dtype=fields.dtype(),
        ignored_keys=tuple(sorted(set(raw) - fields.read - _WITHOUT_EFFECT)),
        original=copy.deepcopy(dict(raw)),
    )


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
