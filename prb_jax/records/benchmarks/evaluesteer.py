"""EVALUESTEER (github.com/kshitishghate/EVALUESTEER): whether a reward model follows a user's stated value or style.

Responses are generated. Each question has two opposite value statements and a response for each, in opposite styles.
Every pair is asked of a user who wants the one and of a user who wants the other. So a score that ignores the profile
is right in half of the pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prb_jax.errors import quote
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, Published

FAMILIES: Final[Mapping[str, Mapping[str, str]]] = {
    "verbosity": {
        "verbose": "I like long answers that explain everything in detail.",
        "concise": "I like short answers that come to the point at once.",
    },
    "readability": {
        "high_reading_difficulty": "I like demanding language with rare words and long sentences.",
        "low_reading_difficulty": "I like plain language that is easy to read.",
    },
    "confidence": {
        "high_confidence": "I like answers that are sure of themselves.",
        "low_confidence": "I like answers that admit how uncertain they are.",
    },
    "sentiment": {
        "warm": "I like a warm and friendly tone.",
        "cold": "I like a formal and distant tone.",
    },
}
"""Families of styles, each with two opposite styles and what a user who wants a style says."""

_FAMILY_OF: Final = {frozenset(styles): family for family, styles in FAMILIES.items()}
_USERS: Final = tuple(itertools.product(*FAMILIES.values()))  # the 16 users, each with a style of each family
_FAILED: Final = "Error: "  # how the generator of the data writes that it gave up
_NO_STYLE: Final = "none"


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield pairs of two values for the holders of either, and pairs of two styles for 16 users with four wishes."""
    for place, row in published.rows:
        where = place.where
        name = fields.identifier(row.get("question_id"), where, "question_id")
        asked = fields.text(row.get("prompt"), where, "prompt")
        for family, styles, columns, statements in _layouts(row, where):
            cells = {
                key: people.cell(row.get(column), where, column, published.cleaned)
                for key, column in columns.items()
            }
            texts = {key: text for key, text in cells.items() if text and not text.startswith(_FAILED)}
            pairs = [*_value_pairs(name, styles, statements)]
            pairs += [] if family == _NO_STYLE else [*_style_pairs(styles)]
            for pair in pairs:
                if (
                    not {pair.chosen, pair.rejected} <= texts.keys()
                    or texts[pair.chosen] == texts[pair.rejected]
                ):
                    published.left_out["pairs with an empty response, or of equal ones"] += 1
                    continue
                yield (
                    where,
                    {
                        "id": f"{name}/{family}/{pair.id}",
                        "user_id": pair.user,
                        "question": asked,
                        "chosen": texts[pair.chosen],
                        "rejected": texts[pair.rejected],
                        "subset": f"{pair.kind}/{family}",
                        "profile": [people.post(pair.kind, text) for text in pair.wishes],
                    },
                )


Side = tuple[int, str]
"""A response: its value, 1 or 2, and its style."""


class _Pair(NamedTuple):
    id: str
    kind: str  # "value" or "style": in which the two differ
    user: str
    wishes: Sequence[str]  # what the user says
    chosen: Side
    rejected: Side


def _value_pairs(question: str, styles: Sequence[str], statements: Sequence[str]) -> Iterator[_Pair]:
    for value, one, other in itertools.product((1, 2), styles, styles):
        user, wish = f"{question}: value {value}", statements[value - 1]
        yield _Pair(f"value {value}/{one} {other}", "value", user, [wish], (value, one), (3 - value, other))


def _style_pairs(styles: Sequence[str]) -> Iterator[_Pair]:
    for value, wanted in itertools.product((1, 2), _USERS):
        (liked,) = set(styles) & set(wanted)
        (disliked,) = set(styles) - {liked}
        user = " ".join(wanted)
        wishes = [FAMILIES[family][style] for family, style in zip(FAMILIES, wanted, strict=True)]
        yield _Pair(f"style {value}/{user}", "style", user, wishes, (value, liked), (value, disliked))


def _layouts(
    row: Mapping[str, Any], where: str
) -> Iterator[tuple[str, tuple[str, ...], dict[Side, str], tuple[str, str]]]:
    """Yield family, styles, columns and value statements: one family a row in the CSV file, all of them in the JSON
    file."""

    def statements(prefix: str) -> tuple[str, str]:
        first, second = (fields.text(row.get(f"{prefix}_{n}"), where, f"{prefix}_{n}") for n in (1, 2))
        for n, statement in enumerate((first, second), start=1):
            if not statement.strip():
                fields.fail(where, f"{prefix}_{n}", "empty; expected what the user says")
        return first, second

    if "value1_style1_completion" not in row:
        for family, styles in FAMILIES.items():
            columns = {
                (value, style): f"completion_{letter}_{style}"
                for value, letter in ((1, "A"), (2, "B"))
                for style in styles
            }
            yield family, tuple(styles), columns, statements("statement")
        return
    styles = tuple(fields.text(row.get(f"style_{n}"), where, f"style_{n}") for n in (1, 2))
    family = _NO_STYLE if set(styles) == {_NO_STYLE} else _FAMILY_OF.get(frozenset(styles))
    if family is None:
        known = "; ".join(" and ".join(pair) for pair in FAMILIES.values())
        fields.fail(
            where,
            "style_1",
            f"expected {_NO_STYLE}, or opposite styles ({known}), found {quote(list(styles))}",
        )
    numbered = enumerate(styles[:1] if family == _NO_STYLE else styles, start=1)
    columns = {
        (value, style): f"value{value}_style{n}_completion" for n, style in numbered for value in (1, 2)
    }
    yield family, tuple(dict.fromkeys(styles)), columns, statements("value_statement")


BENCHMARK = Benchmark(
    name="evaluesteer",
    rule="pairs in which the response that the user wants scores strictly higher / pairs; 0.5 for a score that "
    "ignores the profile and has no ties",
    score=people.score,
    won=people.is_won,
    files="**/*.csv",
    home="github.com/kshitishghate/EVALUESTEER (its CSV file, or its JSON file of style variations)",
    licence="MIT",
    columns=("question_id", "prompt", "wvs_question"),
    records=records,
)
