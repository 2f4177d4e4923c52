"""A deterministic text engine behind the stand-in endpoint: it writes plans, aspects and answers, and judges.

It knows the words of each wish: an answer that follows a wish has its word, one that avoids it the opposite.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.behaviour.judges.stand_in import StandIn, stand_in

WORDS = {"short": "brisk", "cheap": "thrifty", "classic": "vintage", "bold": "daring"}
OPPOSITES = {"brisk": "leisurely", "thrifty": "lavish", "vintage": "modern", "daring": "careful"}

_TEXT = """people often begin with a plan and keep notes on every step while they walk through town near water under
trees friends who bring tools paper lamps bread music chairs maps ropes paint clay wool glass stone seeds boots books
clocks kites drums flags jars keys nets ovens pans quilts rakes saws tents urns vans wheels yarn"""
_FILLER = _TEXT.split()


def sentence(draws: random.Random, *words: str) -> str:
    """A sentence of these words and of others, sixteen in all."""
    every = [*words, *draws.sample(_FILLER, 16 - len(words))]
    draws.shuffle(every)
    return " ".join(every).capitalize() + "."


def answer(seed: object, marks: list[str], sentences: int = 3) -> str:
    """An answer with these words in it."""
    draws = random.Random(int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big"))
    return " ".join(sentence(draws, *(marks if place == 0 else [])) for place in range(sentences))


def wishes(text: str) -> list[str]:
    return [word for name, word in WORDS.items() if re.search(rf"\b{name}\b", text)]


def engine(**faults: Any) -> Callable[[dict[str, Any]], str]:
    """Return a function that replies to the body of a request.

    Args:
      faults: "refuse", "longer" (the chosen answer has a sentence more) or "blind" (the judge has a taste of its own).
    """

    def reply(body: dict[str, Any]) -> str:
        text, seed = body["messages"][-1]["content"], body.get("seed")
        if "Which answer" in text:
            return judge(text)
        if faults.get("refuse"):
            return "I'm sorry, but I cannot help with that."
        if "The user's note:" in text:
            note = text.partition("The user's note:\n")[2].partition("\n\nList")[0]
            named = [name for name in WORDS if name in note.split()]
            return json.dumps(
                [{"aspect": f"{n} things", "evidence": n, "reason": f"likes {n}"} for n in named]
            )
        if text.startswith("A user asked:"):
            return "Begin early; keep notes."
        if "Some other user" in text:
            return "Say " + ", ".join(OPPOSITES[word] for word in wishes(text)) + "."
        if "in one short sentence for each of these wishes" in text:
            return "Say " + ", ".join(wishes(text)) + "."
        plan = text.partition("How the answer is made:\n")[2].partition("\n\n")[0]
        marks = re.findall(r"\w+", plan.removeprefix("Say "))
        follows = marks[0] in OPPOSITES
        return answer((seed, text), marks, 4 if follows and faults.get("longer") else 3)

    def judge(text: str) -> str:
        a, _, rest = text.partition("Answer A:\n")[2].partition("\n\nAnswer B:\n")
        b = rest.partition("\n\nWhich answer")[0]
        if "serves these wishes better" in text:
            wanted = wishes(text.partition("This is what they want")[2].partition("Answer A:")[0])
            return "A" if sum(w in a.lower() for w in wanted) > sum(w in b.lower() for w in wanted) else "B"
        if faults.get("blind"):  # it has the taste of everybody here
            return "A" if any(word in a.lower() for word in OPPOSITES) else "B"
        first, second = (hashlib.sha256(text.encode()).digest() for text in (a, b))
        return "A" if first > second else "B"

    return reply


def served(**faults: Any) -> AbstractContextManager[StandIn]:
    """Return an endpoint at which the engine replies."""
    reply = engine(**faults)
    return stand_in(lambda body, _: reply(body), whole=True)


def record(number: int, **fields: Any) -> dict[str, Any]:
    """A record of one of twelve users with two wishes."""
    wanted = [list(WORDS)[k % 4] for k in (number, number + 1)]
    return {
        "id": f"q{number}",
        "user_id": f"u{number % 12}",
        "question": f"How do I spend day {number} of my {_FILLER[number % 40]} {_FILLER[(number * 7 + 3) % 40]} year?",
        "profile": [{"id": f"p{number % 12}", "category": "", "text": f"I am user {number % 12}."}],
        "narrative": f"I like {wanted[0]} and {wanted[1]} things.",
        "rubric_aspects": [{"aspect": f"{n} things", "evidence": n, "reason": f"likes {n}"} for n in wanted],
        **fields,
    }
