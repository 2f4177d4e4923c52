"""Aspects from a narrative: what a model lists, checked against the words of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping

from prb_jax.building.gates.words import words_of
from prb_jax.building.records import contradiction
from prb_jax.data.comparison import RubricAspect


def read_aspects(reply: str, *, narrative: str, most: int) -> tuple[RubricAspect, ...] | str:
    """Return the aspects that a reply lists, or the fault for which there are none.

    An aspect stays only if its evidence stands in the narrative, word by word.

    Args:
      reply: of a model; the JSON list may stand within other text.
      narrative: that the aspects are of.
      most: so many are kept, the first ones.
    """
    start, end = reply.find("["), reply.rfind("]")
    try:
        listed = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        return "the reply is no JSON list of aspects"
    note = f" {' '.join(words_of(narrative))} "
    found = []
    for each in listed:
        parts = [each.get(name) for name in ("aspect", "evidence", "reason")]
        if not all(isinstance(part, str) for part in parts):
            return "an aspect lacks a text for aspect, evidence or reason"
        name, evidence, reason = map(str, parts)
        words = " ".join(words_of(evidence))
        if name.strip() and words and f" {words} " in note:
            found.append(RubricAspect(name.strip(), evidence.strip(), reason.strip()))
    found = found[:most]
    if not found:
        return "no aspect has evidence in the narrative"
    if contradicting := contradiction(found):
        return f"{contradicting[0]!r} and {contradicting[1]!r} contradict each other"
    return tuple(found)
