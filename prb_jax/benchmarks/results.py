"""RewardBench's two result files, in the layout that its leaderboard tools read.

``eval-set/ORG/MODEL.json`` holds one number for each subset, ``eval-set-scores/ORG/MODEL.json`` the
columns of a table with a row for each item; both with model, model_type and chat_template.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from prb_jax.benchmarks import rewardbench, rewardbench2
from prb_jax.benchmarks.benchmark import by_subset, is_won, mean, pair_scores
from prb_jax.metrics.accuracy import ScoredRow

AGGREGATES: Final = "eval-set"
SCORES: Final = "eval-set-scores"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def result_files(
    benchmark: str,
    rows: Sequence[ScoredRow],
    texts: Sequence[Sequence[str]],
    *,
    model: str,
    model_type: str,
    chat_template: str | None,
) -> dict[str, dict[str, Any]]:
    """Contents of the two files by their path, for JSON with sorted keys and an indent of 4.

    Args:
      texts: for each row its K conversations as text.
      model: name of the model; one that is no hub id is filed under the organisation "local", and a
        baseline under "baseline".
      model_type: as "Seq. Classifier".
    """
    name = organisation_and_name(model)
    facts = {"model": name, "model_type": model_type, "chat_template": chat_template}
    aggregates, columns = _FILES[benchmark](rows, texts)
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


_Tables = tuple[dict[str, Any], dict[str, list[Any]]]


def _pairs(rows: Sequence[ScoredRow], texts: Sequence[Sequence[str]]) -> _Tables:
    """Version 1: accuracies; chosen and rejected side by side, each score a list of one."""
    sides = [(0, 1) if row.labels[0] > row.labels[1] else (1, 0) for row in rows]
    accuracies = {name: mean(map(is_won, members)) for name, members in by_subset(rows).items()}
    return accuracies, {
        "id": [_number(row.id) for row in rows],
        "subset": [row.subset for row in rows],
        "text_chosen": [text[chosen] for text, (chosen, _) in zip(texts, sides)],
        "text_rejected": [text[rejected] for text, (_, rejected) in zip(texts, sides)],
        "scores_chosen": [[pair_scores(row)[0]] for row in rows],
        "scores_rejected": [[pair_scores(row)[1]] for row in rows],
        "results": [int(is_won(row)) for row in rows],
    }


def _best_of(rows: Sequence[ScoredRow], texts: Sequence[Sequence[str]]) -> _Tables:
    """Version 2: subset scores; ``results`` holds the best-of-K credit, in the subset Ties too."""
    aggregates = {
        name: _finite(rewardbench2.subset_score(name, members)) for name, members in by_subset(rows).items()
    }
    return aggregates, {
        "id": [row.id for row in rows],
        "subset": [row.subset for row in rows],
        "text": [list(text) for text in texts],
        "scores": [[float(score) for score in row.scores] for row in rows],
        "num_correct": [sum(label > 0 for label in row.labels) for row in rows],
        "results": [rewardbench2.share_of_top(row.scores) for row in rows],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(id: str) -> int | str:
    """Ids of version 1 are numbers where nothing had to be added to tell them apart."""
    return int(id) if id.isdecimal() else id


_FILES: Final[dict[str, Callable[[Sequence[ScoredRow], Sequence[Sequence[str]]], _Tables]]] = {
    rewardbench.BENCHMARK.name: _pairs,
    rewardbench2.BENCHMARK.name: _best_of,
}
