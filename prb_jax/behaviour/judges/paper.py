"""The judges of Personalised RewardBench, prompted as in its scripts, with their parsers and quirks.

`--prompts DIR` is the folder of prompts in a checkout of the scripts. The system turn of the judges of single responses
is a constant in the scripts, so these are searched for a text with the known digest. This project contains no part of
them. One quirk is not copied: see :func:`prb_jax.behaviour.judges.ratings.fill_places`.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from prb_jax.behaviour.judges.chat import ChatModel, InWords
from prb_jax.behaviour.judges.options import PAPER_RUBRIC, PAPER_SCORE
from prb_jax.behaviour.judges.pairs import better_response, warn_of_one_letter
from prb_jax.behaviour.judges.ratings import check_places, check_rubric, fill_places, read_text
from prb_jax.behaviour.judges.scorer import Answer, Conversation, JudgeProtocol, VerdictLine, nothing_read
from prb_jax.errors import DataError, RunError, quote
from prb_jax.records.comparison import Comparison, Message
from prb_jax.runs.rows import Row
from prb_jax.text.view import TextProtocol, render_profile

PAIR_PROMPTS = MappingProxyType(
    {"pairwise_system.txt": "5438903c1bb5524d", "pairwise_user.txt": "6cdbfc0c2ce1eae2"}
)
"""Files of the judge of pairs, and the first digits of the sha256 of their stripped text."""
RUBRIC_PROMPT = ("evaluation.txt", "8dc668fadab47db9")
SYSTEM_DIGEST = "f090ab5395942261"
"""The first digits of the sha256 of the system turn of the judges of single responses."""
SCRIPTS = ("BoN/evaluate.py", "BoN/score.py", "PPO/evaluate.py", "PPO/reward_server.py")
"""Scripts of the checkout that contain the system turn."""

SEED = 42
PAIR_TOKENS, NUMBER_TOKENS, LIST_TOKENS = 512, 10, 32
UNREAD_NUMBER, UNREAD_LIST = 0.5, 0.0  # the scripts' score for a reply that cannot be read

_UNIT = re.compile(r"0?\.\d+|[01]\.?\d*")
_LIST = re.compile(r"\[([^\]]+)\]")
_NUMBER = re.compile(r"-?\d+\.?\d*")


def paper_verdict(reply: str) -> str | None:
    """Return A or B as the paper's script reads it; None if it finds neither."""
    text = reply.strip().rsplit("</think>", 1)[-1].replace('"', "").replace("*", "").lower()
    if "result:" not in text:
        return None
    return {"a": "A", "b": "B"}.get(text.split("result:")[1].strip()[:1])


def paper_number(reply: str) -> float | None:
    """Return the number from 0 to 1 that the paper's script reads; None if it would use its default, 0.5.

    If the whole text is a number, it is clipped to 0..1 (infinity and NaN too); otherwise the leftmost piece that looks
    like a non-negative number is used.
    """
    text = reply.strip()
    try:
        value = float(text)
    except ValueError:
        piece = _UNIT.search(text)
        if piece is None:
            return None
        value = float(piece[0])
    return max(0.0, min(1.0, value))  # min gives 1 for NaN, as in the script


def paper_list(reply: str) -> float | None:
    """Return the mean of the numbers that the paper's script reads; None if it would use its default, 0.

    It searches between the first brackets, or everywhere. It neither limits the numbers to 0..2 nor checks their count.
    """
    text = reply.strip()
    inside = _LIST.search(text)
    numbers = [float(number) for number in _NUMBER.findall(inside[1] if inside else text)]
    return float(np.mean(numbers)) if numbers else None


def paper_first(comparisons: Sequence[Comparison]) -> list[int]:
    """Return the index of the response shown as A in each comparison: a coin that restarts in every subset.

    The better response is A if `random.random()` is below one half.
    """
    coins: dict[str | None, random.Random] = {}
    firsts = []
    for comparison in comparisons:
        coin = coins.setdefault(comparison.subset, random.Random(SEED))
        better = better_response(comparison)
        firsts.append(better if coin.random() < 0.5 else 1 - better)
    return firsts


@dataclass(frozen=True)
class PaperPairs(JudgeProtocol):
    """Asks in one order chosen by a seeded coin; a reply that cannot be read counts as A."""

    model: InWords
    system: str  # text of the system turn
    user: str  # text of the user's turn, with the places {question}, {Response_A} and {Response_B}
    shows_profile = False
    line = VerdictLine

    def identity(self) -> Mapping[str, Any]:
        return {**self.model.identity(), "judge": "paper", "max_new_tokens": self.model.max_new_tokens}

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        return paper_first(comparisons)

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        a, b = comparison.responses[first], comparison.responses[1 - first]
        texts = {"question": _question(comparison), "Response_A": a, "Response_B": b}
        return [(Message("system", self.system), Message("user", fill_places(self.user, texts)))]

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        (reply,) = answer.replies
        verdict = paper_verdict(reply.text)
        won = 1 - first if verdict == "B" else first
        return (1.0 - won, float(won)), {"first": first, "verdicts": [verdict]}

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        better_in_a = [
            row["first"] == better_response(comparison)
            for row, comparison in zip(rows, comparisons, strict=True)
        ]
        named_a = [row["verdicts"] != ["B"] for row in rows]
        hits = [shown == named for shown, named in zip(better_in_a, named_a, strict=True)]

        def part(in_a: bool) -> dict[str, Any]:
            members = [hit for hit, shown in zip(hits, better_in_a, strict=True) if shown == in_a]
            return {"n": len(members), "accuracy": sum(members) / len(members) if members else None}

        in_a, in_b = part(True), part(False)
        shares = [in_a["accuracy"], in_b["accuracy"]]
        failed = sum(row["verdicts"] == [None] for row in rows)
        warning = warn_of_one_letter(sum(named_a), len(named_a) - sum(named_a))
        return {
            **(warning if failed < len(rows) else nothing_read(undefined=False)),  # each counts as A
            "n": len(rows),
            "correct": sum(hits),
            "accuracy": sum(hits) / len(hits),
            "chosen_in_a": in_a,
            "chosen_in_b": in_b,
            "position_bias": None if None in shares else abs(shares[0] - shares[1]),
            "predicted_a": sum(named_a),
            "predicted_b": len(named_a) - sum(named_a),
            "failed_parses": failed,
        }


@dataclass(frozen=True)
class PaperRatings(JudgeProtocol):
    """Rates one response at a time."""

    model: InWords  # the model to ask
    # "paper-score", a number from 0 to 1; or "paper-rubric", 0, 1 or 2 for each aspect in one reply
    kind: str
    system: str  # text of the system turn
    template: str  # text with the places {question}, {answer}, and {profile} or {aspects}

    @property
    def shows_profile(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether this is the judge without a rubric."""
        return self.kind == PAPER_SCORE

    def identity(self) -> Mapping[str, Any]:
        return {
            **self.model.identity(),
            "judge": self.kind,
            "max_new_tokens": self.model.max_new_tokens,
            "rating_template": hashlib.sha256(self.template.encode()).hexdigest()[:16],
        }

    def ask(self, comparison: Comparison, first: int, posts: int) -> list[Conversation]:
        texts = {"question": _question(comparison)}
        if self.kind == PAPER_RUBRIC:
            check_rubric(comparison)
            texts["aspects"] = ", ".join(aspect.aspect for aspect in comparison.rubric_aspects)
        else:
            texts["profile"] = render_profile(comparison.profile, posts, protocol=TextProtocol.PAPER)
        asked = [fill_places(self.template, {**texts, "answer": answer}) for answer in comparison.responses]
        return [(Message("system", self.system), Message("user", text)) for text in asked]

    def read(self, comparison: Comparison, first: int, answer: Answer) -> tuple[Any, dict[str, Any]]:
        rubric = self.kind == PAPER_RUBRIC
        parse, unread = (paper_list, UNREAD_LIST) if rubric else (paper_number, UNREAD_NUMBER)
        parsed = [parse(reply.text) for reply in answer.replies]
        numbers = [unread if number is None else number for number in parsed]
        return numbers, {"ratings": numbers, "failed_parses": parsed.count(None)}

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        subsets: dict[str, list[float]] = {}
        for row, comparison in zip(rows, comparisons, strict=True):
            subsets.setdefault(comparison.subset or "", []).extend(row["ratings"])
        every = [number for numbers in subsets.values() for number in numbers]
        failed = sum(row["failed_parses"] for row in rows)
        return {
            **(nothing_read(undefined=True) if failed == len(every) else {}),
            "n": len(rows),
            **_spread(every),
            "by_subset": {name: _spread(numbers) for name, numbers in subsets.items() if name},
            "ratings": len(every),
            "failed_parses": failed,
        }


def open_paper_judge(
    chat: ChatModel, protocol: str, *, prompts: str | Path, template: str | Path | None
) -> PaperPairs | PaperRatings:
    """Return one of the paper's judges.

    Args:
      protocol: Name of the judge: "paper", "paper-score" or "paper-rubric".
      prompts: Folder of the prompts in a checkout of the paper's scripts.
      template: Template of "paper-score", with the places {question}, {profile} and {answer}. The scripts default to
        the template of the rubric judge, which makes their numbers meaningless, so there is no default here.

    Raises:
      RunError: a file cannot be read or is not the paper's, or the template is missing or lacks a place.
    """
    if protocol == TextProtocol.PAPER:
        texts = [_paper_file(prompts, name, digest) for name, digest in PAIR_PROMPTS.items()]
        return PaperPairs(InWords(chat, PAIR_TOKENS), *texts)
    system = _system_turn(Path(prompts))
    if protocol == PAPER_RUBRIC:
        text = _paper_file(prompts, *RUBRIC_PROMPT)
        return PaperRatings(InWords(chat, LIST_TOKENS), PAPER_RUBRIC, system, text)
    if template is None:
        raise RunError(
            "--template FILE: --protocol paper-score needs it: a text with the places {question}, {profile} and "
            "{answer} that asks for a number from 0 to 1"
        )
    text = read_text(template, "--template")
    check_places(text, str(template), needed=("question", "answer"), places=("question", "profile", "answer"))
    return PaperRatings(InWords(chat, NUMBER_TOKENS), PAPER_SCORE, system, text)


def _question(comparison: Comparison) -> str:
    """Return the question: the only part of a prompt that the paper's judges see.

    Raises:
      DataError: the prompt has several turns, which the paper does not support.
    """
    if len(comparison.prompt) != 1 or comparison.context:
        raise DataError(
            f"comparison {quote(comparison.id)}: the paper's judge reads one question, found a prompt of "
            f"{len(comparison.prompt)} turns{' and tools' * bool(comparison.context)}: use the default protocol"
        )
    return comparison.question


def _paper_file(folder: str | Path, name: str, digest: str) -> str:
    """Return the stripped text of one prompt file of the scripts; its sha256 must begin with ``digest``."""
    path = Path(folder) / name
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}: --prompts takes the folder of the prompts in a checkout of "
            "Personalised RewardBench"
        ) from error
    actual = hashlib.sha256(text.encode()).hexdigest()
    if not actual.startswith(digest):
        raise RunError(f"{path}: not the paper's file: expected sha256 {digest}..., found {actual[:16]}...")
    return text


def _system_turn(prompts: Path) -> str:
    for script in SCRIPTS:
        try:
            tree = ast.parse((prompts.resolve().parent / script).read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value.strip()
                if hashlib.sha256(text.encode()).hexdigest().startswith(SYSTEM_DIGEST):
                    return text
    raise RunError(
        f"{prompts}: the system turn of the paper's judges (sha256 {SYSTEM_DIGEST}...) is in none of "
        f"{', '.join(SCRIPTS)} beside it: --prompts takes the folder of the prompts in a checkout of Personalised "
        "RewardBench"
    )


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    values = np.asarray(numbers, np.float64)
    return {
        "mean_rating": float(values.mean()),
        "std": float(values.std()),  # population standard deviation
        "min": float(values.min()),
        "max": float(values.max()),
    }
