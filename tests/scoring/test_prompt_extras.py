"""What a model is told beside the profile: where it comes from, what never gets in, and what a control changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.scoring.controls import with_other_users, without_user
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.prompt_extras import (
    ASPECT_RUNS,
    ASPECTS,
    HISTORY_HEADING,
    PERSONA_HEADING,
    UPPER_BOUND,
    PromptExtras,
    add_prompt_extras,
    asked_digest,
    told_of,
)
from prb_jax.text.view import TextProtocol, visible
from tests.json_lines import write_lines


def record(number: int, user: str | None = "ana", **fields: Any) -> dict[str, Any]:
    """A record whose texts tell its number."""
    return {
        "id": f"c{number}",
        "user_id": user,
        "question": f"Question {number}?",
        "chosen": f"good {number}",
        "rejected": f"bad {number}",
        "rubric_aspects": [{"aspect": f"wish {number}", "reason": "so"}],
        "narrative": f"story {number}",
        **fields,
    }


def told(data: list[dict[str, Any]], **options: Any) -> tuple[list[str | None], Any]:
    """The hints of each record, and what a run records of them."""
    inputs = add_prompt_extras(read_inputs(data), PromptExtras(**options))
    return [comparison.hints for comparison in inputs.comparisons], inputs.hints


def test_earlier_choices_are_those_of_the_same_user_and_never_the_judged_one() -> None:
    data = [
        record(0), record(1, "bo"), record(2), record(3, chosen="good 0"), record(4, None), record(5), record(6, "bo"),
    ]  # fmt: skip
    hints, facts = told(data, shots=2)
    numbers = [[n for n in range(7) if text and f"Question {n}?" in text] for text in hints]
    # the response of 3 was judged in 0: it tells, and is left out both ways
    assert numbers == [[], [], [0], [2], [], [2, 3], [1]]
    assert facts == {"shots": {"kind": "2 earlier", "most": 2, "without": 3}}
    assert hints[6] == (
        f"{HISTORY_HEADING}\n\nQuestion:\nQuestion 1?\n\nPreferred answer:\ngood 1\n\nOther answer:\nbad 1"
    )
    history = [record(10), record(11), record(12), record(13, "bo")]
    hints, facts = told(data, shots=2, history=history)
    numbers = [[n for n in range(10, 14) if text and f"Question {n}?" in text] for text in hints]
    assert numbers == [[11, 12], [13], [11, 12], [11, 12], [], [11, 12], [13]]
    with pytest.raises(DataError, match="'c2': is in the history too, as 'other': its label is known"):
        told(data, shots=1, history=[*history, record(2) | {"id": "other"}])
    with pytest.raises(DataError, match="'c4' names no user"):
        told(data, shots=1, history=[record(4, None)])


def test_personas_aspects_and_upper_bounds(tmp_path: Path) -> None:
    data = [record(0), record(1, "bo"), record(2, None)]
    personas = tmp_path / "personas.jsonl"
    personas.write_text('{"user_id": "ana", "text": " Ana walks. "}\n{"user_id": "cy", "text": "x"}\n')
    hints, facts = told(data, persona=str(personas))
    assert hints == [f"{PERSONA_HEADING}\n\nAna walks.", None, None]
    assert (facts["persona"]["without"], UPPER_BOUND in facts) == (2, False)
    hints, facts = told(data, aspects="oracle", persona="narrative")
    for number, text in enumerate(hints):
        assert f"- wish {number}: so" in str(text)
        assert f"story {number}" in str(text)
    assert facts[UPPER_BOUND] == ["persona", "aspects"]
    assert told_of(facts) == "narrative persona, oracle aspects, an upper bound"
    for text, message in (
        ('{"user_id": "ana"}', "personas.jsonl:1: expected the fields user_id and text"),
        ('{"user_id": "z", "text": "x"}', "no hint is available for any of the 3"),
        ('{"user_id": 1, "text": ""}\n' * 2, "personas.jsonl:2: a second persona of user '1'"),
    ):
        personas.write_text(text)
        with pytest.raises(prb.PrbError, match=message):
            told(data, persona=str(personas))
    for given, message in (
        ({"aspects": "planned"}, "expected planned:DIR"),
        ({"aspects": "planned:nowhere"}, "nowhere: no such folder; expected a run of `prb aspects`"),
        ({"history": data}, "--history: requires --shots"),
        ({"shots": -1}, "--shots: expected 0 or more"),
        ({"persona": "none.jsonl"}, "--persona: cannot read none.jsonl"),
    ):
        with pytest.raises(prb.PrbError, match=message):
            told(data, **given)


def test_planned_aspects_belong_to_the_question_and_profile_that_the_planner_saw(tmp_path: Path) -> None:
    data = [record(0), record(1)]
    first, second = (read_inputs([one]).comparisons[0] for one in data)
    with ASPECT_RUNS.open(tmp_path, {"model": {}}, notes={"model": "p"}):
        pass
    rows = [
        {"id": "c0", "asked": asked_digest(first), "text": "- short", "tokens": 3, "posts_dropped": 0},
        {"id": "c1", "asked": asked_digest(second), "text": "", "tokens": 0, "posts_dropped": 0},
    ]
    write_lines(tmp_path / ASPECTS, rows)
    place = f"planned:{tmp_path}"
    with pytest.raises(prb.RunError, match="not finished"):
        told(data, aspects=place)
    (tmp_path / "summary.json").write_text("{}")
    hints, facts = told(data, aspects=place)
    assert ("- short" in str(hints[0]), hints[1], facts["aspects"]["without"]) == (True, None, 1)
    with pytest.raises(DataError, match="belong to another question or profile"):
        told([record(0, question="New?"), record(1)], aspects=place)
    with pytest.raises(DataError, match="has no aspects of comparison 'c9'"):
        told([record(9)], aspects=place)
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != "model"})
    )
    with pytest.raises(prb.RunError, match=r"run\.json: field 'model': missing"):
        told(data, aspects=place)


def test_hints_stand_before_the_question_and_leave_with_the_user() -> None:
    profile = [{"id": "p", "category": "", "text": "I walk."}]
    first, second = (
        replace(read_inputs([record(n, user, profile=profile)]).comparisons[0], hints=f"told {n}")
        for n, user in ((0, "ana"), (1, "bo"))
    )
    shown, alone = (
        visible(first, profile_posts=posts, protocol=TextProtocol.DEFAULT).prefix_messages[0].content
        for posts in (1, 0)
    )
    places = [shown.index(part) for part in ("I walk.", "told 0", "What the user asks now:", "Question 0?")]
    assert places == sorted(places)
    assert alone == "told 0\n\nWhat the user asks now:\n\nQuestion 0?"
    with pytest.raises(DataError, match="protocol paper"):
        visible(first, profile_posts=0, protocol=TextProtocol.PAPER)
    assert [without_user(one).hints for one in (first, second)] == [None, None]
    assert [swapped.hints for swapped in with_other_users([first, second])] == ["told 1", "told 0"]
    assert "told 0" not in json.dumps(first.to_row())
    assert prb.Comparison.from_row({**record(0), "hints": "x"}, where="a file").hints is None
