"""Ropes in both spellings of ``config.json``.

Before transformers 5 a file has ``rope_theta`` and ``rope_scaling`` (with its type in ``type`` or
``rope_type``), and Gemma 3 adds ``rope_local_base_freq``. From transformers 5 on a file has one object
``rope_parameters``, or one per layer type. An unknown type, or a field that does not belong to the type,
raises an error, because a wrong rope is only noticeable on long prompts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, cast

from prb_jax.errors import CheckpointError
from prb_jax.models.config.family import Family
from prb_jax.models.config.fields import FieldReader
from prb_jax.models.layers import RopeConfig, RopeType
from prb_jax.seams import get

_LENGTH = "original_max_position_embeddings"


_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _LENGTH}),
    "yarn": frozenset(
        f"factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate {_LENGTH}".split()
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", _LENGTH}),
}


_EVERY_TYPE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


_OF_GROWTH = {"llama_4_scaling_beta", "max_position_embeddings"}


_LAYER_TYPES = ("full_attention", "sliding_attention")


def parse_ropes(
    fields: FieldReader, family: Family, *, head_dim: int, longest: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Parse the ropes of full and sliding layers; the second is None in families with one rope for all layers.

    In the old spelling of a family with two ropes, ``rope_theta`` and ``rope_scaling`` belong to the full layers. The
    field ``local_theta`` of the family belongs to the sliding layers, which are never scaled.

    Args:
      fields: Reader of the whole ``config.json``.
      family: Properties of the family, with defaults for absent fields.
      head_dim: H, the width of a head.
      longest: ``max_position_embeddings``, the default of the original context length.

    Raises:
      CheckpointError: The type or a field is unknown, a field is mistyped, two spellings disagree, or transformers
        ignores the spelling.
    """
    scaling, parameters = _object(fields, "rope_scaling"), _object(fields, "rope_parameters")
    local_theta, absent = family.local_theta, family.defaults
    in_scaling = FieldReader(scaling, fields.where, "rope_scaling.")
    if local_theta is None:
        for name, found in (("rope_scaling", scaling), ("rope_parameters", parameters)):
            if nested := [key for key, value in found.items() if isinstance(value, Mapping)]:
                found = f"objects per layer type: {nested}"
                raise fields.error(name, "one object for all layers", found=found)
    else:
        if unknown := sorted(set(parameters) - set(_LAYER_TYPES)):
            expected = " and ".join(map(repr, _LAYER_TYPES))
            raise fields.error("rope_parameters", f"objects {expected}", found=f"keys {unknown}")
        if scaling and "rope_type" not in scaling:
            # transformers 4 reads the older spelling 'type' here, but transformers 5 ignores it.
            raise in_scaling.error("rope_type", "a rope type")
    if scaling and parameters:
        # transformers reads the older spelling and ignores the theta inside the newer one
        raise CheckpointError(
            f"{fields.where}: both 'rope_scaling' and 'rope_parameters' are given: keep one of them"
        )
    parse = functools.partial(_parse_rope, fields, family=family, head_dim=head_dim, longest=longest)
    theta = ("rope_theta", absent["rope_theta"])
    if local_theta is None:
        rope = in_scaling if scaling else FieldReader(parameters, fields.where, "rope_parameters.")
        return parse(rope, theta), None

    def of_layers(layer_type: str) -> FieldReader:
        inner = parameters.get(layer_type)
        if inner is not None and not isinstance(inner, Mapping):
            raise fields.error("rope_parameters", f"an object as '{layer_type}'", found=inner)
        return FieldReader(inner or {}, fields.where, f"rope_parameters.{layer_type}.")

    if (
        local_theta == "rope_theta"
        and not parameters
        and fields.number(theta[0], default=theta[1]) != theta[1]
    ):
        # transformers 4 applies this theta to all layers, transformers 5 only to the full layers.
        raise fields.error("rope_theta", f"{theta[1]:.0f}, or a theta for each layer type in rope_parameters")
    full, sliding = (of_layers(layer_type) for layer_type in _LAYER_TYPES)
    return (
        parse(in_scaling if scaling else full, theta, by_layer_type=True),
        parse(sliding, (local_theta, absent[local_theta]), by_layer_type=True),
    )


def _parse_rope(
    fields: FieldReader,
    rope: FieldReader,
    outer_theta: tuple[str, float],
    *,
    family: Family,
    head_dim: int,
    longest: int,
    by_layer_type: bool = False,
) -> RopeConfig:
    """Parse one rope.

    Args:
      fields: Reader of the whole file.
      rope: Reader of the rope's object.
      outer_theta: Field with theta outside this object, and the family's default.
      family, head_dim, longest: Same as in :func:`parse_ropes`.
      by_layer_type: If True, the family has one rope per layer type.
    """
    theta = _same_inside(rope, fields, "rope_theta", *outer_theta, read=FieldReader.number)
    if not by_layer_type:  # some files store the original length outside the rope object
        default = family.defaults.get(_LENGTH, longest)
        original = _same_inside(rope, fields, _LENGTH, _LENGTH, default, read=FieldReader.integer)
    elif rope.raw.get("truncate") is False:
        # transformers searches outside the layer type's object, so it never applies the value.
        raise rope.error("truncate", "true or no such field, as this model family has no other behaviour")
    else:
        original = rope.integer(_LENGTH, default=longest)

    rope_type = _rope_type(rope, family)
    known = _FIELDS[rope_type] | _EVERY_TYPE | (_OF_GROWTH if family.query_growth else set())
    known |= set(family.unused_rope_fields)
    # Some tools write the original length for types that do not use it, without effect.
    for key in sorted(set(rope.raw) - known - {_LENGTH}):
        if rope.raw[key] is not None:
            raise CheckpointError(
                f"{rope.where}: field '{rope.prefix}{key}' is not known for rope type '{rope_type}' "
                f"(known: {', '.join(sorted(known))})"
            )
    part = "partial_rotary_factor"
    if part in family.defaults:
        share = _same_inside(rope, fields, part, part, family.defaults[part], read=FieldReader.number)
    elif (share := rope.number(part, default=1.0)) != 1.0:
        raise rope.error(part, "1 or no such field, as this model family rotates whole heads")
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim % 2 or not rotary_dim:
        of = "" if share == 1 else f" times partial_rotary_factor {share:g}"
        raise CheckpointError(f"{rope.where}: rotary embedding needs an even head_dim, found {head_dim}{of}")

    growth = rope.number("llama_4_scaling_beta") if family.query_growth else 0.0
    made = functools.partial(
        RopeConfig, rope_type=rope_type, theta=theta, rotary_dim=rotary_dim, query_growth=growth
    )
    if rope_type == "default":
        return made()
    if rope_type == "linear":
        return made(factor=rope.number("factor"))
    made = functools.partial(made, original_max_position_embeddings=original)
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"a number above low_freq_factor ({low})")
        return made(factor=rope.number("factor"), low_freq_factor=low, high_freq_factor=high)
    # A null factor means the ratio of the two context lengths.
    factor = rope.number("factor", default=longest / original)
    if rope_type == "longrope":
        short, long = (rope.numbers(name, count=rotary_dim // 2) for name in ("short_factor", "long_factor"))
        extended = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return made(
            factor=factor,
            attention_factor=rope.number("attention_factor", default=extended),
            short_factor=short,
            long_factor=() if short == long else long,
        )
    return made(
        factor=factor,
        # Zero counts as absent, as in transformers.
        beta_fast=rope.number("beta_fast", default=32.0, positive=False) or 32.0,
        beta_slow=rope.number("beta_slow", default=1.0, positive=False) or 1.0,
        truncate=rope.flag("truncate", default=True),
        attention_factor=get("ropes", "yarn attention").value(rope, factor),
    )


def _object(fields: FieldReader, name: str) -> Mapping[str, Any]:
    value = fields.value(name)
    if value is not None and not isinstance(value, Mapping):
        raise fields.error(name, "an object")
    return value or {}


def _same_inside(
    rope: FieldReader, fields: FieldReader, inner: str, outer: str, default: Any, *, read: Any
) -> Any:
    """Return a field of the rope object, else the field outside it, else the default; reject two that disagree."""
    beside = read(fields, outer, default=default)
    value = read(rope, inner, default=beside)
    if fields.has(outer) and value != beside:
        named = f"'{outer}'" if inner != outer else f"the field '{outer}' outside it"
        raise rope.error(inner, f"the same value as {named} ({beside})")
    return value


def _rope_type(rope: FieldReader, family: Family) -> RopeType:
    named = {rope.text(key): key for key in ("type", "rope_type") if rope.has(key)}
    if len(named) > 1:
        raise rope.error("type", f"the same as rope_type ('{rope.raw['rope_type']}')")
    for rope_type, key in named.items():
        if rope_type not in family.rope_types:
            raise rope.error(key, f"one of the supported rope types ({', '.join(family.rope_types)})")
    if not named and "default" not in family.rope_types:
        raise rope.error("rope_type", f"one of {', '.join(family.rope_types)}")
    return cast(RopeType, next(iter(named), "default"))
