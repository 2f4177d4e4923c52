"""PersonalRewardBench (SynthesizeMe, arXiv 2506.05598): pairs of people of PRISM and of Chatbot Arena.

The column `split` divides each person's pairs; pairs of "train" are the history of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import EVERY, Benchmark, Published

_HISTORY: Final = "train"
_PRINTED: Final = ("[{'role'", '[{"role"', "[{'content'", '[{"content"')
_ROLES: Final = {"model": "assistant"}  # as PRISM calls it
_SPLITS: Final = {"validation": "val", "valid": "val", "dev": "val"}
_KNOWN: Final = ("train", "val", "test", *_SPLITS)


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the pairs of the split that is asked for, each with the person's pairs of "train" as the profile.

    A pair of "train" itself has those before it.
    """
    histories, numbers = people.Histories(), Counter[str]()
    wanted = _SPLITS.get(published.split, published.split)
    found, others = set[str](), list[tuple[str, dict[str, Any]]]()
    for place, row in published.rows:
        where = place.where
        split = fields.text(row.get("split"), where, "split")
        if split not in _KNOWN:
            fields.fail(where, "split", f"expected one of {', '.join(_KNOWN)}, found {quote(split)}")
        split = _SPLITS.get(split, split)
        found.add(split)
        user = fields.identifier(row.get("user_id"), where, "user_id")
        numbers[user] += 1
        context = row.get("context")
        prompt = [{"role": "user", "content": context}] if isinstance(context, str) else context
        messages = [_message(one, where, "context") for one in fields.sequence(prompt, where, "context")]
        answers = {name: _message(row.get(name), where, name) for name in ("chosen", "rejected")}
        if answers["chosen"]["role"] != answers["rejected"]["role"]:
            roles = " and ".join(quote(answer["role"]) for answer in answers.values())
            fields.fail(
                where, "rejected.role", f"chosen and rejected are of the roles {roles}, which tells the label"
            )
        responses = [answer["content"] for answer in answers.values()]
        if responses[0] == responses[1]:
            published.left_out["pairs of equal responses"] += 1
            continue
        names = ("id", "user_id", "prompt", "chosen", "rejected")
        record: dict[str, Any] = dict(
            zip(names, (f"{user}/{numbers[user]}", user, messages, *responses), strict=True)
        )
        if split == _HISTORY:
            if wanted == _HISTORY:
                yield where, {**record, "profile": histories.posts(user, responses)}
            asked = messages[-1]["content"] if messages else ""
            histories.add(user, responses, people.posts_of_choice(asked, responses[0], responses[1:]))
        elif split == wanted:
            others.append((where, record))
    if wanted not in found:
        raise DataError(
            f"no split {quote(published.split)} in the column 'split': found {', '.join(sorted(found))}"
        )
    for where, record in others:
        history = histories.posts(record["user_id"], (record["chosen"], record["rejected"]))
        yield where, {**record, "profile": history}


def _message(value: object, where: str, name: str) -> dict[str, str]:
    """A message of {role, content}; any other form is an error, because the form could reveal the label."""
    message = fields.mapping(value, where, name)
    role = fields.text(message.get("role"), where, f"{name}.role")
    text = fields.text(message.get("content"), where, f"{name}.content").strip()
    if text.startswith(_PRINTED):
        fields.fail(
            where, f"{name}.content", "a list of messages printed as text, whose form may tell the label"
        )
    return {"role": _ROLES.get(role, role), "content": text}


BENCHMARK = Benchmark(
    name="personalrewardbench-prism",
    rule=people.RULE,
    score=people.score,
    won=people.is_won,
    repository="MichaelR207/prism_personalized_0125",
    splits=EVERY,
    licence="not stated; PRISM: people's texts CC BY 4.0, models' responses CC BY-NC 4.0",
    columns=("context", "split"),
    records=records,
)
ARENA = replace(
    BENCHMARK,
    name="personalrewardbench-arena",
    repository="MichaelR207/chatbot_arena_personalized_0125",
    licence="not stated",
)
