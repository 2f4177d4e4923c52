"""Choices as arrays: grouped by person, split into contexts and queries, and refused where they cannot be used."""

from dataclasses import replace

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Choices, Posts, contexts_and_queries, group, halves
from prb_jax.personal.few_shot.registry import METHODS, method_named
from prb_jax.seams import BUILTIN

CHOICES = Choices(
    features=np.arange(12, dtype=np.float32).reshape(4, 3),
    chosen=np.array([0, 1, 2, 3, 0, 1], np.int32),
    rejected=np.array([1, 2, 3, 0, 2, 3], np.int32),
    users=np.array([2, 0, 2, 2, 0, 2], np.int32),
    questions=np.array([5, 5, 6, 5, 5, 6], np.int32),
    number_of_users=4,
)


def test_choices_are_grouped_by_user():
    rows = group(CHOICES)
    assert rows.users.tolist() == [0, 2]
    assert rows.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert rows.places[0, :2].tolist() == [1, 4]
    assert rows.places[1].tolist() == [0, 2, 3, 5]
    assert group(CHOICES, seed=1).places[1].tolist() != [0, 2, 3, 5]
    assert sorted(group(CHOICES, seed=1).places[1]) == [0, 2, 3, 5]
    assert rows.first(1).mask.tolist() == [[True], [True]]
    assert rows.first(0).mask.tolist() == [[False], [False]]
    assert rows.first(3, width=5).mask.sum(axis=1).tolist() == [2, 3]
    assert rows.of(np.array([3, 2, 0])).mask.sum(axis=1).tolist() == [0, 4, 2]
    assert (CHOICES.people, CHOICES.person.tolist()) == (2, [1, 0, 1, 1, 0, 1])


def test_queries_are_of_other_questions_where_a_user_has_several():
    queries = halves(CHOICES, seed=0)
    asked, told = CHOICES.only(queries), CHOICES.only(~queries)
    for user in (0, 2):
        assert (asked.users == user).any()
        assert (told.users == user).any()
    shared = set(asked.questions[asked.users == 2]) & set(told.questions[told.users == 2])
    assert not shared
    apart = replace(CHOICES, queries=CHOICES.questions == 6, rejected=np.array([1, 2, 3, 3, 2, 3], np.int32))
    apart = replace(apart, chosen=np.array([0, 1, 2, 0, 0, 2], np.int32))
    contexts, chosen = contexts_and_queries(apart, seed=0)
    assert (contexts.users.tolist(), chosen.users.tolist()) == ([2], [2])
    assert contexts.places[contexts.mask].tolist() == [0]  # choice 3 shares a response with a query
    judged = replace(apart, items=np.array([0, 3, 2, 3], np.int32))  # the text of row 1 is that of row 3
    assert not contexts_and_queries(judged, seed=0)[0].mask.any()
    none, every = contexts_and_queries(replace(CHOICES, queries=np.ones(6, bool)), seed=0)
    assert not none.mask.any()
    assert every.mask.sum() == 6


def test_a_label_turns_with_the_pair():
    turned = replace(CHOICES, in_context=np.arange(12.0).reshape(6, 2)).turned_round()
    assert (turned.deltas == -CHOICES.deltas).all()
    assert turned.in_context is not None
    assert turned.in_context[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": np.array([0, 9, 2, 3, 0, 1])}, "choices: chosen[1]: expected 0 to 3, found 9"),
        ({"users": np.array([0, 0, 0, 0, 0, 4])}, "choices: users[5]: expected 0 to 3, found 4"),
        ({"users": np.zeros(5, np.int32)}, "choices: users: expected 6 rows, found 5"),
        ({"items": np.zeros(3, np.int32)}, "choices: items: expected 4 rows, found 3"),
        ({"features": np.full((4, 3), np.nan)}, "choices: features: expected finite numbers, found NaN or infinity"),
        ({"features": np.zeros(4)}, "choices: features: expected [R, D], found shape (4,)"),
        ({"posts": Posts(np.zeros((3, 1, 3)), np.ones((3, 1), bool))}, "choices: posts: expected 4 rows, found 3"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_are_one_error(change, message):
    with pytest.raises(DataError) as error:
        replace(CHOICES, **change)
    assert str(error.value) == message


def test_a_method_names_the_thing_that_the_data_lack():
    lacking = {"nearest": "nearest needs responses that several", "profile_in_context": "in_context"}
    for name, words in lacking.items():
        method = method_named(name)
        with pytest.raises(DataError, match=words):
            CHOICES.require(name, method.needs)
    with pytest.raises(DataError, match="pooled: expected at least one comparison, found none"):
        CHOICES.only(np.zeros(6, bool)).require("pooled", ())
    with pytest.raises(DataError, match="posts that the user agrees or disagrees with"):
        CHOICES.require("x", ("posts.signs",))


def test_every_method_has_its_name_and_settings_that_are_checked():
    assert sorted(METHODS) == sorted(BUILTIN["few_shot"])
    for name in METHODS:
        method = method_named(name)
        assert method.name == name
        assert hash(method.settings()) == hash(method.settings())
    unknown = r"unknown method 'loree': expected one of pooled, .*; did you mean lore\?"
    with pytest.raises(DataError, match=unknown):
        method_named("loree")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("pooled", {"l2": (1.0, 0.0)}, r"PooledSettings.l2: expected each to be more than 0, found \(1.0, 0.0\)"),
        ("pooled", {"l2": ()}, r"PooledSettings.l2: expected a tuple of one value or more, found \(\)"),
        ("lore", {"bases": (1,)}, r"LoReSettings.bases: expected each to be at least 2, found \(1,\)"),
        ("gpo", {"heads": 3}, "GPOSettings.heads: expected a divisor of width=64, found 3"),
        ("gpo", {"steps": 1.5}, "GPOSettings.steps: expected a whole number, at least 1, found 1.5"),
        ("vpl", {"validation_shots": (2, -1)}, "VPLSettings.validation_shots: expected each to be at least 0"),
        ("user_embedding", {"alpha": 1.5}, "UserEmbeddingSettings.alpha: expected .* at most 1, found 1.5"),
        ("pref", {"pull_to": ("x",)}, r"PReFSettings.pull_to: expected each to be one of zero, mean, found \('x',\)"),
        ("lore_free", {"reference": "x"}, "LoReFreeSettings.reference: expected one of head, pooled, found 'x'"),
        ("sparse", {"active": 65}, "SparseSettings.active: expected at most features=64, found 65"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_error(name, change, message):
    with pytest.raises(DataError, match=message):
        method_named(name).settings(**change)
