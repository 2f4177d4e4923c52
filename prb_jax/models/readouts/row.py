"""A row of the table of open reward models, and all rows: the table of this package and those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from prb_jax.errors import RunError, quote
from prb_jax.models.config.decoder import STANDARD, WeightLayout
from prb_jax.models.head import LINEAR, Head
from prb_jax.seams import get, names, usable_plugins
from prb_jax.text.template import PLAIN_RULES, TextRules

RawConfig = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A family of reward models."""

    name: str  # for ``--readout`` and for reports
    models: tuple[str, ...]  # hub ids; ``*`` stands for anything
    head: Head  # the read-out, sizes not filled in
    # names in ``architectures`` or ``auto_map`` of ``config.json``, one of which a model has; empty: any
    classes: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()  # names that its checkpoint holds
    without: tuple[str, ...] = ()  # names that its checkpoint does not hold
    fields: tuple[str, ...] = ()  # fields of ``config.json`` that it has
    # nothing in the checkpoint tells this read-out from another: only the hub id (or the last part of it as the
    # folder's name) or ``--readout`` does
    by_name: bool = False
    layout: WeightLayout = STANDARD  # names of its tensors; the prefix is the first of ``prefixes`` that fits
    prefixes: tuple[str, ...] = ("model.",)  # what the names of the body's tensors may start with
    model_type: str | None = None  # of the decoder where ``config.json`` calls it by another name
    # turns its ``config.json`` into that of the decoder
    translate: Callable[[RawConfig], RawConfig] | None = None
    text: TextRules = PLAIN_RULES  # rules beside the chat template
    append_field: str | None = None  # field of ``config.json`` that replaces the id of the token to append
    notes: tuple[str, ...] = ()  # what a user should know; shown by ``prb inspect``
    origin: str = ""  # the package of a plug-in

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
        """How the values of several steps may become one reward, as ``--readout ROW:WAY`` names it; none for most."""
        return getattr(self.head, "ways", ())

    @property
    def standard(self) -> bool:
        """A ``*ForSequenceClassification`` as transformers writes it: its row only adds what is known of it."""
        return self.head == LINEAR and not (self.classes or self.tensors or self.fields)


def known_rows(asked: str = "") -> dict[str, ModelRow]:
    """Return the rows by name: those of the table, and behind them those of plug-ins.

    A plug-in that fails is left out with a warning; asked for by name it is an error.

    Args:
      asked: the row that the user names, if any.

    Raises:
      RunError: the package of the plug-in that is asked for fails, or offers something else.
    """
    table = get("tables", "readouts").value
    plugins = usable_plugins("readouts")
    if asked not in table and asked in names("readouts"):
        plugins.append(get("readouts", asked))
    rows = {one.name: replace(one.value, name=one.name, origin=one.origin) for one in plugins}
    return {**table, **{name: row for name, row in rows.items() if name not in table}}
