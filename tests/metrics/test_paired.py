"""Paired differences of several models: tests and adjustments against scipy, statsmodels and their definitions."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binomtest

from prb_jax.errors import DataError
from prb_jax.metrics.calibration import log_losses
from prb_jax.metrics.paired import compare_rows, holm, mcnemar_p
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import paired_difference


def rows(wins, *, users=None, labels=(1.0, 0.0), start=0):
    return [
        ScoredRow(str(start + i), None, f"u{i % users}" if users else None, [float(win), 0.5], list(labels))
        for i, win in enumerate(wins)
    ]


def test_mcnemar_equals_scipys_exact_binomial_test_on_1000_random_cases():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 60, (2, 1000))
    a[:5], b[:5] = [0, 0, 7, 2000, 1000], [0, 9, 7, 1500, 1000]
    p_values = mcnemar_p(a, b)
    expected = [binomtest(int(x), int(x + y)).pvalue if x + y else 1.0 for x, y in zip(a, b)]
    np.testing.assert_allclose(p_values, expected, rtol=1e-10)


def test_holm_equals_its_definition_in_exact_fractions():
    rng = np.random.default_rng(2)
    for _ in range(1000):
        p = rng.choice(1 + rng.integers(64), rng.integers(1, 12)) / 64  # exact in binary, with equal ones
        order = sorted(range(len(p)), key=lambda i: p[i])
        expected, highest = {}, Fraction(0)
        for place, i in enumerate(order):
            highest = max(highest, Fraction(float(p[i])) * (len(p) - place))
            expected[i] = float(min(highest, Fraction(1)))
        assert holm(p).tolist() == [expected[i] for i in range(len(p))]
    assert holm([]).tolist() == []


def test_every_pair_is_compared_once_on_the_same_comparisons():
    rng = np.random.default_rng(4)
    wins = {name: rng.random(300) < rate for name, rate in (("x", 0.9), ("y", 0.5), ("z", 0.52))}
    runs = {name: rows(won, users=30) for name, won in wins.items()}
    runs["y"] = runs["y"][::-1]  # rows belong together by their ids
    compared = compare_rows(runs)
    accuracy = {name: won.mean() for name, won in wins.items()}
    assert [run["name"] for run in compared["runs"]] == sorted(accuracy, key=lambda name: -accuracy[name])
    assert {run["name"]: run["accuracy"] for run in compared["runs"]} == pytest.approx(accuracy)
    names = itertools.combinations([run["name"] for run in compared["runs"]], 2)
    assert [(pair["a"], pair["b"]) for pair in compared["pairs"]] == list(names)
    p_values = [pair["p"] for pair in compared["pairs"]]
    assert [pair["p_holm"] for pair in compared["pairs"]] == holm(p_values).tolist()
    for pair in compared["pairs"]:
        a, b = wins[pair["a"]], wins[pair["b"]]
        assert pair["difference"] == pytest.approx(a.mean() - b.mean())
        exact = binomtest(int((a & ~b).sum()), int((a ^ b).sum())).pvalue
        assert pair["p_mcnemar"] == pytest.approx(exact)
        assert (pair["n"], pair["users"]) == (300, 30)
        low, high = pair["ci95"]
        assert (pair["p"] <= 0.05) == (not low <= 0 <= high)  # one t test
        expected = paired_difference(runs[pair["a"]], runs[pair["b"]])
        assert pair["ci95"] == expected["ci95"]
    groups = {run["name"]: run["rank_group"] for run in compared["runs"]}
    assert groups == {"x": 1, "y": 2, "z": 2}


def test_no_two_of_a_rank_are_told_apart():
    rng = np.random.default_rng(5)
    base = rng.random(400)
    # each a little worse than the one before
    compared = compare_rows({f"m{k}": rows(base < 0.8 - 0.02 * k) for k in range(12)})
    group = {run["name"]: run["rank_group"] for run in compared["runs"]}
    assert [run["rank_group"] for run in compared["runs"]] == sorted(group.values())
    assert set(group.values()) == set(range(1, max(group.values()) + 1))
    assert 1 < max(group.values()) < 12
    apart = [(group[pair["a"]], group[pair["b"]]) for pair in compared["pairs"] if pair["p_holm"] <= 0.05]
    assert apart
    assert all(a != b for a, b in apart)


def test_with_few_users_there_is_no_verdict():
    compared = compare_rows({"a": rows([1] * 100, users=5), "b": rows([0] * 100, users=5)})
    (pair,) = compared["pairs"]
    assert (pair["ci95"], pair["p"], pair["p_holm"]) == (None, None, None)
    assert pair["p_mcnemar"] < 1e-20
    assert [run["rank_group"] for run in compared["runs"]] == [1, 1]


def test_equal_runs_differ_in_nothing():
    compared = compare_rows({"b": rows([1, 0, 1] * 20), "a": rows([1, 0, 1] * 20)})
    (pair,) = compared["pairs"]
    assert (pair["a"], pair["b"]) == ("a", "b")
    assert (pair["difference"], pair["p"], pair["p_holm"], pair["users"], pair["flips"]) == (0, 1, 1, 0, 0)
    assert [run["rank_group"] for run in compared["runs"]] == [1, 1]
    assert [pair["scores"][key] for key in ("mean", "rms", "max_abs")] == [0, 0, 0]
    assert [pair["scores"][key] for key in ("pearson", "spearman")] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (rows([1, 0, 1], start=1), "comparison '0' is in x only, and not in y"),
        (rows([1, 0, 1, 1]), "comparison '3' is in y only, and not in x"),
        (rows([1, 0, 1], users=2), "comparison '0': user None and labels .* in x, user 'u0'"),
        (rows([1, 0, 1], labels=(0.0, 1.0)), r"labels \[1.0, 0.0\] in x, user None and labels \[0.0, 1.0\]"),
        (rows([1, 0, 1]) + rows([1]), "y: expected at least one comparison, and each once"),
    ],
)
def test_other_comparisons_are_refused_by_name(other, message):
    with pytest.raises(DataError, match=message):
        compare_rows({"x": rows([1, 0, 1]), "y": other})
    with pytest.raises(DataError, match="at least two to compare, found 1"):
        compare_rows({"x": other})


def scored(scores: np.ndarray) -> list[ScoredRow]:
    return [
        ScoredRow(str(i), None, f"u{i % 7}", row.tolist(), [1.0, *[0.0] * (len(row) - 1)])
        for i, row in enumerate(scores)
    ]


def pair(a: np.ndarray, b: np.ndarray) -> dict:
    """The figures of a pair in which "a" is the run with the higher accuracy."""
    (figures,) = compare_rows({"a": scored(a), "b": scored(b)[::-1]})["pairs"]
    assert (figures["a"], figures["b"]) == ("a", "b")
    return figures


def test_figures_of_scores_are_those_of_the_formulas() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(60, 3)).round(1)  # with ties among the ranks
    ours = theirs + rng.normal(size=(60, 3), scale=0.3)
    ours[:, 0] += 0.2
    figures, difference = pair(ours, theirs), (ours - theirs).ravel()
    assert figures["scores"] == pytest.approx(
        {
            "mean": difference.mean(),
            "rms": np.sqrt(np.mean(difference**2)),
            "max_abs": np.abs(difference).max(),
            "std_b": theirs.std(),
            "pearson": stats.pearsonr(ours.ravel(), theirs.ravel())[0],
            "spearman": stats.spearmanr(ours.ravel(), theirs.ravel())[0],
        }
    )
    margins = [scores[:, 0] - scores[:, 1:].max(axis=1) for scores in (ours, theirs)]
    assert figures["flips"] == int((np.sign(margins[0]) != np.sign(margins[1])).sum()) > 0


def test_constant_scores_have_no_correlation_and_a_tie_that_becomes_a_win_is_another_verdict() -> None:
    constant = pair(np.ones((5, 2)), np.zeros((5, 2)))["scores"]
    assert constant == {"mean": 1, "rms": 1, "max_abs": 1, "std_b": 0, "pearson": None, "spearman": None}
    tie = pair(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0]]))
    assert (tie["flips"], tie["difference"]) == (1, 0.25)  # a tie is half a win


def with_margins(margins, *, users=20):
    return [
        ScoredRow(str(i), None, f"u{i % users}", [float(m), 0.0], [1.0, 0.0]) for i, m in enumerate(margins)
    ]


def test_whole_points_are_no_worse_than_the_same_scores():
    """A tie is half a win in ranks and differences; `ties="loss"` counts strict wins."""
    rng = np.random.default_rng(0)
    fine = rng.normal(0.5, 1, 2000)
    coarse = np.round(fine)
    runs = {"fine": with_margins(fine), "coarse": with_margins(coarse)}
    compared = compare_rows(runs)
    standings = {run["name"]: run for run in compared["runs"]}
    assert standings["coarse"]["accuracy"] == pytest.approx((coarse > 0).mean())
    assert standings["coarse"]["ties"] == int((coarse == 0).sum()) > 500
    half = (coarse > 0).mean() + (coarse == 0).mean() / 2
    assert standings["coarse"]["half_credit_accuracy"] == pytest.approx(half)
    (pair,) = compared["pairs"]
    assert pair["difference"] == pytest.approx((fine > 0).mean() - half)
    strict = compare_rows(runs, ties="loss")
    assert strict["pairs"][0]["difference"] == pytest.approx((fine > 0).mean() - (coarse > 0).mean())
    assert [run["rank_group"] for run in strict["runs"]] == [1, 2]
    assert (compared["tie_credit"], strict["tie_credit"]) == (0.5, 0)
    rounding_costs, counting_costs = pair["difference"], strict["pairs"][0]["difference"]
    assert rounding_costs < 0.3 * counting_costs
    with pytest.raises(DataError, match="ties: expected one of half, loss, found 'win'"):
        compare_rows(runs, ties="win")


def test_the_smallest_difference_that_would_be_found_is_found_in_80_of_100():
    rng = np.random.default_rng(1)
    found, named = 0, []
    for _ in range(200):
        skill = rng.normal(0, 0.5, 40)[np.arange(800) % 40]
        better = 0.07  # of a latent normal margin; its true difference of accuracies is estimated below
        a = skill + rng.normal(0.5 + better * 3, 1, 800)
        b = skill + rng.normal(0.5, 1, 800)
        (pair,) = compare_rows({"a": with_margins(a, users=40), "b": with_margins(b, users=40)})["pairs"]
        found += pair["p"] <= 0.05 and pair["a"] == "a"
        named.append(pair["detectable"])
    true = stats.norm.cdf(0.71 / np.sqrt(1.25)) - stats.norm.cdf(0.5 / np.sqrt(1.25))
    # the power of the true difference, by the same rule
    power = stats.norm.cdf(true / np.mean(named) * (1.96 + 0.84) - 1.96)
    assert found / 200 == pytest.approx(power, abs=3 * 0.035)
    assert pair["detectable"] == pytest.approx(2.85 * np.ptp(pair["ci95"]) / 2 / 2.02, rel=0.03)
    few = compare_rows({"a": with_margins(a[:4]), "b": with_margins(b[:4])})["pairs"][0]
    assert few["detectable"] is None


def test_log_losses_tell_apart_what_accuracies_do_not():
    rng = np.random.default_rng(2)
    truth = rng.normal(0, 1.5, 1500)
    chosen = np.where(rng.random(1500) < 1 / (1 + np.exp(-truth)), 1, -1)
    runs = {"calibrated": with_margins(truth * chosen), "too sure": with_margins(4 * truth * chosen)}
    compared = compare_rows(runs, log_loss=True)
    (pair,) = compared["pairs"]
    losses = {name: np.mean([np.logaddexp(0, -row.scores[0]) for row in rows]) for name, rows in runs.items()}
    for run in compared["runs"]:
        assert run["log_loss"] == pytest.approx(losses[run["name"]])
        assert run["log_loss_ci95"][0] < run["log_loss"] < run["log_loss_ci95"][1]
    assert (pair["difference"], pair["p"]) == (0, 1)
    assert pair["log_loss_difference"] == pytest.approx(losses[pair["a"]] - losses[pair["b"]])
    assert pair["log_loss_p_holm"] == pair["log_loss_p"] < 1e-6
    four = [ScoredRow("0", None, "u", [0.1, 2.0, -1.0, 0.3], [0.0, 1.0, 0.0, 0.0])]
    expected = -np.log(np.exp(2.0) / np.exp([0.1, 2.0, -1.0, 0.3]).sum())
    assert log_losses(four) == pytest.approx([expected])
