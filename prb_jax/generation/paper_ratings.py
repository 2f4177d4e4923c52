"""The paper's judges of single responses: a number from 0 to 1, and the rubric judge, with their parsers and quirks.

`--prompts DIR` is the folder of the prompts in a checkout of Personalised RewardBench. The system turn is a constant in
its scripts, which are searched for a text with the known digest; nothing of them is part of this project.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import RunError
from prb_jax.generation.judge import Judgement, said, tokens_of
from prb_jax.generation.ratings import check_places, check_rateable, read_text
from prb_jax.generation.rubrics import check_rubric
from prb_jax.generation.speakers import Speaker, all_fitted
from prb_jax.generation.verdicts import fill_places, paper_question, read_paper_file
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.visible import render_profile

SYSTEM_DIGEST = "f090ab5395942261"
"""The first digits of the sha256 of the system turn of both judges."""
RUBRIC_PROMPT = ("evaluation.txt", "8dc668fadab47db9")
SCRIPTS = ("BoN/evaluate.py", "BoN/score.py", "PPO/evaluate.py", "PPO/reward_server.py")
"""Scripts of the checkout that hold the system turn."""

NUMBER_TOKENS, LIST_TOKENS = 10, 32
UNREAD_NUMBER, UNREAD_LIST = 0.5, 0.0
"""What the paper takes a reply for that cannot be read."""

_UNIT = re.compile(r"0?\.\d+|[01]\.?\d*")
_LIST = re.compile(r"\[([^\]]+)\]")
_NUMBER = re.compile(r"-?\d+\.?\d*")


def paper_number(reply: str) -> float | None:
    """Return the number of 0 to 1 that the paper's script reads; None where it takes its default, 0.5.

    The whole text is a number (beyond the ends it counts as the end, and so does what is not finite), or else the
    leftmost piece of it that looks like a number from 0 on.
    """
    text = reply.strip()
    try:
        value = float(text)
    except ValueError:
        found = _UNIT.search(text)
        if found is None:
            return None
        value = float(found[0])
    return max(0.0, min(1.0, value))  # min gives 1 for what is not a number, as the script does


def paper_list(reply: str) -> float | None:
    """Return the mean of the numbers that the paper's script reads; None where it takes its default, 0.

    They are looked for between the first brackets, or everywhere. They are not held to 0..2, nor counted.
    """
    text = reply.strip()
    inside = _LIST.search(text)
    numbers = [float(each) for each in _NUMBER.findall(inside[1] if inside else text)]
    return float(np.mean(numbers)) if numbers else None


@dataclass(frozen=True)
class PaperRatings:
    """Rates one response at a time as the scripts of Personalised RewardBench do.

    Attributes:
      speaker: the model.
      kind: "paper-score", a number from 0 to 1; or "paper-rubric", 0, 1 or 2 for each aspect in one reply.
      system: of the system turn.
      template: with the places {question}, {answer}, and {profile} or {aspects}.
    """

    speaker: Speaker
    kind: Literal["paper-score", "paper-rubric"]
    system: str
    template: str

    @property
    def rubric(self) -> bool:
        """Whether it is the rubric judge."""
        return self.kind == "paper-rubric"

    def identity(self) -> Mapping[str, Any]:
        return {
            **self.speaker.identity(),
            "judge": self.kind,
            "max_new_tokens": self._most,
            "rating_template": hashlib.sha256(self.template.encode()).hexdigest()[:16],
        }

    def firsts(self, comparisons: Sequence[Comparison]) -> list[int]:
        for each in comparisons:
            check_rateable(each)
        return [0] * len(comparisons)

    def judge(
        self, comparisons: Sequence[Comparison], firsts: Sequence[int], *, profile_posts: int
    ) -> list[Judgement]:
        if self.rubric and profile_posts:
            raise RunError(
                "profile_posts: the paper's rubric judge is shown no profile: expected 0, or leave it out"
            )
        conversations, dropped = all_fitted(
            self.speaker, comparisons, self._asked, posts=profile_posts, max_new_tokens=self._most
        )
        replies = iter(self.speaker.replies(conversations, max_new_tokens=self._most))
        found = []
        for each, lost in zip(comparisons, dropped, strict=True):
            own = [next(replies) for _ in each.responses]
            read = [(paper_list if self.rubric else paper_number)(reply.text) for reply in own]
            unread = UNREAD_LIST if self.rubric else UNREAD_NUMBER
            numbers = [unread if number is None else number for number in read]
            kept = {"ratings": numbers, "failed_parses": read.count(None), **said(own)}
            found.append(Judgement(np.asarray(numbers, np.float32), tokens_of(own), kept, lost))
        return found

    def figures(self, rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        subsets: dict[str, list[float]] = {}
        for row, each in zip(rows, comparisons, strict=True):
            subsets.setdefault(each.subset or "", []).extend(row["ratings"])
        every = [number for own in subsets.values() for number in own]
        return {
            "n": len(rows),
            **_spread(every),
            "by_subset": {name: _spread(own) for name, own in subsets.items() if name},
            "ratings": len(every),
            "failed_parses": sum(row["failed_parses"] for row in rows),
        }

    @property
    def _most(self) -> int:
        return LIST_TOKENS if self.rubric else NUMBER_TOKENS

    def _asked(self, comparison: Comparison, posts: int) -> list[tuple[Message, ...]]:
        texts = {"question": paper_question(comparison)}
        if self.rubric:
            check_rubric(comparison)
            texts["aspects"] = ", ".join(one.aspect for one in comparison.rubric_aspects)
        else:
            texts["profile"] = render_profile(comparison.profile, posts, protocol=TextProtocol.PAPER)
        return [
            (
                Message("system", self.system),
                Message("user", fill_places(self.template, {**texts, "answer": answer})),
            )
            for answer in comparison.responses
        ]


def read_paper_ratings(
    speaker: Speaker, kind: str, *, prompts: str | Path, template: str | Path | None
) -> PaperRatings:
    """Return one of the paper's judges of single responses.

    Args:
      speaker: the model.
      kind: "paper-score" or "paper-rubric".
      prompts: the folder of the prompts in a checkout of the paper's scripts.
      template: of "paper-score", with the places {question}, {profile} and {answer}. The scripts' default one is
        that of the rubric judge, so that their numbers mean nothing: there is no default here.

    Raises:
      RunError: a file cannot be read or is not the paper's, or the template is missing or lacks a place.
    """
    system = _system_turn(Path(prompts))
    if kind == "paper-rubric":
        return PaperRatings(speaker, "paper-rubric", system, read_paper_file(prompts, *RUBRIC_PROMPT))
    if template is None:
        raise RunError(
            "--template FILE: --protocol paper-score needs it: a text with the places {question}, {profile} and "
            "{answer} that asks for a number from 0 to 1"
        )
    text = read_text(template, "--template")
    check_places(text, str(template), needed=("question", "answer"), places=("question", "profile", "answer"))
    return PaperRatings(speaker, "paper-score", system, text)


def _system_turn(prompts: Path) -> str:
    for script in SCRIPTS:
        path = prompts.resolve().parent / script
        for text in _texts(path):
            if hashlib.sha256(text.strip().encode()).hexdigest().startswith(SYSTEM_DIGEST):
                return text.strip()
    raise RunError(
        f"{prompts}: the system turn of the paper's judges (sha256 {SYSTEM_DIGEST}...) is in none of "
        f"{', '.join(SCRIPTS)} beside it: --prompts takes the folder of the prompts in a checkout of Personalised "
        "RewardBench"
    )


def _texts(path: Path) -> Iterator[str]:
    """The texts that stand in a Python file; none where it cannot be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    values = np.asarray(numbers, np.float64)
    return {
        "mean_rating": float(values.mean()),
        "std": float(values.std()),  # of the population
        "min": float(values.min()),
        "max": float(values.max()),
    }
