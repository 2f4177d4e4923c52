"""Which layers attend only to a sliding window, and how wide it is."""

from prb_jax.models.config.families import Family
from prb_jax.models.config.fields import FieldReader

_SLIDES = {"full_attention": False, "sliding_attention": True}


def parse_layer_windows(
    fields: FieldReader, family: Family, *, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window in tokens (None: none) and, for each layer, whether it slides.

    Raises:
      CheckpointError: a layer type other than full or sliding, a list of another length than
        ``num_hidden_layers``, or a sliding layer without a window.
    """
    if family.windows == "none":
        return None, (False,) * layers
    default = family.defaults["sliding_window"]
    window = fields.optional_integer("sliding_window", default=default)
    if family.windows == "upper" and not fields.flag("use_sliding_window", default=False):
        window = None
    slides = _listed(fields, layers=layers)

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


def _listed(fields: FieldReader, *, layers: int) -> tuple[bool, ...] | None:
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
