import json

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import ITSELF, NO_SUBSET, summarise


def pair(id, result, *, user=None, subset=None, truncated=0):
    """A pair with the margin ``result``."""
    return ScoredRow(str(id), subset, user, [float(result), 0.0], [1.0, 0.0], 10, truncated)


HAND = [
    *(pair(f"a{i}", 1, user="a", subset="x") for i in range(5)),  # 5 of 5: covered
    *(pair(f"b{i}", 2 if i < 3 else -1, user="b", subset="y") for i in range(4)),  # 3 of 4
    pair("c0", 0, user="c", subset="x", truncated=4),  # 0 of 1, a tie
]


def test_by_hand():
    s = summarise(HAND)
    assert (s["n"], s["accuracy"], s["ties"]) == (10, 0.8, 1)
    assert s["mean_margin"] == pytest.approx((5 + 6 - 1 + 0) / 10)
    assert (s["users"], s["users_testable"]) == (3, 1)
    assert s["user_accuracy"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert (s["coverage"], s["coverage_reason"]) == (1.0, None)  # of the one user with enough rows
    assert s["coverage_by_chance"] == 1 / 32
    assert s["coverage_ci95"] is None
    assert s["coverage_ci95_reason"] == "1 testable user; an interval needs at least 6"
    assert s["truncated"] == 1
    assert s["half_credit_accuracy"] == pytest.approx(0.85)
    for key in ("ci95", "user_accuracy_ci95"):
        assert (s[key], s[f"{key}_reason"]) == (None, "3 users; an interval needs at least 6")
    x, y = s["by_subset"]["x"], s["by_subset"]["y"]
    assert s["accuracy_by_subset"] == {"x": x["accuracy"], "y": y["accuracy"]}
    assert (x["n"], x["accuracy"], x["ties"]) == (6, pytest.approx(5 / 6), 1)
    assert (y["n"], y["accuracy"], y["ties"]) == (4, 0.75, 0)
    assert y["ci95"] is None  # one user
    assert s["length_baseline"] is None
    assert s["baselines"] == {}


def test_contract_keys_and_definitions():
    s = summarise(HAND, baselines={"baseline:length": HAND})
    wanted = {"n", "accuracy", "ci95", "ties", "mean_margin", "accuracy_by_subset", "user_accuracy"}
    wanted |= {"user_accuracy_ci95", "coverage", "truncated", "length_baseline", "users"}
    assert wanted <= s.keys()
    assert s.keys() - {"definitions"} == s["definitions"].keys()
    part = {"n", "accuracy", "ci95", "ci95_reason", "ties", "half_credit_accuracy"}
    assert s["by_subset"]["x"].keys() == part
    assert "over users" in s["definitions"]["ci95"]


def test_the_definitions_say_over_what():
    alone = summarise([pair(i, 1) for i in range(9)])
    assert "over comparisons" in alone["definitions"]["ci95"]
    assert not any("over users" in alone["definitions"][key] for key in ("ci95", "baselines"))
    users = tuple(f"derived-{i % 3}" for i in range(9))
    derived = summarise([pair(i, 1) for i in range(9)], clusters=Clusters(users, derived=True))
    assert (derived["users"], derived["users_derived"]) == (3, True)
    assert "over users derived from shared profile posts" in derived["definitions"]["ci95"]
    assert derived["ci95_reason"] == "3 users derived from shared profile posts; an interval needs at least 6"
    users = tuple(f"u{i}" for i in range(9))
    crossed = Clusters(users, tuple((f"{i // 3}",) for i in range(9)))
    both = summarise([pair(i, i % 2 - 0.5, user=user) for i, user in enumerate(users)], clusters=crossed)
    assert "over users and sets of responses" in both["definitions"]["ci95"]
    assert both["crossed"] == {"clusters": 3, "by": "set of responses"}
    assert alone["crossed"] is derived["crossed"] is None


def test_figures_of_users_who_judge_the_same_pairs_are_two_way():
    """With as many rows for each user the mean over users is the accuracy, and so is its interval."""
    rng = np.random.default_rng(5)
    ease = rng.normal(0.4, 1, 20)
    people = [f"u{i}" for i in range(30)]
    results = {(user, item): ease[item] + rng.normal() for user in people for item in range(20)}
    rows = [pair(f"{user}-{item}", result, user=user) for (user, item), result in results.items()]
    crossed = Clusters(tuple(user for user, _ in results), tuple((str(item),) for _, item in results))
    both, alone = summarise(rows, clusters=crossed), summarise(rows)
    assert both["user_accuracy"] == pytest.approx(both["accuracy"])
    assert both["user_accuracy_ci95"] == pytest.approx(both["ci95"])
    for key in ("user_accuracy_ci95", "coverage_ci95"):
        (low, high), (least, most) = both[key], alone[key]
        assert high - low > 1.2 * (most - least), key
        assert "responses" in both["definitions"][key]
        assert "responses" not in alone["definitions"][key]
    single = Clusters(crossed.users, tuple((f"{i}",) for i in range(len(rows))))
    for key in ("user_accuracy_ci95", "coverage_ci95"):  # nothing is shared
        assert summarise(rows, clusters=single.take(range(len(rows))))[key] == alone[key]


def test_json_is_strict():
    for rows in (HAND, HAND[:1], [pair(0, 1)]):
        text = json.dumps(summarise(rows, baselines={"baseline:length": rows}), allow_nan=False)
        assert json.loads(text) == summarise(rows, baselines={"baseline:length": rows})


def test_without_users():
    rows = [pair(i, i % 4 - 0.5) for i in range(100)]
    s = summarise(rows)
    assert (s["users"], s["users_testable"]) == (0, 0)
    assert s["user_accuracy"] is s["user_accuracy_ci95"] is s["coverage"] is None
    assert s["coverage_reason"] == s["user_accuracy_ci95_reason"] == "no row has a user"
    half = 1.96 * (0.75 * 0.25 / 100) ** 0.5
    assert s["ci95"] == pytest.approx([0.75 - half, 0.75 + half], abs=0.02)


def test_rows_without_a_user_stay_out_of_the_user_figures_and_those_without_a_subset_are_shown_as_such():
    s = summarise([pair("0", 1, user="a"), pair("1", 1, user="a"), pair("2", -1), pair("3", -1)])
    assert (s["accuracy"], s["users"], s["user_accuracy"], s["user_accuracy_ci95"]) == (0.5, 1, 1.0, None)
    assert summarise([pair(0, 1)])["accuracy_by_subset"] == {}
    by_subset = summarise([pair(0, 1), pair(1, 1, subset="x")])["by_subset"]
    assert {name: figures["n"] for name, figures in by_subset.items()} == {NO_SUBSET: 1, "x": 1}


def test_many_responses_and_truncation_by_kind():
    s = summarise([ScoredRow("0", None, None, [1, 5, 4, 4.5], [0, 1, 1, 0])])
    assert (s["accuracy"], s["mean_margin"], s["ties"]) == (1.0, 0.5, 0)
    rows = [pair(0, 1, truncated={"posts": 2, "tokens": 0}), pair(1, 1, truncated={"posts": 1, "tokens": 7})]
    rows += [pair(2, 1, truncated={"posts": 0, "tokens": 0})]
    s = summarise(rows)
    assert (s["truncated"], s["truncation"]) == (2, {"posts": 3, "tokens": 7})


def test_baselines_on_the_same_rows():
    length = [pair(row.id, -1 if row.id == "a0" else 1, user=row.user_id, subset=row.subset) for row in HAND]
    s = summarise(HAND, baselines={"baseline:length": length, "other": HAND})
    assert s["length_baseline"] == s["baselines"]["baseline:length"]["accuracy"] == 0.9
    assert s["baselines"]["baseline:length"]["difference"] == pytest.approx(-0.1)
    assert s["baselines"]["other"]["difference"] == 0.0
    assert s["baselines"]["other"]["difference_ci95_reason"] == "3 users; an interval needs at least 6"
    assert s["baselines"]["other"]["user_accuracy"] == s["user_accuracy"]
    assert "truncated" not in s["baselines"]["other"]


def test_what_is_undefined_is_null_with_the_reason():
    reason = "no comparison has a profile"
    s = summarise(HAND, baselines={"baseline:profile-overlap": reason, "m": HAND}, model="m")
    overlap, itself = s["baselines"]["baseline:profile-overlap"], s["baselines"]["m"]
    assert (overlap["accuracy"], overlap["ties"], overlap["by_subset"]["x"]["accuracy"]) == (None, None, None)
    assert overlap["ci95_reason"] == overlap["difference_ci95_reason"] == reason
    assert (overlap["n"], overlap["difference"], overlap["difference_ci95"]) == (10, None, None)
    assert itself["accuracy"] == 0.8
    assert (itself["difference"], itself["difference_ci95"]) == (None, None)
    assert itself["difference_ci95_reason"] == ITSELF
    alone = summarise(HAND, baselines={"m": reason, "baseline:length": HAND}, model="m")
    assert (alone["accuracy"], alone["coverage"], alone["ci95_reason"]) == (None, None, reason)
    length = alone["baselines"]["baseline:length"]  # defined itself, but its difference from the model is not
    assert (length["accuracy"], length["difference"], length["difference_ci95_reason"]) == (0.8, None, reason)


@pytest.mark.parametrize(
    ("rows", "baselines", "message"),
    [
        (HAND, {"baseline:length": HAND[:-1]}, "id 'c0' is in only one of the two"),
        ([], None, "no scored comparisons"),
        ([*HAND, pair("bad", float("nan"))], None, r"row 'bad': scores\[0\] is nan"),
    ],
)
def test_what_cannot_be_summarised(rows, baselines, message):
    with pytest.raises(DataError, match=message):
        summarise(rows, baselines=baselines)


def test_order_of_rows_leaves_no_trace():
    rng = np.random.default_rng(0)
    rows = [pair(i, m, user=f"u{i % 37}", subset=f"s{i % 3}") for i, m in enumerate(rng.normal(0.3, 1, 500))]
    shuffled = [rows[i] for i in rng.permutation(500)]
    a, b = summarise(rows), summarise(shuffled)
    assert json.dumps(a) == json.dumps(summarise(rows))
    assert json.dumps(a) == json.dumps(b)
