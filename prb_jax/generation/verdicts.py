"""What a judge of pairs is shown, and how its reply is read: the paper's way, quirks included, and our own."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import DataError, RunError, quote
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.visible import visible

PAPER_PROMPTS = MappingProxyType(
    {"pairwise_system.txt": "5438903c1bb5524d", "pairwise_user.txt": "6cdbfc0c2ce1eae2"}
)
"""The files of the paper's judge, and the first digits of the sha256 of their text without blanks around it."""

PAPER_SEED = 42

ONE_LETTER = "Which answer does this user prefer? Reply with one letter, A or B, and nothing else."
AFTER_REASONING = (
    "Which answer does this user prefer? Think about what the user wants, then end your reply with a line that says "
    '"Verdict: A" or "Verdict: B".'
)

ONE_LETTER_SHARE, FEWEST_VERDICTS = 0.9, 8
"""A judge is warned of that names one letter in this share of its verdicts, of which there are at least so many."""

PLACE = re.compile(r"\{([A-Za-z_]+)\}")
_LAST_VERDICT = re.compile(r"verdict\W+([ab])\b", re.IGNORECASE)


@dataclass(frozen=True)
class PaperPrompts:
    """The texts of the paper's judge.

    Attributes:
      system: of the system turn.
      user: of the user's turn, with the places {question}, {Response_A} and {Response_B}.
    """

    system: str
    user: str

    def messages(self, comparison: Comparison, first: int) -> tuple[Message, ...]:
        """Return the conversation that shows the response `first` as A; the question alone, no profile.

        Raises:
          DataError: a prompt of several turns, for which the paper has no place.
        """
        a, b = comparison.responses[first], comparison.responses[1 - first]
        texts = {"question": paper_question(comparison), "Response_A": a, "Response_B": b}
        return Message("system", self.system), Message("user", fill_places(self.user, texts))


def fill_places(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with texts in all places {name} at once.

    A place within a text stays as it is, so that a response that contains ``{Response_B}`` is not given the other one.
    The paper's scripts put in one text after another, and replace such a place too: this quirk is not copied.
    """
    return PLACE.sub(lambda place: texts.get(place[1], place[0]), template)


def paper_question(comparison: Comparison) -> str:
    """Return the question, which is all that the paper's judges are told of a prompt.

    Raises:
      DataError: a prompt of several turns, for which the paper has no place.
    """
    if len(comparison.prompt) > 1:
        raise DataError(
            f"comparison {quote(comparison.id)}: the paper's judge reads one question, found a prompt of "
            f"{len(comparison.prompt)} turns: use the default protocol"
        )
    return comparison.question


def read_paper_prompts(folder: str | Path) -> PaperPrompts:
    """Return the prompts in a folder of the paper's scripts.

    Raises:
      RunError: a file cannot be read, or is not the paper's.
    """
    return PaperPrompts(*(read_paper_file(folder, name, digest) for name, digest in PAPER_PROMPTS.items()))


def read_paper_file(folder: str | Path, name: str, digest: str) -> str:
    """Return the text of one prompt file of the paper's scripts, without blanks around it.

    Args:
      folder: of the prompts.
      name: of the file.
      digest: the first digits of the sha256 of the text.

    Raises:
      RunError: it cannot be read, or is not the paper's.
    """
    path = Path(folder) / name
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}: --prompts takes the folder of the prompts in a checkout of "
            "Personalised RewardBench"
        ) from error
    found = hashlib.sha256(text.encode()).hexdigest()
    if not found.startswith(digest):
        raise RunError(f"{path}: not the paper's file: expected sha256 {digest}..., found {found[:16]}...")
    return text


def paper_first(comparisons: Sequence[Comparison]) -> list[int]:
    """Return the response that is shown as A in each comparison: a coin that starts again in every subset.

    The better response is A where `random.random()` is below one half.
    """
    coins: dict[str | None, random.Random] = {}
    found = []
    for comparison in comparisons:
        coin = coins.setdefault(comparison.subset, random.Random(PAPER_SEED))
        right = better(comparison)
        found.append(right if coin.random() < 0.5 else 1 - right)
    return found


def shown_texts(comparison: Comparison, *, profile_posts: int) -> tuple[str, tuple[str, ...]]:
    """Return what the user asks, behind the user's posts, as one text; and the responses."""
    seen = visible(comparison, profile_posts=profile_posts, protocol=TextProtocol.DEFAULT)
    turns = seen.prefix_messages
    if len(turns) == 1:
        return turns[0].content, seen.responses
    asked = "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in turns)
    return asked, seen.responses


def default_messages(
    comparison: Comparison, first: int, *, profile_posts: int, reason: bool
) -> tuple[Message, ...]:
    """Return the conversation that shows the response `first` as A, behind the user's posts and the prompt."""
    asked, responses = shown_texts(comparison, profile_posts=profile_posts)
    a, b = responses[first], responses[1 - first]
    question = AFTER_REASONING if reason else ONE_LETTER
    text = f"{asked}\n\nTwo answers were given.\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\n{question}"
    return (Message("user", text),)


def paper_verdict(reply: str) -> str | None:
    """Return A or B as the paper's script reads it; None where it finds neither."""
    text = reply.strip().rsplit("</think>", 1)[-1].replace('"', "").replace("*", "").lower()
    if "result:" not in text:
        return None
    named = text.split("result:")[1].strip()[:1]
    return {"a": "A", "b": "B"}.get(named)


def default_verdict(reply: str) -> str | None:
    """Return A or B: the reply is that letter, or the last verdict that it names; None where there is neither.

    A thought that is not closed has no verdict.
    """
    _, closed, said = reply.rpartition("</think>")
    if not closed and "<think>" in reply:
        return None
    letter = said.strip().strip("*`\"'.()[]: ").upper()
    if letter in ("A", "B"):
        return letter
    named = _LAST_VERDICT.findall(said)
    return named[-1].upper() if named else None


def better(comparison: Comparison) -> int:
    """Return which of two responses is labelled the better one.

    Raises:
      DataError: not two responses, or no labels.
    """
    if len(comparison.responses) != 2:
        raise DataError(
            f"comparison {quote(comparison.id)}: a judge of pairs reads 2 responses, found {len(comparison.responses)}"
        )
    if comparison.labels is None:
        raise DataError(f"comparison {quote(comparison.id)}: has no labels")
    return int(comparison.labels[1] > comparison.labels[0])


def paper_figures(rows: Sequence[Mapping[str, object]], right: Sequence[int]) -> dict[str, object]:
    """Return the paper's figures: what cannot be read counts as A."""
    shown_a = [row["first"] == good for row, good in zip(rows, right, strict=True)]
    said_a = [row["verdicts"] != ["B"] for row in rows]
    hits = [shown == said for shown, said in zip(shown_a, said_a, strict=True)]

    def part(inside: bool) -> dict[str, object]:
        own = [hit for hit, shown in zip(hits, shown_a, strict=True) if shown == inside]
        return {"n": len(own), "accuracy": sum(own) / len(own) if own else None}

    first, second = part(True), part(False)
    a, b = first["accuracy"], second["accuracy"]
    return {
        **one_letter(sum(said_a), len(said_a) - sum(said_a)),
        "n": len(rows),
        "correct": sum(hits),
        "accuracy": sum(hits) / len(hits),
        "chosen_in_a": first,
        "chosen_in_b": second,
        "position_bias": abs(a - b) if isinstance(a, float) and isinstance(b, float) else None,
        "predicted_a": sum(said_a),
        "predicted_b": len(said_a) - sum(said_a),
        "failed_parses": sum(row["verdicts"] == [None] for row in rows),
    }


def default_figures(rows: Sequence[Mapping[str, object]], right: Sequence[int]) -> dict[str, object]:
    """Return the figures of verdicts in both orders: the first shows response 0 as A, the second response 1."""
    verdicts = [tuple(row["verdicts"]) for row in rows]  # pyright: ignore[reportArgumentType]
    same = {("A", "B"): 0, ("B", "A"): 1}
    consistent = [same.get(pair) for pair in verdicts]
    read = [letter for pair in verdicts for letter in pair if letter is not None]
    return {
        **one_letter(read.count("A"), read.count("B")),
        "n": len(rows),
        "order_consistent_accuracy": sum(found == good for found, good in zip(consistent, right, strict=True))
        / len(rows),
        "consistent": sum(found is not None for found in consistent) / len(rows),
        "position_bias": abs(2 * read.count("A") / len(read) - 1) if read else None,
        "said_a": read.count("A"),
        "said_b": read.count("B"),
        "unparsable": sum(None in pair for pair in verdicts),
        "unparsable_verdicts": 2 * len(rows) - len(read),
    }


def one_letter(a: int, b: int) -> dict[str, object]:
    """Return a warning about a judge that names nearly always one letter, whatever is shown under it; else nothing.

    Args:
      a, b: how often each letter was named.
    """
    often, total = max(a, b), a + b
    if total < FEWEST_VERDICTS or often < ONE_LETTER_SHARE * total:
        return {}
    letter = "A" if a > b else "B"
    return {
        "warning": f"{letter} was named in {often:,} of {total:,} verdicts, whatever was shown as {letter}: the "
        "accuracy says where the better responses stood, and nothing of the judge's taste"
    }
