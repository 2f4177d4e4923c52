"""RewardBench's two result files, in the layout that its leaderboard tools read.

``eval-set/ORG/MODEL.json`` holds one number for each subset, ``eval-set-scores/ORG/MODEL.json`` the
columns of a table with a row for each item; both with model, model_type and chat_template.
"""

from __future__ import annotations

import re
from typing import Any, Final

from prb_jax.benchmarks.benchmark import Tables

AGGREGATES: Final = "eval-set"
SCORES: Final = "eval-set-scores"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def result_files(
    tables: Tables, *, model: str, model_type: str, chat_template: str | None
) -> dict[str, dict[str, Any]]:
    """Contents of the two files by their path, for JSON with sorted keys and an indent of 4.

    Args:
      tables: of a benchmark, as its `results` makes them.
      model: name of the model; one that is no hub id is filed under the organisation "local", and a
        baseline under "baseline".
      model_type: as "Seq. Classifier".
    """
    name = organisation_and_name(model)
    facts = {"model": name, "model_type": model_type, "chat_template": chat_template}
    aggregates, columns = tables
    return {
        f"{AGGREGATES}/{name}.json": {**aggregates, **facts},
        f"{SCORES}/{name}.json": {**columns, **facts},
    }


def organisation_and_name(model: str) -> str:
    """ "ORG/MODEL", which is also the path of the files, for a model of any name."""
    if _HUB_ID.fullmatch(model):
        return model
    organisation, colon, name = model.rpartition(":")
    if colon and organisation == "baseline":
        return f"{organisation}/{name}"
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return f"local/{re.sub(r'[^A-Za-z0-9_.-]', '_', last).lstrip('.') or 'model'}"
