"""Differences between the layers of a decoder: parts, sliding windows, rotary embeddings, recurrence."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.models.config.families import Family
from prb_jax.models.config.fields import FieldReader

_SLIDES = {"full_attention": False, "sliding_attention": True}

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


def layer_kinds(fields: FieldReader, family: Family, *, layers: int) -> LayerKinds:
    """Read the differences between layers.

    Raises:
      CheckpointError: A list has the wrong length or unknown entries, or sliding layers have no window.
    """
    rotates = (True,) * layers
    if family.unrotated == "listed":
        rotates = _listed_rotations(fields, family, layers=layers)
    if family.windows == "refused" and fields.flag("use_sliding_window", default=False):
        raise fields.error("use_sliding_window", "false, as sliding windows are not supported in this family")
    if family.windows == "refused":
        fields.value("sliding_window")  # mark as read: unused here, and 0 in files of transformers 5
        if any(_listed_windows(fields, layers=layers) or ()):
            raise fields.error("layer_types", "'full_attention' for every layer, or no such field")
    if family.windows in ("none", "refused"):
        return LayerKinds(window=None, slides=(False,) * layers, rotates=rotates)
    window, slides = _windows(fields, family, rotates=rotates)
    if family.unrotated == "full" and window is not None:
        rotates = slides
    return LayerKinds(window=window, slides=slides, rotates=rotates)


def _windows(
    fields: FieldReader, family: Family, *, rotates: tuple[bool, ...]
) -> tuple[int | None, tuple[bool, ...]]:
    default, layers = family.defaults["sliding_window"], len(rotates)
    window = fields.optional_integer("sliding_window", default=default)
    by_flag = family.windows in ("used", "upper", "unrotated")
    if by_flag and not fields.flag("use_sliding_window", default=False):
        window = None
    slides = _listed_windows(fields, layers=layers)

    if family.windows in ("every", "used"):
        uniform = (window is not None,) * layers
        if slides is not None and slides != uniform:
            # transformers ignores the list for this family, with a warning.
            kind = "sliding_attention" if window is not None else "full_attention"
            raise fields.error(
                "layer_types", f"'{kind}' for every layer (as sliding_window says), or no such field"
            )
        return window, uniform
    if slides is None and family.windows == "unrotated":
        slides = tuple(window is not None and not turned for turned in rotates)
    elif slides is None and family.windows == "upper":
        first = fields.integer("max_window_layers", default=family.defaults["max_window_layers"], minimum=0)
        slides = tuple(window is not None and layer >= first for layer in range(layers))
    elif slides is None and window is None and family.unrotated == "full":
        slides = (False,) * layers
    elif slides is None:
        period = family.window_period or fields.integer(
            "sliding_window_pattern", default=family.defaults["sliding_window_pattern"]
        )
        slides = tuple((layer + 1) % period != 0 for layer in range(layers))
    if window is None and any(slides):
        raise fields.error("sliding_window", "a number of tokens, as some layers have a sliding window")
    return window, slides


def layer_mixers(fields: FieldReader, family: Family, *, layers: int) -> tuple[str, ...]:
    """Read the token mixer of each layer: :data:`ATTENTION` or :data:`RECURRENT`.

    Raises:
      CheckpointError: A list has the wrong length or unknown entries.
    """
    if not family.recurrent:
        return (ATTENTION,) * layers
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


def _listed_windows(fields: FieldReader, *, layers: int) -> tuple[bool, ...] | None:
    """Return the field ``layer_types`` as flags, or None if it is absent."""
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


def _listed_rotations(fields: FieldReader, family: Family, *, layers: int) -> tuple[bool, ...]:
    """Return the field ``no_rope_layers``, in which 1 means rope; if absent, each n-th layer has no rope."""
    listed = fields.value("no_rope_layers")
    period = fields.integer("no_rope_layer_interval", default=family.defaults["no_rope_layer_interval"])
    if listed is None:
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise fields.error("no_rope_layers", f"a list of 0 and 1 with {layers} entries (num_hidden_layers)")
    return tuple(map(bool, listed))
