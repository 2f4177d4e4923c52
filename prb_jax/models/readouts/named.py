"""Read-outs named by ``--readout``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.head import READOUTS
from prb_jax.models.readouts.heads import Stack, Steps, Together
from prb_jax.models.readouts.row import ModelRow, known_rows
from prb_jax.models.vocabulary_heads import Vocabulary
from prb_jax.text.template import TextRules

_VALUE = r"\d+=-?\d+(?:\.\d+)?"
_VOCABULARY = re.compile(rf"vocabulary:(\d+(?:,\d+)?|{_VALUE}(?:,{_VALUE})+)")
_STEPS = re.compile(rf"(steps:(\d{{1,9}}))(?::({'|'.join(Steps.ways)}))?")


def named_row(readout: str) -> ModelRow:
    """Return the row with this name; CheckpointError for an unknown name."""
    rows = known_rows(readout)
    steps = {
        f"{row.name}:{way}": replace(row, head=replace(cast(Any, row.head), together=way))
        for row in rows.values()
        for way in row.ways
    }
    if (row := rows.get(readout) or steps.get(readout)) is not None:
        return row
    name = readout.partition(":")[0]
    if match := _VOCABULARY.fullmatch(readout):
        parts = [part.partition("=") for part in match[1].split(",")]
        head = Vocabulary(
            tokens=tuple(int(token) for token, _, _ in parts),
            numbers=tuple(float(number) for _, _, number in parts if number),
        )
        if len(set(head.tokens)) == len(head.tokens):
            return ModelRow(name=readout, models=(), head=head)
        expected = "expected each token once"
    elif match := _STEPS.fullmatch(readout):
        marker, together = int(match[2]), cast(Together, match[3] or "product")
        head = Steps(Stack("score"), marker=marker, together=together)
        return ModelRow(
            name=match[1],
            models=(),
            head=head,
            text=TextRules(suffix_id=marker),
            notes=("TRL trains process models on prompts without a chat template: see --chat-template",),
        )
    elif name in rows and rows[name].ways:
        ways = ", ".join(f"{name}:{way}" for way in rows[name].ways)
        expected = f"the reward of '{name}' over the steps of a response is one of {ways}"
    elif name in rows:
        expected = f"'{name}' does not score steps, so there is nothing to combine: expected only '{name}'"
    else:
        forms = ("vocabulary:ID", "vocabulary:ID,ID", "vocabulary:ID=NUMBER,...", "steps:ID", "steps:ID:min")
        expected = f"expected one of {', '.join((*READOUTS, *rows, *steps, *forms))}"
    raise CheckpointError(f"unknown readout {quote(readout)}: {expected}")
