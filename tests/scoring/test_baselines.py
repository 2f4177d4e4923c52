"""Baselines without a model: of single comparisons, and of votes against a plain count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import CheckpointError, RunError
from prb_jax.records.intake import read_comparisons
from prb_jax.scoring.baselines import (
    BASELINE_NAMES,
    BASELINES,
    NEIGHBOURS,
    nearest_users,
    popularity,
    profile_overlap,
    score_baseline,
)

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture(scope="module")
def choices(many):
    """By pair and user, the text that the user prefers."""
    chosen = {}
    for c in many:
        chosen.setdefault(c.question, {})[c.user_id] = c.responses[c.labels.index(1.0)]
    return chosen


def test_popularity_is_the_count_of_the_others(many, choices):
    for comparison, scores in zip(many, popularity(many), strict=True):
        others = [text for user, text in choices[comparison.question].items() if user != comparison.user_id]
        assert scores.tolist() == [others.count(text) for text in comparison.responses]


def test_nearest_users_are_those_who_agree_most_on_other_pairs(many, choices):
    nearest = nearest_users(many)
    for comparison, scores in zip(many, nearest, strict=True):
        weights = []
        for other, text in choices[comparison.question].items():
            common = [
                votes for question, votes in choices.items()
                if question != comparison.question and {other, comparison.user_id} <= votes.keys()
            ]  # fmt: skip
            if other != comparison.user_id and common:
                same = sum(votes[other] == votes[comparison.user_id] for votes in common)
                weights.append(((same + 1) / (len(common) + 2), other, text))
        # users of equal agreement are taken in the order of their names, as texts
        best = sorted(weights, key=lambda entry: (-entry[0], entry[1]))[:NEIGHBOURS]
        expected = [sum(w for w, _, chosen in best if chosen == text) for text in comparison.responses]
        assert scores.tolist() == pytest.approx(expected, rel=1e-6)
    assert len(many) > 90

    def share_won(votes):
        return np.mean([s[c.labels.index(1.0)] > s[c.labels.index(0.0)] for c, s in zip(many, votes)])

    assert share_won(nearest) > share_won(popularity(many)) + 0.1


def test_a_users_own_votes_never_count():
    rows = [vote("u", "p", "a"), vote("u", "p", "a", number=1), vote("v", "p", "b"), vote("w", "q", "a")]
    votes = [None if scores is None else scores.tolist() for scores in popularity(rows)]
    assert votes == [[0, 1], [0, 1], [1, 0], None]
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


PINNED = [0.018926918506622314, 0.9458092451095581]  # for id '7' and the texts 'a', 'b'

TEA = [{"id": "1", "category": "", "text": "I grow green tea."}, {"id": "2", "text": "Tea, every morning!"}]


def comparison(responses, *, id="7", profile=(), **fields):
    return prb.Comparison(id=id, question="q", responses=responses, profile=profile, **fields)


MANY = [
    comparison([f"answer {i} {'tea' * (i % 3)}", "green morning", "x" * i + "y"], id=str(i), profile=TEA)
    for i in range(40)
]


@pytest.mark.parametrize("name", BASELINES)
def test_each_score_is_a_float32_of_its_own_comparison_and_of_no_private_field(name):
    scores = score_baseline(name, [*MANY, comparison(["a", "b"])])
    assert [s.shape for s in scores] == [(3,)] * 40 + [(2,)]
    assert all(s.dtype == np.float32 and np.isfinite(s).all() for s in scores)
    assert score_baseline(name, []) == []
    for i in (0, 17, 39):
        assert np.array_equal(score_baseline(name, [MANY[i]])[0], scores[i])
    assert all(np.array_equal(a, b) for a, b in zip(score_baseline(name, MANY[::-1]), scores[39::-1]))
    private = {"rubric_aspects": [{"aspect": "coffee"}], "narrative": "coffee", "user_id": "coffee"}
    shown, told = (
        score_baseline(name, [comparison(["green tea", "coffee"], profile=TEA, **fields)])[0]
        for fields in ({}, private)
    )
    assert np.array_equal(shown, told)


@pytest.mark.parametrize("name", sorted(BASELINES.keys() - {"baseline:first"}))
def test_the_order_of_responses_does_not_matter_and_equal_texts_tie(name):
    texts = ["green tea", "black coffee in the morning", "green tea"]
    a = score_baseline(name, [comparison(texts, profile=TEA)])[0]
    b = score_baseline(name, [comparison(texts[::-1], profile=TEA)])[0]
    assert a.tolist() == b.tolist()[::-1]
    assert a[0] == a[2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("baseline:length", [3, 4, 5000]),  # characters
        ("baseline:shorter", [-3, -4, -5000]),
        ("baseline:first", [3, 2, 1]),
    ],
)
def test_length_and_place(name, expected):
    assert score_baseline(name, [comparison(["abc", "äöü\n", "x" * 5000])])[0].tolist() == expected


def test_of_a_pair_the_place_says_nothing():
    pair = prb.Comparison(id="1", question="q", chosen="a", rejected="b")
    assert score_baseline("baseline:first", [pair])[0].tolist() == [0, 0]


def test_random_is_uniform_and_fixed():
    scores = np.array(
        score_baseline("baseline:random", [comparison(["a", "b"], id=str(i)) for i in range(4000)])
    )
    assert scores.min() >= 0
    assert scores.max() < 1
    assert scores.mean() == pytest.approx(0.5, abs=0.02)
    assert (scores[:, 0] > scores[:, 1]).mean() == pytest.approx(0.5, abs=0.03)
    assert abs(np.corrcoef(scores.T)[0, 1]) < 0.06


def test_random_is_the_same_in_every_process():
    """A change of these values would silently change every published random row."""
    code = (
        "from prb_jax import Comparison\n"
        "from prb_jax.scoring.baselines import score_baseline\n"
        "c = Comparison(id='7', question='q', responses=['a', 'b'])\n"
        "print(score_baseline('baseline:random', [c])[0].tolist())"
    )
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{PINNED}\n"


def test_profile_overlap_by_hand():
    """Two posts: "a b", "a c". IDF: 1 in both, 1 + ln(3/2) in one, 1 + ln 3 in none."""
    profile = [{"text": "a b"}, {"text": "A, c"}]
    both, one, none = 1.0, 1 + np.log(1.5), 1 + np.log(3)
    a = (1 + np.log(2)) * both  # twice in the profile
    profile_norm = np.sqrt(a**2 + 2 * one**2)
    scores = score_baseline("baseline:profile-overlap", [comparison(["a b", "c d", "e"], profile=profile)])[0]
    assert scores[0] == pytest.approx((a * both + one * one) / profile_norm / np.hypot(both, one), rel=1e-6)
    assert scores[1] == pytest.approx(one * one / profile_norm / np.hypot(one, none), rel=1e-6)
    assert scores[2] == 0


def test_overlap_of_the_posts_that_are_shown():
    first, whole = comparison(["tea", "jam"], profile=TEA[:1]), comparison(["tea", "jam"], profile=TEA)
    assert np.array_equal(profile_overlap([whole], posts=1)[0], profile_overlap([first])[0])
    assert not np.array_equal(profile_overlap([whole], posts=1)[0], profile_overlap([whole])[0])


@pytest.mark.parametrize("profile", [(), [{"text": "..."}], [{"text": ""}]])
def test_profile_overlap_without_words_is_a_tie(profile):
    scores = score_baseline("baseline:profile-overlap", [comparison(["a tea", "?", "  "], profile=profile)])
    assert scores[0].tolist() == [0, 0, 0]


def test_an_unknown_baseline_and_options_are_refused():
    with pytest.raises(
        CheckpointError, match=r"unknown baseline 'baseline:best'; expected one of baseline:l"
    ):
        score_baseline("baseline:best", MANY)
    with pytest.raises(RunError, match="unknown baseline 'baseline:best'"):
        prb.load("baseline:best")
    options = {"dtype": "float32", "quantize": "int8", "attention": "xla"}
    with pytest.raises(RunError, match=f"{', '.join(options)}: baseline:random reads the whole text"):
        prb.load("baseline:random", **options)


@pytest.mark.parametrize("name", ["personalised/ukpconvarg1", "generic/llmbar"])
def test_equal_texts_of_real_data_tie(name):
    path = ROOT.parent / "shared" / "data" / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    equal = [c for c in read_comparisons(path) if c.responses[0] == c.responses[1]]
    assert equal
    for baseline in BASELINES:
        assert all(a == b for a, b in score_baseline(baseline, equal))
