"""Rows of the table of open reward models, from this package and from plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from prb_jax.errors import RunError, quote
from prb_jax.models.config.decoder import STANDARD, WeightLayout
from prb_jax.models.head import LINEAR, Head
from prb_jax.plugins import usable_plugins
from prb_jax.seams import get, names
from prb_jax.text.template import PLAIN_RULES, TextRules

RawConfig = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A family of reward models."""

    name: str  # name for ``--readout`` and reports
    models: tuple[str, ...]  # hub ids; ``*`` matches anything
    head: Head  # read-out without sizes
    # class names, one of which is in ``architectures`` or ``auto_map`` of ``config.json``; empty: any
    classes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # names of required tensors
    without: tuple[str, ...] = ()  # names of tensors that must be absent
    fields: tuple[str, ...] = ()  # required fields of ``config.json``
    # True if the checkpoint does not identify the read-out: only the hub id (or its last part as the folder's
    # name) or ``--readout`` does
    by_name: bool = False
    layout: WeightLayout = STANDARD  # tensor names; the prefix is the first of ``prefixes`` that fits
    prefixes: tuple[str, ...] = ("model.",)  # possible prefixes of the body's tensor names
    model_type: str | None = None  # family of the decoder, if ``config.json`` uses another name
    # converts ``config.json`` to the configuration of the decoder
    translate: Callable[[RawConfig], RawConfig] | None = None
    text: TextRules = PLAIN_RULES  # text rules in addition to the chat template
    append_field: str | None = None  # field of ``config.json`` that replaces the id of the token to append
    notes: tuple[str, ...] = ()  # notes for users, shown by ``prb inspect``
    origin: str = ""  # package of a plug-in

    def __post_init__(self) -> None:
        for name in ("models", "classes", "tensors", "without", "fields", "prefixes", "notes"):
            value = getattr(self, name)
            if not (isinstance(value, tuple) and all(isinstance(text, str) for text in value)):
                raise RunError(
                    f"read-out {quote(self.name)}: {name}: expected a tuple of texts, found {quote(value)}"
                )
        if not callable(getattr(self.head, "bound", None)):
            raise RunError(f"read-out {quote(self.name)}: head: expected a head, found {quote(self.head)}")

    @property
    def ways(self) -> tuple[str, ...]:
        """Reductions of several steps to one reward, for ``--readout ROW:WAY``; empty for most rows."""
        return getattr(self.head, "ways", ())

    @property
    def standard(self) -> bool:
        """True for a ``*ForSequenceClassification`` of transformers, whose row only adds notes and text rules."""
        return self.head == LINEAR and not (self.classes or self.tensors or self.fields)


def known_rows(asked: str = "") -> dict[str, ModelRow]:
    """Return the rows by name: first the table, then plug-ins.

    A plug-in that fails is skipped with a warning, or raises an error if requested by name.

    Args:
      asked: Name of the row requested by the user, if any.

    Raises:
      RunError: The package of the requested plug-in fails, or provides something else.
    """
    table = get("tables", "readouts").value
    plugins = usable_plugins("readouts")
    if asked not in table and asked in names("readouts"):
        plugins.append(get("readouts", asked))
    rows = {one.name: replace(one.value, name=one.name, origin=one.origin) for one in plugins}
    return {**table, **{name: row for name, row in rows.items() if name not in table}}
