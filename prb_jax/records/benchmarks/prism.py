"""PRISM (arXiv 2404.16019): people's scores, 1 to 100, of up to four responses in each turn of their conversations.

Each turn is one comparison, after the conversation so far, with the scores as labels. The profile holds what the person
said in the survey, and choices in the person's earlier conversations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, Place, Published, Rows

_SURVEY: Final = "survey"
_WORDS: Final = {"self_description": "self-description", "system_string": "wish for the assistant"}
_FACTS: Final = ("age", "gender", "employment_status", "education", "marital_status", "english_proficiency")

Utterances = list[tuple[str, Mapping[str, Any]]]
"""Responses to one prompt, with their places."""


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a comparison for each turn with different scores, conversations in the order of their first utterance."""
    surveyed = _survey(published.table(_SURVEY), published.cleaned)
    conversations: dict[str, dict[int, Utterances]] = {}
    for place, row in published.rows:
        name = fields.identifier(row.get("conversation_id"), place.where, "conversation_id")
        turn = people.number(row.get("turn"), place.where, "turn")
        if turn != int(turn) or turn < 0:
            fields.fail(place.where, "turn", f"expected a whole number from 0 on, found {turn:g}")
        conversations.setdefault(name, {}).setdefault(int(turn), []).append((place.where, row))
    histories = people.Histories()
    for name in list(conversations):
        turns = conversations.pop(name)
        yield from _conversation(name, turns, surveyed, histories, published)


def _conversation(
    name: str,
    turns: Mapping[int, Utterances],
    surveyed: Mapping[str, list[dict[str, str]]],
    histories: people.Histories,
    published: Published,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    messages: list[dict[str, str]] = []
    choices: list[tuple[Sequence[str], list[dict[str, str]]]] = []
    user = ""
    for number in range(max(turns) + 1):
        if number not in turns:
            published.left_out["turns after one that is missing"] += len([n for n in turns if n > number])
            break
        where, first = turns[number][0]
        user = _same(turns[number], "user_id", user or None)
        if user not in surveyed:
            raise DataError(f"{where}: field 'user_id': {quote(user)} is not in the table {_SURVEY}")
        asked = people.cell(_same(turns[number], "user_prompt"), where, "user_prompt", published.cleaned)
        if asked is None:
            published.left_out["turns without a prompt, and after one"] += len(
                [n for n in turns if n >= number]
            )
            break
        messages.append({"role": "user", "content": asked})
        texts = [
            people.cell(row.get("model_response"), place, "model_response", published.cleaned)
            for place, row in turns[number]
        ]
        scores = [_score(row, place) for place, row in turns[number]]
        chosen = [people.truth(row.get("if_chosen"), place, "if_chosen") for place, row in turns[number]]
        kept = {text for text, is_chosen in zip(texts, chosen) if is_chosen and text}
        responses = [text for text in texts if text]
        reason = None
        if len(responses) < len(texts):
            reason = "turns with an empty response"
        elif len(set(responses)) < len(responses):
            reason = "turns that offer a response twice"
        elif len(responses) < 2 or len(set(scores)) == 1:
            reason = "turns with one score for all responses"
        elif max(score for score, is_chosen in zip(scores, chosen) if is_chosen or not kept) < max(scores):
            reason = "turns whose chosen response has not the highest score"
        if reason is not None:
            published.left_out[reason] += 1
        else:
            yield (
                where,
                {
                    "id": f"{name}/{number}",
                    "user_id": user,
                    "prompt": [*messages],
                    "responses": responses,
                    "labels": scores,
                    "subset": people.cell(
                        first.get("conversation_type"), where, "conversation_type", published.cleaned
                    ),
                    "profile": [*surveyed[user], *histories.posts(user, responses)],
                },
            )
        if len(kept) != 1:
            left = len([n for n in turns if n > number])
            if left:
                published.left_out["turns after one without a chosen response"] += left
            break
        (preferred,) = kept
        choices.append((responses, people.posts_of_choice(asked, preferred)))
        messages.append({"role": "assistant", "content": preferred})
    for responses, posts in choices:  # a profile excludes its own conversation
        histories.add(user, responses, posts)


def _same(utterances: Utterances, name: str, expected: str | None = None) -> str:
    """The value that a field has in all utterances of a turn."""
    for where, row in utterances:
        value = fields.identifier(row.get(name), where, name)
        expected = value if expected is None else expected
        if value != expected:
            fields.fail(
                where,
                name,
                f"expected {quote(expected)}, as before in this conversation, found {quote(value)}",
            )
    return expected or ""


def _score(row: Mapping[str, Any], where: str) -> float:
    score = people.number(row.get("score"), where, "score")
    if not 0 <= score <= 100:
        fields.fail(where, "score", f"expected a number from 1 to 100, found {score:g}")
    return score


def _survey(rows: Rows, cleaned: Counter[str]) -> dict[str, list[dict[str, str]]]:
    """The posts of each person, from the survey."""
    posts: dict[str, list[dict[str, str]]] = {}
    for place, row in rows:
        user = fields.identifier(row.get("user_id"), place.where, "user_id")
        facts = [
            f"{name.replace('_', ' ')}: {value}"
            for name in _FACTS
            if (value := _text(row, place, name, cleaned))
        ]
        said = [
            people.post(category, text)
            for name, category in _WORDS.items()
            if (text := _text(row, place, name, cleaned))
        ]
        posts[user] = said + ([people.post("about this person", "; ".join(facts))] if facts else [])
    return posts


def _text(row: Mapping[str, Any], place: Place, name: str, cleaned: Counter[str]) -> str | None:
    return people.cell(row.get(name), place.where, name, cleaned)


BENCHMARK = Benchmark(
    name="prism",
    rule=people.RULE,
    score=people.score,
    won=people.is_won,
    repository="HannahRoseKirk/prism-alignment",
    splits=("train",),
    files="**/utterances.jsonl*",
    tables={_SURVEY: "**/survey.jsonl*"},
    config="utterances",
    licence="people's texts CC BY 4.0, models' responses CC BY-NC 4.0",
    columns=("utterance_id", "conversation_id", "user_id", "turn", "model_response", "score", "if_chosen"),
    records=records,
)
