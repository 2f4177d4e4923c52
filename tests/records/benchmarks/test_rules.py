"""The rules of the smaller benchmarks."""

import functools
import itertools
import math

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.records.benchmarks import (
    get_benchmark,
    judgebench,
    llmbar,
    prb,
    prefeval,
    rewardbench,
    rewardbench2,
    rm_bench,
)
from prb_jax.records.benchmarks.benchmark import score_intervals
from prb_jax.seams import BUILTIN

from .layouts import coarse, scored


def test_prb_counts_as_the_papers_script_prints():
    rows = [
        scored("a", [2.0, 1.0], subset="Art"),
        scored("b", [1.0, 1.0], subset="Art"),
        scored("c", [0.0, 1.5], subset="Society"),
    ]
    result = prb.score(rows)
    assert result.score == pytest.approx(1 / 3)
    assert result.figures == {"Art": 0.5, "Society": 0.0, "mean of subsets": 0.25}
    assert result.details["subsets"]["Art"] == {
        "pairs": 2, "chosen_wins": 1, "rejected_wins": 0, "ties": 1, "win_rate": 0.5,
        "mean_chosen": 1.5, "mean_rejected": 1.0, "mean_difference": 0.5,
    }  # fmt: skip
    assert result.missing == ["Lifestyle"]


def six(id, scores, domain):
    return scored(id, scores, 3, subset=domain)


def test_rm_bench_by_hand():
    rows = [six("a", [1, 2, 3, 0, 1, 2], "chat"), six("b", [1, 1, 1, 1, 0, 0], "chat")]
    result = rm_bench.score(rows)
    chat = result.details["domains"]["chat"]
    assert chat["matrix"] == [[0.5, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 1.0, 1.0]]
    levels = [chat[name] for name in ("hard", "normal", "easy", "mean")]
    assert levels == pytest.approx([0.5, 2.5 / 3, 2.0 / 3, (0.5 + 2.5 / 3 + 2.0 / 3) / 3])
    assert result.score is None
    assert result.missing == ["math", "code", "safety"]
    assert result.details["mean_of_present"]["mean"] == chat["mean"]


def test_rm_bench_on_random_scores_as_the_reference_counts_them():
    rng = np.random.default_rng(0)
    names = ("chat", "math", "code", "safety-refuse", "safety-response")
    rows = [six(f"{i}", coarse(rng, 6), names[int(rng.integers(5))]) for i in range(300)]
    result = rm_bench.score(rows)
    means = []
    for domain in ("chat", "math", "code", "safety"):
        members = [row for row in rows if row.subset.startswith(domain)]
        levels = {"hard": [], "normal": [], "easy": []}
        for i, j in itertools.product(range(3), repeat=2):
            share = sum(row.scores[i] > row.scores[3 + j] for row in members) / len(members)
            levels["hard" if i < j else "easy" if i > j else "normal"].append(share)
        figures = {name: np.mean(values) for name, values in levels.items()}
        details = result.details["domains"][domain]
        assert details["items"] == len(members)
        assert {name: details[name] for name in levels} == pytest.approx(figures, abs=1e-15)
        means.append(np.mean(list(figures.values())))
        assert result.figures[domain] == pytest.approx(means[-1])
    assert result.score == pytest.approx(np.mean(means))
    hard = np.mean([result.details["domains"][d]["hard"] for d in rm_bench.DOMAINS])
    assert result.figures["hard"] == pytest.approx(hard)


def test_rm_bench_pools_both_kinds_of_safety_and_loses_ties():
    won = [six(f"b{i}", [1, 1, 1, 0, 0, 0], "safety-response") for i in range(3)]
    assert rm_bench.score([six("a", [1] * 6, "safety-refuse"), *won]).figures["safety"] == pytest.approx(0.75)
    for row in (scored("x", [1, 0], subset="chat"), scored("x", [1, 0, 0, 0, 0, 0], 2, subset="chat")):
        with pytest.raises(DataError, match="row 'x': expected 3 chosen and 3 rejected"):
            rm_bench.score([row])


@pytest.mark.parametrize(
    ("scores", "says_a"),
    [([2, 1], True), ([1, 2], False), ([1, 1], False)],  # a tie is a verdict for B
)
def test_judgebench_verdicts(scores, says_a):
    for labels, right in (([1.0, 0.0], says_a), ([0.0, 1.0], not says_a)):
        row = ScoredRow("x", "gpt/math", None, scores, labels)
        assert judgebench.is_right(row) is right
        result = judgebench.score([row])
        assert result.score == result.figures["gpt (all)"] == result.figures["gpt/math"] == float(right)


def test_judgebench_tells_the_writers_apart():
    rows = [
        ScoredRow("a", "gpt/math", None, [2.0, 1.0], [1.0, 0.0]),
        ScoredRow("b", "gpt/coding", None, [1.0, 1.0], [0.0, 1.0]),
        ScoredRow("c", "claude/math", None, [1.0, 2.0], [1.0, 0.0]),
    ]
    result = judgebench.score(rows)
    assert result.score == pytest.approx(2 / 3)
    assert (result.figures["gpt (all)"], result.figures["claude (all)"]) == (1.0, 0.0)
    assert result.details["strict_accuracy"] == pytest.approx(1 / 3)
    assert result.details["pairs"] == {"claude/math": 1, "gpt/coding": 1, "gpt/math": 1}
    assert result.figures["pooled over response models"] == result.score
    assert list(result.figures)[:2] == ["gpt (all)", "claude (all)"]


def test_llmbar_is_the_mean_of_five_subsets():
    names = (llmbar.NATURAL, *llmbar.ADVERSARIAL)
    rows = [scored(f"{name}{i}", [float(i), 0.0], subset=name) for name in names for i in range(2)]
    rows += [scored("s", [1, 0], subset=llmbar.NATURAL)] * 2
    result = llmbar.score(rows)
    assert result.figures[llmbar.NATURAL] == 0.75
    assert result.figures["mean of adversarial"] == 0.5
    assert result.score == pytest.approx((0.75 + 4 * 0.5) / 5)
    others = [
        scored("c", [0, 1], subset="CaseStudy/Negation"),
        scored("m", [1, 0], subset="Processed/MT-Bench"),
    ]
    assert llmbar.score([*rows, *others]).figures == result.figures
    assert llmbar.score([*rows, *others]).details == {
        **result.details,
        "other_subsets": {"CaseStudy/Negation": 0.0, "Processed/MT-Bench": 1.0},
    }
    assert result.details["pairs"] == 12
    partly = llmbar.score(rows[:2])
    assert (partly.score, partly.figures["mean of adversarial"]) == (None, None)
    assert partly.missing == list(llmbar.ADVERSARIAL)


BAD = [
    (prb, scored("bad", [math.nan, 0], subset="Art")),
    (rewardbench, scored("bad", [0, math.nan], subset="math-prm")),
    (rewardbench2, scored("bad", [1, math.inf, 0, 0], subset="Math")),
    (rewardbench2, scored("tied:1", [1, math.nan, 0, 0], 2, subset="Ties")),
    (rm_bench, six("bad", [1, 1, 1, 0, 0, -math.inf], "chat")),
    (judgebench, ScoredRow("bad", "gpt/math", None, [math.nan, 1.0], [0.0, 1.0])),
    (llmbar, scored("bad", [math.inf, 0], subset=llmbar.NATURAL)),
    (prefeval, scored("bad", [math.nan, 0, 0, 0], subset="t", user="u")),
]


@pytest.mark.parametrize(("module", "row"), BAD)
def test_a_score_that_is_not_finite_is_refused_by_name_in_every_rule(module, row):
    message = rf"row '{row.id}': scores\[\d\] is -?(nan|inf); expected a finite number"
    with pytest.raises(DataError, match=message):
        module.score([row])


def test_intervals_of_scores_are_drawn_through_the_rule():
    """Of a mean over rows they are the usual ones; of the mean of subsets each subset keeps its size."""
    rng = np.random.default_rng(0)
    counts = dict(zip((llmbar.NATURAL, *llmbar.ADVERSARIAL), (100, 134, 92, 47, 46)))
    rows = [
        scored(f"{name}{i}", [1, 0] if rng.random() < 0.7 else [0, 1], subset=name)
        for name, count in counts.items()
        for i in range(count)
    ]
    nobody = Clusters((None,) * len(rows))
    users = Clusters(tuple(row.id[-1] for row in rows))  # ten users in each subset
    intervals = score_intervals(llmbar.BENCHMARK, rows, nobody, seed=0, resamples=400)
    result = llmbar.score(rows)
    shares = np.array([result.figures[name] for name in counts])
    error = np.sqrt((shares * (1 - shares) / list(counts.values())).sum()) / 5
    bounds = result.score + 1.96 * error * np.array([-1, 1])
    assert intervals["score_ci95"] == pytest.approx(bounds, abs=0.4 * error)
    assert intervals["figures_ci95"].keys() == result.figures.keys()
    few = functools.partial(score_intervals, llmbar.BENCHMARK, resamples=20)
    assert few(rows, nobody, seed=0) == few(rows[::-1], nobody, seed=0) != few(rows, nobody, seed=1)
    assert few(rows, users, seed=0)["score_ci95"] != few(rows, nobody, seed=0)["score_ci95"]


def test_both_prompts_about_one_number_are_drawn_together():
    rng = np.random.default_rng(1)
    rows = [
        scored(f"{name}{i}", coarse(rng, 4), subset=name)
        for name in rewardbench2.SUBSETS[:5]
        for i in range(8)
    ]
    for i in range(8):
        rows.append(scored(f"ref:{i}", coarse(rng, 3), subset="Ties"))
        rows.append(scored(f"tied:{i}", coarse(rng, 5), 2, subset="Ties"))
    intervals = score_intervals(
        rewardbench2.BENCHMARK, rows, Clusters((None,) * len(rows)), seed=0, resamples=50
    )
    assert intervals["figures_ci95"]["Ties"] is not None
    low, high = intervals["score_ci95"]
    assert low < rewardbench2.score(rows).score < high


def test_why_there_is_no_interval():
    rows = [scored(f"{i}", [1, 0], subset="Art") for i in range(6)]
    for module, users, reason in (
        (prb, [None] * 6, "all draws give one score"),
        (prb, ["a", "b", "c"] * 2, "3 units to draw from; an interval needs at least 6"),
        (llmbar, [None] * 6, "the score is not defined"),
    ):
        intervals = score_intervals(module.BENCHMARK, rows, Clusters(tuple(users)), seed=0, resamples=400)
        assert (intervals["score_ci95"], intervals["score_ci95_reason"]) == (None, reason)


def crossed(names: list[str], *, subset: str) -> tuple[list[ScoredRow], Clusters]:
    """Rows of each user on the same twelve sets of responses."""
    rng = np.random.default_rng(2)
    ease = rng.normal(size=12)
    rows = [
        scored(f"{name}-{place}", [1.0, float(rng.normal() > 1 + ease[place])], subset=subset, user=name)
        for name in names
        for place in range(12)
    ]
    keys = tuple((row.id.rpartition("-")[2],) for row in rows)
    return rows, Clusters(tuple(row.user_id for row in rows), keys)


def test_a_share_of_rows_that_several_users_judge_has_a_two_way_interval():
    rows, clusters = crossed([f"u{user}" for user in range(20)], subset="Art")
    intervals = score_intervals(prb.BENCHMARK, rows, clusters, seed=0, resamples=20)
    wins = np.array([row.scores[0] > row.scores[1] for row in rows])
    assert intervals["score_ci95"] == accuracy_interval(wins, clusters).bounds
    assert intervals["score_ci95_reason"] is None
    assert intervals["figures_ci95"] == {"Art": None, "mean of subsets": None}
    low, high = intervals["score_ci95"]
    assert low < prb.score(rows).score < high
    by_user = score_intervals(prb.BENCHMARK, rows, Clusters(clusters.users), seed=0, resamples=400)
    assert high - low > 1.3 * np.ptp(by_user["score_ci95"])
    few = score_intervals(prb.BENCHMARK, *crossed(["u", "v"], subset="Art"), seed=0, resamples=20)
    reason = "2 users or sets of responses; an interval needs at least 6"
    assert (few["score_ci95"], few["score_ci95_reason"]) == (None, reason)


def test_a_crossed_score_that_is_no_share_of_rows_has_no_interval():
    rows, clusters = crossed([f"u{user}" for user in range(20)], subset="t")
    intervals = score_intervals(prefeval.BENCHMARK, rows, clusters, seed=0, resamples=20)
    assert intervals["score_ci95"] is None
    assert intervals["score_ci95_reason"].startswith("several users judge the same responses")
    assert set(intervals["figures_ci95"].values()) == {None}
    undefined = score_intervals(llmbar.BENCHMARK, rows, clusters, seed=0, resamples=20)
    assert undefined["score_ci95_reason"] == "the score is not defined"


@pytest.mark.parametrize("name", [name for name in BUILTIN["benchmarks"] if get_benchmark(name).won])
def test_a_score_of_won_rows_is_their_share(name):
    rng = np.random.default_rng(3)
    benchmark = get_benchmark(name)
    rows = [
        scored(f"{i}", coarse(rng, 2), subset=("target", "feedback")[i % 2], user=f"{i % 9}")
        for i in range(60)
    ]
    won = [one for row in rows if (one := benchmark.won(row)) is not None]
    assert len(won) == (30 if name == "alignx" else 60)
    assert benchmark.score(rows).score == np.mean(won)


def test_prefeval_needs_the_fitting_option_above_all_others():
    whole = [scored("a", [3, 2, 1, 0], subset="t", user="a"), scored("b", [3, 3, 1, 0], subset="u", user="b")]
    pairs = [
        scored(f"{row.user_id}{i}", [row.scores[0], row.scores[i]], subset=row.subset, user=row.user_id)
        for row in whole
        for i in (1, 2, 3)
    ]
    for rows in (whole, pairs):
        result = prefeval.score(rows)
        assert result.score == 0.5
        assert (result.figures["t"], result.figures["u"]) == (1.0, 0.0)
    assert prefeval.score(pairs).figures["comparisons won"] == pytest.approx(5 / 6)
    with pytest.raises(DataError, match="row 'x': no user"):
        prefeval.score([scored("x", [1, 0])])
