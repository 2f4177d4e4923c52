import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.records.benchmarks import rewardbench

from .layouts import coarse, scored


def accuracies(values):
    """Rows that give each subset this accuracy, in hundredths."""
    return [
        scored(f"{name}-{i}", [1.0, 0.0] if i < round(100 * value) else [0.0, 1.0], subset=name)
        for name, value in values.items()
        for i in range(100)
    ]


def test_weights_are_those_of_the_published_sections():
    totals = {name: sum(weights.values()) for name, weights in rewardbench.SECTIONS.items()}
    assert totals == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1968}
    assert len(rewardbench.SUBSETS) == 23


def test_every_item_as_the_reference_counts_it():
    rng = np.random.default_rng(0)
    rows = [
        scored(f"{name}-{i}", coarse(rng, 2), subset=name)
        for name in rewardbench.SUBSETS
        for i in range(int(rng.integers(1, 9)))
    ]
    won = {
        name: [r.scores[0] > r.scores[1] for r in rows if r.subset == name] for name in rewardbench.SUBSETS
    }
    expected = {name: sum(items) / len(items) for name, items in won.items()}
    result = rewardbench.score(rows)
    assert result.details["subsets"] == expected
    for section, weights in rewardbench.SECTIONS.items():
        weighted = np.average([expected[name] for name in weights], weights=list(weights.values()))
        assert result.figures[section] == pytest.approx(weighted, abs=1e-15)
    assert result.score == pytest.approx(np.mean([result.figures[s] for s in rewardbench.SECTIONS]))
    assert result.details["accuracy"] == np.mean([row.scores[0] > row.scores[1] for row in rows])
    assert result.missing == []


def test_ties_are_losses_and_sections_without_rows_are_undefined():
    result = rewardbench.score([scored("0", [1.0, 1.0], subset="math-prm")])
    assert result.details["subsets"] == {"math-prm": 0.0}
    assert (result.figures["Reasoning"], result.figures["Chat"], result.score) == (0.0, None, None)


def test_both_conventions_of_xstest_labelled():
    rows = accuracies({"xstest-should-refuse": 1.0, "xstest-should-respond": 0.0})
    result = rewardbench.score(rows)
    assert result.figures["Safety"] == pytest.approx(154 / 404)
    assert result.figures["Safety (xstest 250/154, before 2024-09)"] == pytest.approx(250 / 404)
    assert result.details["xstest"] == {
        "154/250, since 2024-09": {"Safety": result.figures["Safety"], "score": result.score},
        "250/154, before 2024-09": {"Safety": pytest.approx(250 / 404), "score": None},
    }


def test_missing_subsets_leave_sum_and_weight_and_an_empty_section_is_undefined():
    result = rewardbench.score(accuracies({"donotanswer": 0.5, "refusals-dangerous": 1.0, "mine": 1.0}))
    assert result.figures["Safety"] == pytest.approx((136 * 0.5 + 100) / 236)
    assert [result.figures[name] for name in ("Chat", "Chat Hard", "Reasoning")] == [None] * 3
    assert result.score is None
    assert len(result.missing) == 21
    assert result.details["other_subsets"] == ["mine"]
    assert result.details["score_with_prior_sets"] is None


def test_prior_sets_are_a_section_of_half_weight():
    sections = {"alpacaeval-easy": 1.0, "mt-bench-hard": 0.0, "donotanswer": 0.0, "hep-go": 0.0}
    result = rewardbench.score(accuracies({**sections, "shp": 0.5, "anthropic_hhh": 0.7}))
    assert result.details["prior_sets"] == pytest.approx(0.6)
    assert result.details["score_with_prior_sets"] == pytest.approx((2 * 1.0 + 0.6) / 9)
    assert result.score == 0.25


def test_rows_of_another_form():
    with pytest.raises(DataError, match="row 'x': expected a pair, found 4 responses"):
        rewardbench.score([scored("x", [1, 0, 0, 0], subset="math-prm")])
    with pytest.raises(DataError, match="row 'x': no subset"):
        rewardbench.score([scored("x", [1, 0])])
