"""Configuration and read-out of a model folder, from its files; code in the folder is never run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prb_jax.errors import CheckpointError
from prb_jax.models.config.decoder import DecoderConfig, parse_config, read_raw_config, refuse_language_model
from prb_jax.models.config.family import refuse_encoder
from prb_jax.models.config.fields import FieldReader
from prb_jax.models.head import READOUTS, Linear
from prb_jax.seams import get
from prb_jax.text.template import TextRules

if TYPE_CHECKING:
    from prb_jax.models.readouts.row import ModelRow


@dataclass(frozen=True)
class ResolvedModel:
    """Model in a folder."""

    config: DecoderConfig  # decoder with its head and tensor names
    row: ModelRow  # matching row of the table
    # rule for the reward, if the user named one of :data:`prb_jax.models.head.READOUTS`
    rule: str | None = None
    # True if the checkpoint's head is ignored and the head of the configuration must be initialised
    new_head: bool = False

    @property
    def readout(self) -> str | None:
        """Name of a non-linear read-out, in the form of ``--readout``; None for a linear one, which has rules
        instead."""
        head = self.config.head
        if together := getattr(head, "together", None):
            return f"{self.row.name}:{together}"
        return None if isinstance(head, Linear) else self.row.name

    @property
    def text(self) -> TextRules:
        """Text rules in addition to the chat template."""
        if self.row.append_field is None:
            return self.row.text
        fields = FieldReader(self.config.original, f"{self.row.name}: config.json")
        if not fields.has(self.row.append_field):
            return self.row.text
        given = fields.integer(self.row.append_field, minimum=0, maximum=2**31 - 1)
        return replace(self.row.text, append_id=given)


def resolve_model(
    folder: str | Path, *, name: str = "", readout: str | None = None, new_head: bool = False
) -> ResolvedModel:
    """Return the configuration of a model folder with its read-out.

    Candidates are, in this order: the row named by ``readout``; a row recognised only by the model's name; the first
    row with classes, tensors and fields of the folder; a ``*ForSequenceClassification``.

    Args:
      folder: Folder with ``config.json`` and weights.
      name: Name given by the user: a hub id, or the folder.
      readout: Row of the table; row of a process model with the reduction of steps, e.g. ``qwen2-prm:min``;
        ``steps:ID`` or ``steps:ID:min`` for two labels at every token with this id;
        ``vocabulary:ID``, ``vocabulary:ID,ID``, ``vocabulary:ID=NUMBER,ID=NUMBER,...``; or a rule for several labels.
      new_head: If True, open a model without a linear head of one output with such a head, to be initialised later.

    Raises:
      CheckpointError: The read-out or architecture is unknown, or the head is missing or does not fit; the message
        names the tensor or field and the remedy.
    """
    where = str(Path(folder) / "config.json")
    raw = read_raw_config(folder)
    refuse_encoder(raw, where=where)
    rule = readout if readout in READOUTS else None
    asked = None if readout == rule else get("models", "named readout").value(readout)
    found = get("models", "recognised").value(Path(folder), raw, name=name or str(folder), asked=asked)
    try:
        if found.as_written:
            config = parse_config(raw, where=where)
            refuse_language_model(config, where=where)
        else:
            config = found.configured()
    except CheckpointError as error:
        if new_head:
            return found.with_new_head(None)
        raise found.explained(error) from None
    if new_head and not (config.num_labels == 1 and found.has_one_row(config)):
        return found.with_new_head(config.head)
    return ResolvedModel(config, found.row, rule)
