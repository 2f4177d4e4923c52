"""Baselines of votes, against a plain count."""

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.scoring.baselines import BASELINE_NAMES, NEIGHBOURS, nearest_users, popularity, score_baseline


def vote(user, pair, choice, *, number=0, swapped=False):
    texts = [f"{pair} a", f"{pair} b"]
    labels = [1.0, 0.0] if choice == "a" else [0.0, 1.0]
    if swapped:
        texts, labels = texts[::-1], labels[::-1]
    return prb.Comparison(
        id=f"{user}-{pair}-{number}", question=f"{pair}?", responses=texts, labels=labels, user_id=user
    )


@pytest.fixture(scope="module")
def many():
    rng = np.random.default_rng(0)
    kinds = rng.integers(2, size=12)
    return [
        vote(f"u{u}", f"p{p}", "ab"[int(kinds[u] ^ (rng.random() < 0.15))], swapped=bool(rng.random() < 0.5))
        for u in range(12)
        for p in range(15)
        if rng.random() < 0.6
    ]


def choices(comparisons):
    """By pair and user, the text that the user prefers."""
    found = {}
    for c in comparisons:
        found.setdefault(c.question, {})[c.user_id] = c.responses[int(c.labels[1] > c.labels[0])]
    return found


def test_popularity_is_the_count_of_the_others(many):
    by_pair = choices(many)
    for comparison, scores in zip(many, popularity(many), strict=True):
        others = [text for user, text in by_pair[comparison.question].items() if user != comparison.user_id]
        assert scores.tolist() == [others.count(text) for text in comparison.responses]


def test_nearest_users_are_those_who_agree_most_on_other_pairs(many):
    by_pair = choices(many)
    checked = 0
    for comparison, scores in zip(many, nearest_users(many), strict=True):
        weights = []
        for other, text in by_pair[comparison.question].items():
            common = [
                votes for question, votes in by_pair.items()
                if question != comparison.question and {other, comparison.user_id} <= votes.keys()
            ]  # fmt: skip
            if other != comparison.user_id and common:
                same = sum(votes[other] == votes[comparison.user_id] for votes in common)
                weights.append(((same + 1) / (len(common) + 2), -int(other[1:]), other, text))
        # users of equal agreement are taken in the order of their names, as texts
        best = sorted(weights, key=lambda each: (-each[0], each[2]))[:NEIGHBOURS]
        expected = [sum(w for w, _, _, chosen in best if chosen == text) for text in comparison.responses]
        assert scores.tolist() == pytest.approx(expected, rel=1e-6)
        checked += 1
    assert checked == len(many) > 90
    won = [
        s[int(c.labels[1] > c.labels[0])] > s[int(c.labels[1] < c.labels[0])]
        for c, s in zip(many, nearest_users(many))
    ]
    majority = [
        s[int(c.labels[1] > c.labels[0])] > s[int(c.labels[1] < c.labels[0])]
        for c, s in zip(many, popularity(many))
    ]
    assert np.mean(won) > np.mean(majority) + 0.1


def test_a_users_own_votes_never_count():
    rows = [vote("u", "p", "a"), vote("u", "p", "a", number=1), vote("v", "p", "b"), vote("w", "q", "a")]
    found = popularity(rows)
    assert [None if scores is None else scores.tolist() for scores in found] == [[0, 1], [0, 1], [1, 0], None]
    assert nearest_users(rows) == [None] * 4


def test_without_users_every_row_is_a_voter():
    rows = [
        prb.Comparison(id=str(i), question="?", responses=["x", "y", "z"], labels=labels)
        for i, labels in enumerate([(1, 0, 0), (1, 1, 0), (0, 0, 1)])
    ]
    assert [scores.tolist() for scores in popularity(rows)] == [[0.5, 0.5, 1], [1, 0, 1], [1.5, 0.5, 0]]
    assert nearest_users(rows) == [None] * 3


def test_by_name_they_tie_where_there_is_no_vote():
    alone = vote("u", "p", "a")
    for name in ("baseline:popularity", "baseline:nearest-users"):
        assert name in BASELINE_NAMES
        assert score_baseline(name, [alone])[0].tolist() == [0, 0]
    unlabelled = prb.Comparison(id="x", question="p?", responses=["p a", "p b"], user_id="v")
    assert score_baseline("baseline:popularity", [alone, unlabelled])[1].tolist() == [1, 0]
