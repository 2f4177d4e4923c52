"""MultiPref (arXiv 2410.19133): pairs of responses, each judged by several crowd workers and experts.

Each judgement is one comparison. Ties are left out; the profile holds the annotator's earlier choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prb_jax.errors import quote
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, Published

_KINDS: Final = ("normal", "expert")
_LEVELS: Final = {
    "A-is-clearly-better": (0, "clearly"),
    "A-is-slightly-better": (0, "slightly"),
    "Tie": None,
    "B-is-slightly-better": (1, "slightly"),
    "B-is-clearly-better": (1, "clearly"),
}


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a pair for each annotator who prefers a response over all; its subset is as "expert/clearly"."""
    histories = people.Histories()
    for place, row in published.rows:
        where = place.where
        name = fields.identifier(row.get("comparison_id"), where, "comparison_id")
        asked = fields.text(row.get("text"), where, "text")
        texts = [
            fields.text(row.get(f"completion_{letter}"), where, f"completion_{letter}") for letter in "ab"
        ]
        judged: list[tuple[str, list[dict[str, str]]]] = []
        for kind in _KINDS:
            column = f"{kind}_worker_annotations"
            for number, entry in enumerate(fields.objects(row.get(column), where, column)):
                field = f"{column}[{number}]"
                annotation = fields.mapping(entry, where, field)
                user = f"{kind}-{fields.identifier(annotation.get('evaluator'), where, f'{field}.evaluator')}"
                level = people.cell(
                    annotation.get("overall_pref"), where, f"{field}.overall_pref", published.cleaned
                )
                if level is None:
                    published.left_out["annotations without a preference"] += 1
                    continue
                if level not in _LEVELS:
                    expected = f"expected one of {', '.join(_LEVELS)}"
                    fields.fail(where, f"{field}.overall_pref", f"{expected}, found {quote(level)}")
                preference = _LEVELS[level]
                if preference is None or texts[0] == texts[1]:
                    published.left_out["ties" if preference is None else "pairs of equal responses"] += 1
                    continue
                side, strength = preference
                chosen, rejected = texts[side], texts[1 - side]
                yield (
                    where,
                    {
                        "id": f"{name}/{kind}/{number}",
                        "user_id": user,
                        "question": asked,
                        "chosen": chosen,
                        "rejected": rejected,
                        "subset": f"{kind}/{strength}",
                        "category": row.get("category"),
                        "profile": histories.posts(user, texts),
                    },
                )
                judged.append((user, people.posts_of_choice(asked, chosen, [rejected])))
        for user, posts in judged:
            histories.add(user, texts, posts)


BENCHMARK = Benchmark(
    name="multipref",
    rule=people.RULE,
    score=people.score,
    won=people.is_won,
    repository="allenai/multipref",
    splits=("train",),
    licence="ODC-BY, as its card says; check it",
    columns=("comparison_id", "completion_a", "normal_worker_annotations"),
    records=records,
)
