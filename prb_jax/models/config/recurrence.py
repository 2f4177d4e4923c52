"""Recurrent layers of a decoder, with the gated delta rule: which layers, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.models.config.family import ATTENTION, RECURRENT, Family
from prb_jax.models.config.fields import FieldReader


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Sizes of the recurrent layers with the gated delta rule (arXiv 2412.06464)."""

    key_heads: int  # number of heads of queries and of keys
    value_heads: int  # a multiple of the key heads; each has a state [key_dim, value_dim]
    key_dim: int
    value_dim: int
    taps: int  # tokens that the causal convolution sees, the current token included
    grouped: bool  # a file has ``in_proj_qkvz`` and ``in_proj_ba``, grouped by key head

    @property
    def widths(self) -> dict[str, int]:
        """Number of channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return {"q": keys, "k": keys, "v": self.value_heads * self.value_dim}


def layer_mixers(fields: FieldReader, family: Family, *, layers: int) -> tuple[str, ...]:
    """Read the token mixer of each layer: :data:`ATTENTION` or :data:`RECURRENT`.

    Raises:
      CheckpointError: A list has the wrong length or unknown entries.
    """
    period = fields.integer("full_attention_interval", default=family.defaults["full_attention_interval"])
    listed = fields.value("layer_types")
    if listed is None:
        if period > layers:
            raise fields.error(
                "full_attention_interval", f"at most {layers} (num_hidden_layers)", found=period
            )
        return tuple(RECURRENT if (layer + 1) % period else ATTENTION for layer in range(layers))
    if not isinstance(listed, list) or any(kind not in (ATTENTION, RECURRENT) for kind in listed):
        raise fields.error("layer_types", f"a list of '{ATTENTION}' and '{RECURRENT}'")
    if len(listed) != layers:
        raise fields.error(
            "layer_types", f"{layers} entries (num_hidden_layers)", found=f"{len(listed)} entries"
        )
    if ATTENTION not in listed:
        raise fields.error("layer_types", f"'{ATTENTION}' for one layer at least")
    return tuple(listed)


def parse_recurrence(fields: FieldReader, family: Family) -> Recurrence:
    """Read the sizes of recurrent layers.

    Raises:
      CheckpointError: A size is missing or mistyped, the heads do not match, or the activation is another one.
    """
    if fields.text("hidden_act", default="silu") not in ("silu", "swish"):  # also that of the convolution
        raise fields.error("hidden_act", "'silu', because no other one is supported in recurrent layers")

    def size(name: str, minimum: int = 1) -> int:
        return fields.integer(f"linear_{name}", default=family.defaults[f"linear_{name}"], minimum=minimum)

    sizes = Recurrence(
        key_heads=size("num_key_heads"),
        value_heads=size("num_value_heads"),
        key_dim=size("key_head_dim"),
        value_dim=size("value_head_dim"),
        taps=size("conv_kernel_dim", 2),
        grouped=family.grouped_recurrence,
    )
    if sizes.value_heads % sizes.key_heads:
        raise fields.error(
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads ({sizes.key_heads})",
            found=sizes.value_heads,
        )
    return sizes
