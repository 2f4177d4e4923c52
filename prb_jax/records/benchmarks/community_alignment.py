"""Community Alignment (facebook/community-alignment-dataset): choices between four responses, in five languages.

A row is a conversation of up to four turns; each turn is one comparison of K = 4 with one preferred response, after the
conversation so far. The profile holds what the person states, and choices in the person's earlier conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, BenchmarkScore, Published, mean

_TURNS: Final = ("first", "second", "third", "fourth")
_RESPONSES: Final = tuple(f"response_{letter}" for letter in "abcd")
_FACTS: Final = ("age", "gender", "education_level", "political", "ethnicity", "country")


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a comparison for each turn with distinct responses and a preferred one."""
    histories = people.Histories()
    for place, row in published.rows:
        where, choices = place.where, []
        user = fields.identifier(row.get("annotator_id"), where, "annotator_id")
        conversation = fields.identifier(row.get("conversation_id"), where, "conversation_id")
        balanced = people.truth(row.get("in_balanced_subset") or False, where, "in_balanced_subset")
        language = (
            people.cell(row.get("assigned_lang"), where, "assigned_lang", published.cleaned) or "unknown"
        )
        facts = [
            f"{name.replace('_', ' ')}: {value}"
            for name in _FACTS
            if (
                value := people.cell(
                    row.get(f"annotator_{name}"), where, f"annotator_{name}", published.cleaned
                )
            )
        ]
        known = [people.post("about this person", "; ".join(facts))] if facts else []
        for number, messages, texts, preferred in _turns(row, where, published):
            feedback = people.cell(
                row.get(f"{_TURNS[number - 1]}_turn_feedback"),
                where,
                f"{_TURNS[number - 1]}_turn_feedback",
                published.cleaned,
            )
            candidates = list(filter(None, texts.values()))
            chosen = texts[preferred] or ""
            choices.append(
                (candidates, people.posts_of_choice(messages[-1]["content"], chosen, (), feedback))
            )
            if len(candidates) < len(texts):
                published.left_out["turns with an empty response"] += 1
            elif len(set(candidates)) < len(candidates):
                published.left_out["turns that offer a response twice"] += 1
            else:
                prompt = sha256(json.dumps(messages).encode()).hexdigest()[:12]
                yield (
                    where,
                    {
                        "id": f"{conversation}/{number}@{prompt}",
                        "user_id": user,
                        "prompt": messages,
                        "responses": candidates,
                        "labels": [float(name == preferred) for name in texts],
                        "subset": f"{language}/{'balanced' if balanced else 'not balanced'}",
                        "profile": [*known, *histories.posts(user, candidates)],
                    },
                )
        for candidates, posts in choices:  # a profile excludes its own conversation
            histories.add(user, candidates, posts)


def _turns(
    row: Mapping[str, Any], where: str, published: Published
) -> Iterator[tuple[int, list[dict[str, str]], dict[str, str | None], str]]:
    """Yield each turn's number, conversation so far, responses by name and the name of the preferred one.

    Turns after one that cannot be read are left out: what they answer is not known.
    """
    messages: list[dict[str, str]] = []
    ended = ""
    for number, turn in enumerate(_TURNS, start=1):
        names = {name: f"{turn}_turn_{name}" for name in ("prompt", "preferred_response", *_RESPONSES)}
        cells = {
            name: people.cell(row.get(column), where, column, published.cleaned)
            for name, column in names.items()
        }
        asked, preferred = cells.pop("prompt"), cells.pop("preferred_response")
        if asked is None and preferred is None and not any(cells.values()):
            ended = ended or "turns after an empty one"
            continue
        if preferred is not None and preferred not in cells:
            expected = f"expected one of {', '.join(_RESPONSES)}"
            fields.fail(where, names["preferred_response"], f"{expected}, found {fields.found(preferred)}")
        if not ended and asked is None:
            published.left_out["turns without a prompt"] += 1
        elif not ended and (preferred is None or cells[preferred] is None):
            published.left_out["turns without a preferred response"] += 1
        elif ended or asked is None or preferred is None:
            published.left_out[ended] += 1
        else:
            messages.append({"role": "user", "content": asked})
            yield number, [*messages], cells, preferred
            messages.append({"role": "assistant", "content": cells[preferred] or ""})
            continue
        ended = ended or "turns after one that cannot be read"


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return the score of people, with the mean over prompts beside it."""
    prompts: dict[str, list[bool]] = {}
    for row in rows:
        prompts.setdefault(row.id.rpartition("@")[2], []).append(people.is_won(row))
    result = people.score(rows)
    by_prompt = mean(sum(values) / len(values) for values in prompts.values())
    return replace(
        result,
        figures={"mean over prompts": by_prompt, **result.figures},
        details={**result.details, "prompts": len(prompts)},
    )


BENCHMARK = Benchmark(
    name="community-alignment",
    rule=f"{people.RULE}, and over prompts",
    score=score,
    won=people.is_won,
    repository="facebook/community-alignment-dataset",
    splits=("filtered",),
    licence="CC BY 4.0",
    columns=("conversation_id", "annotator_id", "first_turn_prompt", "first_turn_response_a"),
    records=records,
)
