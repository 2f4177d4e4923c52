"""Pairs to audit, with texts that attack the page, and answers of annotators."""

from pathlib import Path
from typing import Any

from tests.json_lines import write_lines

CRITERIA = ("correctness", "relevance", "helpfulness")
HOSTILE = (
    "</script><script>document.title = 'broken'</script><img src=x onerror=\"document.title = 'broken'\">\n"
    "# **Markdown** [link](javascript:alert(1)) \u202e\u05e9\u05dc\u05d5\u05dd\u202c \x1b[31m & 'quoted'"
)


def write_pairs(path: Path, count: int, *, users: int = 6, name: str = "p") -> Path:
    """Write pairs of some users; the chosen response begins with "good", the rejected one with "bad"."""
    rows = [
        {
            "id": f"{name}{number}",
            "user_id": f"u{number % users}",
            "question": f"Question {number}? {HOSTILE}",
            "chosen": f"good {number} {HOSTILE}",
            "rejected": f"bad {number} {HOSTILE}",
            "profile": [{"id": "1", "category": HOSTILE, "text": f"post {HOSTILE}"}],
            "rubric_aspects": [{"aspect": HOSTILE, "evidence": HOSTILE, "reason": HOSTILE}],
            "narrative": HOSTILE,
        }
        for number in range(count)
    ]
    write_lines(path, rows)
    return path


def answer(fit: str, *, comment: str = "", **ratings: int | str) -> dict[str, Any]:
    """An answer with a rating of 3 where none is given, as ``correctness_a=5``."""
    quality = {name: {side: ratings.get(f"{name}_{side}", 3) for side in "ab"} for name in CRITERIA}
    return {"quality": quality, "fit": fit, "comment": comment}


def good_side(item: dict[str, Any]) -> str:
    """The side of the chosen response."""
    return "a" if item["a"].startswith("good") else "b"
