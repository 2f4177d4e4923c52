"""Gates with models: a judge that sees the aspects must find the chosen answer; models without the user must not.

The judge sees every pair in both orders; the folder of the build keeps its verdicts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Final, TypedDict

import numpy as np

from prb_jax.behaviour.judges.chat import InWords
from prb_jax.behaviour.judges.replies import read_verdict
from prb_jax.building import prompts
from prb_jax.building.gates.gate import GateFigure, Pair, chance_figure
from prb_jax.building.settings import GateSettings
from prb_jax.runs.rows import Row, RowKind

JUDGEMENTS: Final = "judgements.jsonl"
BLIND: Final = "blind"
RUBRIC: Final = "rubric"

_COUNTED: Final = ("tries", "prompt_tokens", "completion_tokens")


class _Line(TypedDict):
    kind: str
    pair: str
    id: str
    verdicts: list[str | None]
    replies: list[str]
    tries: list[int]
    prompt_tokens: list[int | None]
    completion_tokens: list[int | None]


_JUDGEMENTS: Final = RowKind(JUDGEMENTS, "judgements", key=itemgetter("kind", "pair"), schema=_Line)
_TOGETHER: Final = 32
_TEMPLATES: Final = {BLIND: prompts.BLIND, RUBRIC: prompts.RUBRIC}
_SHARES: Final[Mapping[tuple[str | None, ...], float]] = {("A", "B"): 1.0, ("B", "A"): 0.0}
"""Share by the verdicts with the chosen answer as A and as B; all other verdicts count 0.5."""


def judge_pairs(
    pairs: Sequence[Pair], kind: str, judge: InWords, *, folder: Path, advance: Callable[[int], None]
) -> dict[str, float]:
    """Return by pair id 1 if the judge prefers the chosen answer in both orders, 0 if the other answer, else 0.5.

    Verdicts in the file of the build's folder, which this process has locked, are reused. ``kind`` is "blind" or
    "rubric"; ``advance`` is called with the number of finished pairs.

    Raises:
      RunError: the judge cannot be queried, or the file cannot be read or written.
    """
    identity = json.dumps([dict(judge.identity()), prompts.prompts_digest()], sort_keys=True)
    texts = {pair.id: identity + json.dumps(pair.comparison.to_row(), sort_keys=True) for pair in pairs}
    keys = {name: hashlib.sha256(text.encode()).hexdigest()[:24] for name, text in texts.items()}
    with _JUDGEMENTS.open(folder) as file:
        left = [pair for pair in pairs if (kind, keys[pair.id]) not in file.rows]
        advance(len(pairs) - len(left))
        for start in range(0, len(left), _TOGETHER):
            part = left[start : start + _TOGETHER]
            asked = [
                prompts.judge_messages(_TEMPLATES[kind], pair.comparison, first)
                for pair in part
                for first in (0, 1)
            ]
            replies = judge.replies(asked)
            file.append(
                {
                    "kind": kind,
                    "pair": keys[pair.id],
                    "id": pair.id,
                    "verdicts": [read_verdict(reply.text) for reply in both],
                    "replies": [reply.text for reply in both],
                    **{name: [getattr(reply, name) for reply in both] for name in _COUNTED},
                }
                for pair, both in zip(part, zip(replies[::2], replies[1::2], strict=True), strict=True)
            )
            advance(len(part))
        verdicts = {name: tuple(file.rows[kind, key]["verdicts"]) for name, key in keys.items()}
    return {name: _SHARES.get(both, 0.5) for name, both in verdicts.items()}


def read_judgements(folder: Path) -> list[Row]:
    """Return all judgements of a build; empty if nothing was judged."""
    return list(_JUDGEMENTS.read(folder).values()) if (folder / JUDGEMENTS).exists() else []


def find_unseparated(pairs: Sequence[Pair], shares: Mapping[str, float]) -> dict[str, str]:
    """Return the pairs in which the judge that sees the aspects does not prefer the chosen answer in both orders."""
    reasons = {
        0.0: "the judge prefers the rejected answer in both orders",
        0.5: "the judge does not separate the answers in both orders",
    }
    return {pair.id: f"{pair.id}: {reasons[shares[pair.id]]}" for pair in pairs if shares[pair.id] in reasons}


def measure_blind_judge(
    pairs: Sequence[Pair], shares: Mapping[str, float], *, gates: GateSettings
) -> GateFigure:
    """Return the share of chosen answers that the judge without the user prefers; must be 0.5 within its interval."""
    values = [shares[pair.id] for pair in pairs]
    decided = sum(share != 0.5 for share in values)
    note = f"{decided:,} of {len(pairs):,} pairs decided in both orders"
    planted = "the judge prefers the chosen answer more often, or the rejected one"
    return chance_figure(values, pairs, gates=gates, either_way=True, note=note, planted=planted)


def reward_model_wins(
    pairs: Sequence[Pair], models: Sequence[str], *, folder: Path, progress: bool
) -> dict[str, dict[str, float]]:
    """Return by model and pair id 1 if the chosen answer scores higher, 0.5 for a tie, else 0.

    The models see no user. Evaluations in ``folder`` are continued; for errors see `prb_jax.evaluate`.
    """
    from prb_jax.scoring.controls import without_user
    from prb_jax.scoring.evaluate import run_evaluation  # slow to import
    from prb_jax.scoring.options import EvaluateOptions

    if not pairs:
        return {model: {} for model in models}
    shown = [without_user(pair.comparison) for pair in pairs]
    wins = {}
    for model in models:
        key = json.dumps([model, [comparison.to_row() for comparison in shown]], sort_keys=True)
        run = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        options = EvaluateOptions(out=run, controls="none", progress=progress)
        rows = run_evaluation(model, shown, options).rows
        wins[model] = {row.id: 0.5 + 0.5 * float(np.sign(row.scores[0] - row.scores[1])) for row in rows}
    return wins


def measure_blind_rewards(
    pairs: Sequence[Pair], wins: Mapping[str, Mapping[str, float]], *, gates: GateSettings
) -> GateFigure:
    """Return the share of wins that is farthest from 0.5; its interval must contain 0.5.

    The interval is over users, and wider with several models (Bonferroni).
    """
    wider = replace(gates, level=1 - (1 - gates.level) / len(wins))
    planted = "the model that is farthest from 0.5 prefers the chosen answer more often, or the rejected one"
    figures = []
    for model, of_model in wins.items():
        values = [of_model[pair.id] for pair in pairs]
        figures.append(
            chance_figure(values, pairs, gates=wider, either_way=True, note=model, planted=planted)
        )
    worst = max(figures, key=lambda figure: (not figure.passed, abs((figure.value or 0.0) - 0.5)))
    if worst.interval is None:
        return worst
    leaks = [figure.leak for figure in figures if figure.leak is not None]
    note = ", ".join(f"{figure.note} {figure.value:.3f}" for figure in figures)
    return replace(worst, note=note, leak=max(leaks, key=lambda leak: leak.excluded))
