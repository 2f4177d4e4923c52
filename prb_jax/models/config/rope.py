"""Rotary embedding parameters, read from both spellings of ``config.json``.

Before transformers 5 a file has ``rope_theta`` and ``rope_scaling`` (whose type is spelled ``type`` or
``rope_type``), and Gemma 3 adds ``rope_local_base_freq``. From transformers 5 on there is one object
``rope_parameters``, or one per layer type. An unknown type, or a field that the type does not have,
is an error: a wrong rope looks fine on short prompts and is wrong on long ones.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prb_jax.errors import CheckpointError
from prb_jax.models.config.fields import FieldReader

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[str, ...] = get_args(RopeType)

_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_EVERY_TYPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# Written by some tools beside types that do not use it; it changes nothing there.
_UNUSED = frozenset({"original_max_position_embeddings"})


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Everything that decides the rotary angles of one kind of layer.

    Attributes:
      rope_type: one of :data:`ROPE_TYPES`.
      theta: base of the geometric series of wavelengths.
      head_dim: H; all of it is rotated.
      factor: by how much the context was extended (1 for ``default``).
      low_freq_factor, high_freq_factor: bounds of the blended band (``llama3``).
      original_max_position_embeddings: context length of pre-training in tokens (``llama3``, ``yarn``).
      beta_fast, beta_slow: rotations over the original context that bound the ramp (``yarn``).
      truncate: whether the bounds of the ramp are rounded outwards to whole dimensions (``yarn``).
      attention_factor: multiplies cos and sin (``yarn``; 1 otherwise).
    """

    rope_type: RopeType
    theta: float
    head_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def parse_rope(
    fields: FieldReader, *, head_dim: int, max_position_embeddings: int, default_theta: float
) -> RopeConfig:
    """The rope of a model whose layers all share one, from either spelling.

    Args:
      fields: reader of the whole ``config.json``.
      head_dim: H.
      max_position_embeddings: used where the original context length is not given.
      default_theta: used where no theta is given.

    Raises:
      CheckpointError: unknown type, unknown or mistyped field, or two spellings that disagree.
    """
    scaling, parameters = _object(fields, "rope_scaling"), _object(fields, "rope_parameters")
    for name, found in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        nested = [key for key, value in found.items() if isinstance(value, Mapping)]
        if nested:
            raise fields.error(name, "one object for all layers", found=f"objects per layer type: {nested}")
    _refuse_both(fields, scaling, parameters)
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = FieldReader(scaling or parameters, where=fields.where, prefix=f"{name}.")
    theta = _theta(rope, fields, outer_name="rope_theta", default=default_theta)
    original = _original_length(rope, fields, default=max_position_embeddings)
    return _parse_one(
        rope,
        theta=theta,
        head_dim=head_dim,
        original=original,
        max_position_embeddings=max_position_embeddings,
    )


def parse_rope_per_layer_type(
    fields: FieldReader,
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float,
    default_local: float,
) -> tuple[RopeConfig, RopeConfig]:
    """The ropes of full and of sliding layers (Gemma 3), from either spelling.

    In the old spelling ``rope_theta`` and ``rope_scaling`` belong to the full layers and
    ``rope_local_base_freq`` to the sliding ones, which are never scaled.

    Raises:
      CheckpointError: as :func:`parse_rope`, and for a flat ``rope_parameters``, which transformers ignores.
    """
    scaling, parameters = _object(fields, "rope_scaling"), _object(fields, "rope_parameters")
    unknown = sorted(set(parameters) - {"full_attention", "sliding_attention"})
    if unknown:
        raise fields.error(
            "rope_parameters", "objects 'full_attention' and 'sliding_attention'", found=f"keys {unknown}"
        )
    if scaling and "rope_type" not in scaling:
        # transformers 4 takes the older spelling 'type' here, transformers 5 ignores it.
        raise FieldReader(scaling, where=fields.where, prefix="rope_scaling.").error(
            "rope_type", "a rope type"
        )
    _refuse_both(fields, scaling, parameters)

    def one(layer_type: str, outer_name: str, default: float) -> RopeConfig:
        inner = parameters.get(layer_type)
        if inner is not None and not isinstance(inner, Mapping):
            raise fields.error("rope_parameters", f"an object as '{layer_type}'", found=inner)
        if scaling and layer_type == "full_attention":
            rope = FieldReader(scaling, where=fields.where, prefix="rope_scaling.")
        else:
            rope = FieldReader(inner or {}, where=fields.where, prefix=f"rope_parameters.{layer_type}.")
        theta = _theta(rope, fields, outer_name=outer_name, default=default)
        if rope.raw.get("truncate") is False:
            # transformers looks for it outside the layer type's object, so never honours it.
            raise rope.error("truncate", "true or no such field, as this model family has no other behaviour")
        original = rope.integer("original_max_position_embeddings", default=max_position_embeddings)
        return _parse_one(
            rope,
            theta=theta,
            head_dim=head_dim,
            original=original,
            max_position_embeddings=max_position_embeddings,
        )

    full = one("full_attention", "rope_theta", default_theta)
    return full, one("sliding_attention", "rope_local_base_freq", default_local)


def _parse_one(
    rope: FieldReader, *, theta: float, head_dim: int, original: int, max_position_embeddings: int
) -> RopeConfig:
    rope_type = _rope_type(rope)
    known = _FIELDS[rope_type] | _EVERY_TYPE | _UNUSED
    unknown = sorted(key for key in rope.raw if key not in known and rope.raw[key] is not None)
    if unknown:
        raise CheckpointError(
            f"{rope.where}: field '{rope.prefix}{unknown[0]}' is not known for rope type '{rope_type}' "
            f"(known: {', '.join(sorted(_FIELDS[rope_type] | _EVERY_TYPE))})"
        )
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        raise rope.error(
            "partial_rotary_factor", "1 or no such field: rotating part of a head is not supported"
        )
    if head_dim % 2:
        raise CheckpointError(f"{rope.where}: rotary embedding needs an even head_dim, found {head_dim}")

    made = functools.partial(RopeConfig, rope_type=rope_type, theta=theta, head_dim=head_dim)
    if rope_type == "default":
        return made()
    if rope_type == "linear":
        return made(factor=rope.number("factor"))
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"a number above low_freq_factor ({low})")
        return made(
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    # A null factor means the ratio of the two context lengths.
    factor = rope.number("factor", default=max_position_embeddings / original)
    return made(
        factor=factor,
        original_max_position_embeddings=original,
        # Zero counts as absent, as in transformers.
        beta_fast=rope.number("beta_fast", default=32.0, positive=False) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0, positive=False) or 1.0,
        truncate=rope.flag("truncate", default=True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: FieldReader, factor: float) -> float:
    """YaRN (arXiv 2309.00071) eq. 22: 0.1 ln(factor) + 1, unless the file says otherwise."""

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale = rope.number("mscale", default=0.0, positive=False)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0, positive=False)
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _rope_type(rope: FieldReader) -> RopeType:
    named = {rope.text(key) for key in ("rope_type", "type") if rope.has(key)}
    if len(named) > 1:
        raise rope.error("type", f"the same as rope_type ('{rope.raw['rope_type']}')")
    found = named.pop() if named else "default"
    if found not in ROPE_TYPES:
        key = "rope_type" if rope.has("rope_type") else "type"
        raise rope.error(key, f"one of the supported rope types ({', '.join(ROPE_TYPES)})")
    return found  # type: ignore[return-value]  # checked against the literal's own members


def _theta(rope: FieldReader, fields: FieldReader, *, outer_name: str, default: float) -> float:
    """Theta inside the rope object, else beside it, else the family's; two that disagree are an error."""
    outer = fields.number(outer_name, default=default)
    theta = rope.number("rope_theta", default=outer)
    if fields.has(outer_name) and theta != outer:
        raise rope.error("rope_theta", f"the same value as '{outer_name}' ({outer})")
    return theta


def _original_length(rope: FieldReader, fields: FieldReader, *, default: int) -> int:
    """Context length of pre-training: some files keep it outside the rope object."""
    name = "original_max_position_embeddings"
    outer = fields.integer(name, default=default)
    original = rope.integer(name, default=outer)
    if fields.has(name) and original != outer:
        raise rope.error(name, f"the same value as the field '{name}' outside it ({outer})")
    return original


def _object(fields: FieldReader, name: str) -> Mapping[str, Any]:
    value = fields.value(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise fields.error(name, "an object")
    return value


def _refuse_both(fields: FieldReader, scaling: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """transformers takes the older spelling and with it loses the theta inside the newer one."""
    if scaling and parameters:
        raise CheckpointError(
            f"{fields.where}: both 'rope_scaling' and 'rope_parameters' are given: keep one of them"
        )
