"""Generative reward models: the roles, reply format and scale that each was trained with. Does not import JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from prb_jax.behaviour.judges.replies import is_changed, without_thoughts

TOKENS: Final = 8192  # default maximum tokens of a reply, including thoughts


@dataclass(frozen=True, kw_only=True)
class GenerativeModel:
    """A family of generative reward models, a row of `GENERATIVE_MODELS`.

    Attributes:
      name: Protocol of `prb judge`.
      models: Names on the hub.
      read: Reads a reply without thoughts: A or B for the first or second response shown, Yes or No for a single one,
        or the numbers of all responses in the order shown; None if the reply has no verdict.
      roles: Roles of the messages after the conversation. Without roles, the user's turn is a template from the model
        card, which a user gives as a file.
      needs_principle: Whether a principle is required.
      single: Whether one response is shown at a time, as the assistant's turn.
      listwise: Whether all responses to a prompt are shown at once, in one JSON object with the principle. The system
        turn is a text from the model's authors, which a user gives as a file.
    """

    name: str
    models: tuple[str, ...]
    read: Callable[[str], Any]
    roles: tuple[str, ...] = ()
    needs_principle: bool = False
    single: bool = False
    listwise: bool = False

    def verdict(self, reply: str) -> Any:
        """Return the verdict of a reply, read after its thoughts."""
        answer = without_thoughts(reply)
        return None if answer is None else self.read(answer)


def read_scores(answer: str) -> str | None:
    """Return which response has the higher helpfulness (1 to 5), or else the better ranking (1 to 6; below 3.5 is A).

    The numbers are in a JSON object {score_1, score_2, ranking}, or boxed in one section of scores and one of ranking.
    """
    scores, ranking = _json_scores(answer) or _boxed_scores(answer)
    if len(scores) != 2 or not all(1 <= score <= 5 for score in scores):
        return None
    if ranking is not None and not 1 <= ranking <= 6:
        return None
    first, second = scores
    if first == second:
        first, second = (0.0, 0.0) if ranking is None else (3.5, ranking)
    return None if first == second else "A" if first > second else "B"


def _json_scores(answer: str) -> tuple[list[float], float | None] | None:
    found = None
    for text in re.findall(r"\{[^{}]*\}", answer):
        try:
            given: Any = json.loads(text, object_pairs_hook=_fields)
        except ValueError:
            continue
        if given is None:
            return [], None
        values = (
            [given.get(name) for name in ("score_1", "score_2", "ranking")] if isinstance(given, dict) else []
        )
        if any(_number(value) is not None for value in values[:2]):
            if "score_3" in given:  # two responses were shown
                return [], None
            numbers = [_number(value) for value in values]
            found = [one for one in numbers[:2] if one is not None], numbers[2]
            if values[2] is not None and numbers[2] is None:
                return [], None
    return found


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return an object of JSON, or None if it has a field twice."""
    given = dict(pairs)
    return given if len(given) == len(pairs) else None


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _boxed_scores(answer: str) -> tuple[list[float], float | None]:
    boxes = [
        re.findall(rf"\[The Begin of {name}\][^\[]*?\\boxed\{{([-\d., ]+)\}}", answer)[-1:]
        for name in ("Individual Scores", "Ranking Score")
    ]
    numbers = [[_number(part) for box in found for part in box.split(",")] for found in boxes]
    if any(None in some for some in numbers) or len(numbers[1]) > 1:
        return [], None
    scores, ranking = ([one for one in some if one is not None] for some in numbers)
    return scores, next(iter(ranking), None)


def read_judgement(answer: str) -> str | None:
    """Return Yes or No from the last "Final Judgement"; None for both words, and for one that is taken back."""
    after = re.split(r"Final Judge?ment\b", answer, flags=re.IGNORECASE)[1:]
    if not after:
        return None
    said = re.match(
        r"\W*(?:\byes\s*(?:/|or)\s*no\b\W*[:?]\W*|\(yes\s*(?:/|or)\s*no\)\W*)?(?:is\W+)?(yes|no)\b(.*)",
        after[-1],
        re.IGNORECASE | re.DOTALL,
    )
    if said is None:
        return None
    other = "no" if said[1].lower() == "yes" else "yes"
    if is_changed(said[2]) or re.match(rf"\W*(?:/|or|and|,)?\W*{other}\b", said[2], re.IGNORECASE):
        return None
    return said[1].capitalize()


def read_brackets(answer: str) -> str | None:
    """Return the only letter given as [[A]] or [[B]], within the last <answer> if there is one.

    Another verdict in brackets, as [[C]] or [[Tie]], and "not [[A]]" give None.
    """
    inside = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL | re.IGNORECASE)
    text = inside[-1] if inside else answer
    said = {letter.strip().upper() for letter in re.findall(r"\[\[([^\[\]\n]*)\]\]", text)}
    if re.search(r"\bnot\s+(?:\w+\s+)?\[\[", text, re.IGNORECASE):
        return None
    return said.pop() if len(said) == 1 and said <= {"A", "B"} else None


def read_list(answer: str) -> list[float] | None:
    """Return the scores (1 to 5) of all responses, from the last JSON object {"scores": {"model-1": 4, ...}}.

    Equal scores are told apart by the list "best-to-worst" if it names every response once: 0.01 for each response with
    the same score that is listed behind.
    """
    found: dict[str, Any] = {}
    place = answer.find("{")
    while place >= 0:
        try:
            given, end = json.JSONDecoder(object_pairs_hook=_fields).raw_decode(answer, place)
        except (ValueError, RecursionError):
            given, end = None, place + 1
        found = given if isinstance(given, dict) and "scores" in given else found
        place = answer.find("{", end)
    scores = found.get("scores")
    if not isinstance(scores, dict) or not scores:
        return None
    names = [f"model-{number}" for number in range(1, len(scores) + 1)]
    numbers = [number for name in names if (number := _number(scores.get(name))) is not None]
    if len(numbers) < len(names) or not all(1 <= number <= 5 for number in numbers):
        return None
    listed = found.get("best-to-worst", found.get("best-to-worse"))  # the second is a slip of the model
    if not isinstance(listed, list) or sorted(map(str, listed)) != sorted(names):
        return numbers
    places = [listed.index(name) for name in names]
    behind = [
        sum(other == number and rank > place for other, rank in zip(numbers, places, strict=True))
        for number, place in zip(numbers, places, strict=True)
    ]
    return [number + 0.01 * count for number, count in zip(numbers, behind, strict=True)]


def read_result(answer: str) -> str | None:
    """Return the letter after the last [RESULT]."""
    found = re.findall(r"\[RESULT\]\W*([AB])\W*$", answer.strip())
    return found[-1] if found else None


GENERATIVE_MODELS: Final = (
    GenerativeModel(
        name="nvidia-genrm",
        models=(
            "nvidia/Llama-3_3-Nemotron-Super-49B-GenRM",
            "nvidia/Llama-3_3-Nemotron-Super-49B-GenRM-Multilingual",
            "nvidia/Qwen3-Nemotron-235B-A22B-GenRM",
            "nvidia/Qwen3-Nemotron-235B-A22B-GenRM-2603",
        ),
        read=read_scores,
        roles=("principle", "response_1", "response_2"),
    ),
    GenerativeModel(
        name="nvidia-genrm-principle",
        models=("nvidia/Qwen3-Nemotron-32B-GenRM-Principle",),
        read=read_judgement,
        roles=("assistant", "principle"),
        needs_principle=True,
        single=True,
    ),
    GenerativeModel(
        name="rm-r1",
        models=(
            "gaotang/RM-R1-Qwen2.5-Instruct-7B",
            "gaotang/RM-R1-Qwen2.5-Instruct-14B",
            "gaotang/RM-R1-Qwen2.5-Instruct-32B",
            "gaotang/RM-R1-DeepSeek-Distilled-Qwen-7B",
            "gaotang/RM-R1-DeepSeek-Distilled-Qwen-14B",
            "gaotang/RM-R1-DeepSeek-Distilled-Qwen-32B",
        ),
        read=read_brackets,
    ),
    GenerativeModel(
        name="skywork-critic",
        models=("Skywork/Skywork-Critic-Llama-3.1-8B", "Skywork/Skywork-Critic-Llama-3.1-70B"),
        read=read_brackets,
    ),
    GenerativeModel(
        name="prometheus",
        models=("prometheus-eval/prometheus-7b-v2.0", "prometheus-eval/prometheus-8x7b-v2.0"),
        read=read_result,
    ),
    GenerativeModel(
        name="rewardanything",
        models=("zhuohaoyu/RewardAnything-8B-v1", "WisdomShell/RewardAnything-8B-v1"),
        read=read_list,
        needs_principle=True,
        listwise=True,
    ),
)
"""The table of generative reward models."""

GENERATIVE: Final = {row.name: row for row in GENERATIVE_MODELS}
"""The same rows by name."""


def find_generative(model: str) -> GenerativeModel | None:
    """Return the row of a hub model, or of a folder or endpoint model whose name has the same last part."""
    last = model.rstrip("/").rpartition("/")[2].casefold()
    found = (
        row for row in GENERATIVE_MODELS for name in row.models if name.rpartition("/")[2].casefold() == last
    )
    return next(found, None)
