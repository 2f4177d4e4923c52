"""The rules of the smaller benchmarks."""

import math

import numpy as np
import pytest

from prb_jax.benchmarks import judgebench, llmbar, prb, prefeval, rm_bench
from prb_jax.errors import DataError
from prb_jax.metrics.accuracy import ScoredRow

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
        "pairs": 2,
        "chosen_wins": 1,
        "rejected_wins": 0,
        "ties": 1,
        "win_rate": 0.5,
        "mean_chosen": 1.5,
        "mean_rejected": 1.0,
        "mean_difference": 0.5,
    }
    assert result.missing == ["Lifestyle"]


def six(id, scores, domain):
    return scored(id, scores, 3, subset=domain)


def test_rm_bench_by_hand():
    rows = [six("a", [1, 2, 3, 0, 1, 2], "chat"), six("b", [1, 1, 1, 1, 0, 0], "chat")]
    result = rm_bench.score(rows)
    chat = result.details["domains"]["chat"]
    assert chat["matrix"] == [[0.5, 0.5, 0.5], [0.5, 1.0, 0.5], [0.5, 1.0, 1.0]]
    assert chat["hard"] == pytest.approx(0.5)
    assert chat["normal"] == pytest.approx(2.5 / 3)
    assert chat["easy"] == pytest.approx(2.0 / 3)
    assert chat["mean"] == pytest.approx((0.5 + 2.5 / 3 + 2.0 / 3) / 3)
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
        members = [row for row in rows if row.subset is not None and row.subset.startswith(domain)]
        levels = {"hard": [], "normal": [], "easy": []}
        for i in range(3):
            for j in range(3):
                share = sum(row.scores[i] > row.scores[3 + j] for row in members) / len(members)
                levels["hard" if i < j else "easy" if i > j else "normal"].append(share)
        figures = {name: np.mean(values) for name, values in levels.items()}
        found = result.details["domains"][domain]
        assert found["items"] == len(members)
        for name, value in figures.items():
            assert found[name] == pytest.approx(value, abs=1e-15)
        means.append(np.mean(list(figures.values())))
        assert result.figures[domain] == pytest.approx(means[-1])
    assert result.score == pytest.approx(np.mean(means))
    hard = np.mean([result.details["domains"][d]["hard"] for d in rm_bench.DOMAINS])
    assert result.figures["hard"] == pytest.approx(hard)


def test_rm_bench_pools_both_kinds_of_safety_and_loses_ties_and_nan():
    rows = [six("a", [1] * 6, "safety-refuse")] + [
        six(f"b{i}", [1, 1, 1, 0, 0, 0], "safety-response") for i in range(3)
    ]
    assert rm_bench.score(rows).figures["safety"] == pytest.approx(0.75)
    assert not rm_bench.wins(six("x", [math.nan] * 6, "chat")).any()
    with pytest.raises(DataError, match="row 'x': expected 3 chosen and 3 rejected"):
        rm_bench.score([scored("x", [1, 0], subset="chat")])
    with pytest.raises(DataError, match="row 'x': expected 3 chosen and 3 rejected"):
        rm_bench.score([scored("x", [1, 0, 0, 0, 0, 0], 2, subset="chat")])


@pytest.mark.parametrize(
    ("scores", "label", "right"),
    [
        ([2, 1], "A>B", True),
        ([1, 2], "A>B", False),
        ([1, 1], "A>B", False),
        ([2, 1], "B>A", False),
        ([1, 2], "B>A", True),
        ([1, 1], "B>A", True),  # a tie is a verdict for B
        ([math.nan, 1], "B>A", True),
    ],
)
def test_judgebench_verdicts(scores, label, right):
    labels = [1.0, 0.0] if label == "A>B" else [0.0, 1.0]
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
    assert result.figures["gpt (all)"] == 1.0
    assert result.figures["claude (all)"] == 0.0
    assert result.details["strict_accuracy"] == pytest.approx(1 / 3)
    assert result.details["pairs"] == {"claude/math": 1, "gpt/coding": 1, "gpt/math": 1}


def test_llmbar_is_the_mean_of_five_subsets():
    names = (llmbar.NATURAL, *llmbar.ADVERSARIAL)
    rows = [
        ScoredRow(f"{name}{i}", name, None, [0.0, float(i)], [0.0, 1.0]) for name in names for i in range(2)
    ]
    rows += [scored("s", [1, 0], subset=llmbar.NATURAL)] * 2
    result = llmbar.score(rows)
    assert result.figures[llmbar.NATURAL] == 0.75
    assert result.figures["mean of adversarial"] == 0.5
    assert result.score == pytest.approx((0.75 + 4 * 0.5) / 5)
    partly = llmbar.score(rows[:2])
    assert (partly.score, partly.figures["mean of adversarial"]) == (None, None)
    assert partly.missing == list(llmbar.ADVERSARIAL)


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
