import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison, Message, Post, RubricAspect

PAIR = {"id": "7", "question": "Which tea?", "chosen": "Green tea.", "rejected": "Black tea."}
RANKED = {"id": "8", "prompt": "Which tea?", "responses": ["a", "b", "c"], "labels": [1, 0.5, 0]}


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


def test_a_pair_becomes_two_responses_with_labels():
    c = Comparison(**PAIR)
    assert c.prompt == (Message("user", "Which tea?"),)
    assert c.question == "Which tea?"
    assert c.responses == ("Green tea.", "Black tea.")
    assert c.labels == (1.0, 0.0)
    assert c.is_pair
    assert (c.user_id, c.category, c.subset, c.margin, c.narrative) == (None,) * 5
    assert (c.profile, c.rubric_aspects) == ((), ())


def test_the_design_examples_spelling():
    c = Comparison(
        id="7",
        question="...",
        responses=["a", "b"],
        labels=[1.0, 0.0],
        profile=[{"id": "p", "category": "tea", "text": "I like tea"}, Post("q", "No milk.")],
        user_id="u",
    )
    assert c.profile == (Post(id="p", text="I like tea", category="tea"), Post(id="q", text="No milk."))
    assert not c.is_pair
    assert c == Comparison(id="7", question="...", chosen="a", rejected="b", profile=c.profile, user_id="u")


def test_python_callers_may_use_iterables_and_numpy():
    c = Comparison(
        id=3,
        prompt="q",
        responses=("a", "b"),
        labels=np.array([0.25, 2.0], np.float32),
        margin=np.float32(0.5),
    )
    assert c.id == "3"
    assert c.labels == (0.25, 2.0)
    assert all(type(label) is float for label in c.labels)
    assert c.margin == 0.5


def test_labels_may_be_absent_from_python_but_not_from_files():
    row = without(RANKED, "labels")
    assert Comparison(**row).labels is None
    with pytest.raises(DataError, match=r"f\.jsonl:3: field 'labels': missing"):
        Comparison.from_row(row, where="f.jsonl:3")


def test_a_conversation():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Tea?"},
    ]
    c = Comparison(id="1", prompt=messages, chosen="a", rejected="b")
    assert c.prompt[0] == Message("system", "Be brief.")
    assert c.question == "Tea?"
    assert c == Comparison(id="1", question=c.prompt, chosen="a", rejected="b")


def test_question_and_prompt_together_must_agree():
    both = PAIR | {"prompt": [{"role": "user", "content": "Which tea?"}]}
    assert Comparison(**both) == Comparison(**PAIR)
    with pytest.raises(DataError, match="field 'prompt': differs from 'question'"):
        Comparison(**PAIR | {"prompt": "Which coffee?"})


@pytest.mark.parametrize("rejected", ["Green tea.", "    \n"])
def test_equal_responses_and_white_space_are_data(rejected):
    # they occur in published sets; a model can score them, and an empty string it cannot
    assert Comparison(**PAIR | {"rejected": rejected}).responses == ("Green tea.", rejected)


def test_numbers_name_ids():
    c = Comparison.from_row(PAIR | {"id": 12, "user_id": 5, "profile": [{"id": 1, "text": "x"}]}, where="f:1")
    assert (c.id, c.user_id, c.profile) == ("12", "5", (Post("1", "x"),))


def test_unknown_keys_and_nulls_are_ignored():
    row = PAIR | {"meta": {"kind": 1}, "source": "s", "user_id": None, "profile": None, "responses": None}
    assert Comparison.from_row(row, where="f:1") == Comparison(**PAIR)


FULL = PAIR | {
    "user_id": "u",
    "category": "drinks",
    "subset": "Lifestyle",
    "margin": 0.5,
    "narrative": "I drink tea.",
    "profile": [{"id": "p", "category": "", "text": "Grüner Tee"}, {"id": "", "category": "c", "text": ""}],
    "rubric_aspects": [{"aspect": "a", "evidence": "", "reason": "r"}],
}
CONVERSATION = RANKED | {"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "q"}]}


@pytest.mark.parametrize("row", [PAIR, RANKED, FULL, CONVERSATION])
def test_round_trip(row):
    c = Comparison.from_row(row, where="f:1")
    written = json.loads(json.dumps(c.to_row(), allow_nan=False))
    again = Comparison.from_row(written, where="f:1")
    assert again == c
    assert hash(again) == hash(c)
    assert again.is_pair == c.is_pair
    assert pickle.loads(pickle.dumps(c)) == c
    assert written.keys() - {"question"} <= row.keys()


def test_a_comparison_is_replaced_and_never_changed():
    c = Comparison(**FULL)
    changed = dataclasses.replace(c, profile=(), subset="Art")
    assert (changed.profile, changed.responses) == ((), c.responses)
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.id = "8"  # pyright: ignore[reportAttributeAccessIssue]


BAD = [
    (PAIR | {"id": ""}, "field 'id': empty"),
    (PAIR | {"id": 1.5}, r"field 'id': expected a string, found 1\.5 \(float\)"),
    (PAIR | {"id": True}, "field 'id': expected a string, found True"),
    (without(PAIR, "question"), "field 'question': missing; expected 'question' or 'prompt'"),
    (PAIR | {"question": 3}, r"field 'question': expected a string or a list of messages, found 3 \(int\)"),
    (PAIR | {"question": " \n"}, "field 'question': the question is empty"),
    (PAIR | {"question": []}, "field 'question': no messages"),
    (PAIR | {"question": ["q"]}, r"field 'question\[0\]': expected an object"),
    (PAIR | {"question": [{"role": "user"}]}, r"field 'question\[0\]\.content': missing"),
    (PAIR | {"question": [{"role": 1, "content": "q"}]}, r"field 'question\[0\]\.role': expected a string"),
    (PAIR | {"question": [{"role": "critic", "content": "q"}]}, r"expected one of system, developer, user"),
    (PAIR | {"question": [{"role": "assistant", "content": "q"}]}, "expected 'user', found 'assistant'"),
    (
        PAIR | {"question": [{"role": "user", "content": "q"}, {"role": "system", "content": "q"}]},
        r"field 'question\[1\]\.role': a system message may only come first",
    ),
    (without(PAIR, "rejected"), "field 'rejected': missing"),
    (without(PAIR, "chosen"), "field 'chosen': missing"),
    (PAIR | {"chosen": 5}, r"field 'chosen': expected a string, found 5 \(int\)"),
    (PAIR | {"chosen": ["a"]}, r"field 'chosen': expected a string, found \['a'\] \(list\)"),
    (PAIR | {"rejected": ""}, "field 'rejected': empty"),
    (PAIR | {"chosen": "a\ud800"}, "field 'chosen': character 1 is a lone surrogate"),
    (PAIR | {"responses": ["a", "b"]}, "field 'responses': given beside 'chosen'"),
    (PAIR | {"labels": [1, 0]}, "field 'labels': given beside 'chosen'"),
    (without(without(PAIR, "chosen"), "rejected"), "'responses' and 'labels'"),
    (
        RANKED | {"responses": ["a"], "labels": [1]},
        "field 'responses': expected at least 2 responses, found 1",
    ),
    (RANKED | {"responses": [], "labels": []}, "expected at least 2 responses, found 0"),
    (RANKED | {"responses": "abc"}, "field 'responses': expected a list, found 'abc'"),
    (RANKED | {"responses": ["a", "", "c"]}, r"field 'responses\[1\]': empty"),
    (RANKED | {"responses": ["a", None, "c"]}, r"field 'responses\[1\]': missing"),
    (RANKED | {"labels": [1, 0]}, "field 'labels': expected 3 numbers, one per response, found 2"),
    (RANKED | {"labels": [1, float("nan"), 0]}, r"field 'labels\[1\]': expected a finite number, found nan"),
    (RANKED | {"labels": [1, float("inf"), 0]}, r"field 'labels\[1\]': expected a finite number, found inf"),
    (RANKED | {"labels": [1, 10**400, 0]}, r"field 'labels\[1\]': expected a finite number"),
    (RANKED | {"labels": [1, "0", 0]}, r"field 'labels\[1\]': expected a number, found '0'"),
    (RANKED | {"labels": [True, False, False]}, r"field 'labels\[0\]': expected a number, found True"),
    (RANKED | {"labels": [1, None, 0]}, r"field 'labels\[1\]': expected a number, found null"),
    (RANKED | {"labels": [2, 2, 2.0]}, "field 'labels': all equal to 2"),
    (RANKED | {"labels": 1}, "field 'labels': expected a list"),
    (PAIR | {"user_id": ""}, "field 'user_id': empty"),
    (PAIR | {"user_id": ["u"]}, "field 'user_id': expected a string"),
    (PAIR | {"category": 1}, "field 'category': expected a string"),
    (PAIR | {"subset": {}}, "field 'subset': expected a string"),
    (PAIR | {"margin": "1"}, "field 'margin': expected a number"),
    (PAIR | {"margin": float("nan")}, "field 'margin': expected a finite number"),
    (PAIR | {"narrative": 1}, "field 'narrative': expected a string"),
    (PAIR | {"profile": 1}, "field 'profile': expected a list"),
    (PAIR | {"profile": {"text": "x"}}, "field 'profile': expected a list"),
    (PAIR | {"profile": '[{"id": "1", "te'}, "field 'profile': begins like JSON, but is not valid JSON"),
    (
        PAIR | {"profile": "[{'id': '1', 'text': 't'}]"},
        "field 'profile': begins like JSON, but is not valid JSON",
    ),
    (PAIR | {"profile": '{"likes": "tea"}'}, "field 'profile': expected a list, found {'likes': 'tea'}"),
    (PAIR | {"profile": [1]}, r"field 'profile\[0\]': expected an object"),
    (PAIR | {"profile": [{"id": "1"}]}, r"field 'profile\[0\]\.text': missing"),
    (PAIR | {"profile": [{"text": "x"}, {"text": 1}]}, r"field 'profile\[1\]\.text': expected a string"),
    (
        PAIR | {"profile": [{"text": "x", "category": 1}]},
        r"field 'profile\[0\]\.category': expected a string",
    ),
    (PAIR | {"profile": [{"text": "x", "id": 1.5}]}, r"field 'profile\[0\]\.id': expected a string"),
    (PAIR | {"rubric_aspects": [{"evidence": "e"}]}, r"field 'rubric_aspects\[0\]\.aspect': missing"),
    (PAIR | {"rubric_aspects": [{"aspect": "a", "reason": 2}]}, r"'rubric_aspects\[0\]\.reason'"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_what_is_wrong_in_a_file_or_from_python_is_named(row, message):
    with pytest.raises(DataError, match=message) as of_file:
        Comparison.from_row(row, where="data/x.jsonl:12")
    assert str(of_file.value).startswith("data/x.jsonl:12: field '")
    assert "\n" not in str(of_file.value)
    with pytest.raises(DataError, match=message) as from_python:
        Comparison(**row)
    assert str(from_python.value).startswith("comparison ")


@pytest.mark.parametrize("row", [[], "text", None, 3])
def test_a_row_is_an_object(row):
    with pytest.raises(DataError, match="f:1: expected an object with fields"):
        Comparison.from_row(row, where="f:1")


def test_posts_made_in_python_are_checked_too():
    with pytest.raises(DataError, match=r"profile\[0\]\.text"):
        Comparison(**PAIR, profile=[Post(id="1", text=3)])  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"rubric_aspects\[0\]\.aspect"):
        Comparison(**PAIR, rubric_aspects=[RubricAspect(aspect=3)])  # pyright: ignore[reportArgumentType]


INNER = ["id", "text", "category", "role", "content", "aspect"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines are slow, not wrong
@given(
    st.dictionaries(st.sampled_from(sorted(FULL | RANKED)), JSON, max_size=3), st.sampled_from([PAIR, RANKED])
)
def test_any_json_is_a_valid_comparison_or_a_data_error(changes, row):
    try:
        c = Comparison.from_row(row | changes, where="f:1")
    except DataError as error:
        assert str(error).startswith("f:1: field '")  # noqa: PT017
    else:
        assert Comparison.from_row(json.loads(json.dumps(c.to_row(), allow_nan=False)), where="f:1") == c


@pytest.mark.parametrize(
    ("profile", "texts"),
    [
        ("I like tea.", ["I like tea."]),
        (["a", "b"], ["a", "b"]),
        (["a", {"text": "b"}], ["a", "b"]),
        ({"text": ["a", "b"]}, ["a", "b"]),  # an object of lists, as older data sets have it
        ("", []),
        (" ", []),
    ],
)
def test_a_profile_may_be_texts(profile, texts):
    expected = tuple(Post(id="", text=text) for text in texts)
    assert Comparison.from_row(PAIR | {"profile": profile}, where="x").profile == expected
    assert Comparison(**PAIR, profile=profile).profile == expected
