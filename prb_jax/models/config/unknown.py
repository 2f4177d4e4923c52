"""Errors for architectures that this package does not know."""

from __future__ import annotations

from difflib import SequenceMatcher

from prb_jax.errors import CheckpointError, listed
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.config.family import Family
from prb_jax.models.config.fields import FieldReader


def unknown_architecture(fields: FieldReader, family: Family | None, named: str | None) -> CheckpointError:
    """Return the error for a class that its family does not have, or for an unknown family."""
    model_type = fields.text("model_type")
    if family is None or named is None:
        supported = ", ".join(family.architecture for family in FAMILIES.values())
        return CheckpointError(
            f"{fields.where}: unknown architecture: model_type '{model_type}'"
            f"{f' ({named})' if named else ''}.{_nearest(fields)} Supported: {supported}"
        )
    code = " (code of its repository, which auto_map names, is never run)" if fields.has("auto_map") else ""
    labels_tokens = named.endswith("ForTokenClassification")
    steps = " (steps:ID for a model with two labels at token ID behind every step)" if labels_tokens else ""
    return CheckpointError(
        f"{fields.where}: unknown architecture '{named}' for model_type '{model_type}': "
        f"expected '{family.architecture}', or a class of the table of reward models; if you know that its "
        f"head is one of that table, name the row with --readout{steps}{code}"
    )


def _nearest(fields: FieldReader) -> str:
    """Return the known family that reads most fields of an unknown family's file, and the fields it does not read.

    If no family can read the file, return the family with the most similar name, and what it refuses.
    """
    raw, found, refused = dict(fields.raw), [], []
    for name in FAMILIES:
        likeness = SequenceMatcher(None, name, raw["model_type"]).ratio()
        try:
            unread = parse_config(raw | {"model_type": name, "architectures": None}, where="").ignored_keys
        except CheckpointError as error:
            refused.append((-likeness, name, str(error).removeprefix(": ")))
            continue
        found.append((len(unread), -likeness, name, unread))
    if not found:
        _, name, reason = min(refused)
        return f" The nearest known family is '{name}', which cannot read it: {reason.rstrip('.')}."
    _, _, name, unread = min(found)
    differs = f"which does not read {listed(unread, most=8)}" if unread else "which reads the same fields"
    return f" The nearest known family is '{name}', {differs}."
