import math
from dataclasses import replace

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.records.benchmarks.rewardbench2 import SUBSETS, credit, score, ties_score

from .layouts import coarse, scored


def ties(**prompts):
    """Rows of the subset Ties: ref0=[...], tied0=(number of right answers, [...])."""
    rows = []
    for name, value in prompts.items():
        kind, number = name[:-1], name[-1]
        correct, scores = (1, value) if kind == "ref" else value
        rows.append(scored(f"{kind}:{number}", scores, correct, subset="Ties"))
    return rows


TIED = (3, [5, 9, 4, 3.5, -1])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ties(ref0=[5, 0, 0], tied0=(3, [5, 5.1, 4.9, 0, -1])), 1.01),
        (ties(ref0=[5, 0, 0], tied0=TIED), 0.5928370213),
        (ties(ref0=[1, 2], tied0=(2, [5, 4.5, 1])), 0.4900494525),
        (ties(ref0=[1, 0], tied0=(2, [5, 5, 1])), 1.01),
        (ties(ref0=[0, 1], tied0=(2, [5, 5, 1])), 0.49),
        (ties(ref0=[1, 1, 1], tied0=(2, [1, 1, 1])), 0.0),
        (ties(ref0=[1, 2], tied0=(2, [1, 1, 3])), -0.01),
        (
            ties(ref0=[5, 0, 0], tied0=(3, [5, 5.1, 4.9, 0, -1]), ref1=[1, 2], tied1=(2, [5, 4.5, 1])),
            0.7500247262,
        ),
        (ties(ref0=[5, 0, 0], tied0=TIED, ref1=[0, 1]), 0.4428370213),
    ],
)
def test_reference_vectors_of_the_ties_formula(rows, expected):
    assert ties_score(rows).score == pytest.approx(expected, abs=6e-11)  # given to ten digits
    assert ties_score(rows[::-1]).score == ties_score(rows).score


def reference(rows):
    """The formula term by term in plain floats."""
    ref, tied = {}, {}  # by number, the gap and the spread
    for row in rows:
        kind, number = row.id.split(":")
        correct = int(sum(row.labels))
        right, wrong = row.scores[:correct], row.scores[correct:]
        stats = min(right) - max(wrong), max(right) - min(right)
        (ref if kind == "ref" else tied)[number] = stats
    total = 0.3 * sum(gap > 0 for gap, _ in tied.values()) / len(tied)
    total += 0.3 * sum(gap > 0 for gap, _ in ref.values()) / len(ref)
    both = ref.keys() & tied.keys()
    for number in sorted(both):
        gap, spread = tied[number]
        least = min(gap, ref[number][0])
        total += 0.2 * (gap > spread) / len(both) + 0.2 * (least > spread) / len(both)
        if spread:
            term = math.tanh(least / spread - 1)
        else:
            term = 0.0 if least == 0 else math.copysign(1.0, least)
        total += 0.01 * term / len(both)
    return total


def test_the_ties_formula_on_random_scores_with_many_ties():
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows = []
        for number in range(int(rng.integers(1, 7))):
            ref = coarse(rng, int(rng.integers(2, 5)))
            tied = (int(rng.integers(2, 4)), coarse(rng, int(rng.integers(4, 7))))
            rows += ties(**{f"ref{number}": ref, f"tied{number}": tied})
        if len(rows) > 4 and rng.integers(2):
            rows.pop(int(rng.integers(0, 2)))  # a number without its counterpart
        assert ties_score(rows).score == pytest.approx(reference(rows), abs=1e-12)


def test_without_any_number_that_has_both_the_score_is_not_a_number():
    rows = ties(ref0=[1, 0], tied1=(2, [3, 2, 1]))
    assert math.isnan(ties_score(rows).score)
    written = score(rows).to_json()
    assert written["figures"]["Ties"] is None
    assert written["details"]["ties"]["accurate_tied"] == 1.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ties(tied0=(1, [3, 2, 1])), "row 'tied:0': expected at least two right answers"),
        (ties(ref0=[1, 0]) * 2, "row 'ref:0': a second one of this name"),
        ([scored("7", [1, 0], subset="Ties")], "row '7': expected an id ref:N or tied:N"),
        ([scored("ref:x", [1, 0], subset="Ties")], "row 'ref:x': expected an id"),
        ([scored("ref:0", [1, 1], 2, subset="Ties")], "row 'ref:0': expected right and wrong answers"),
    ],
)
def test_ties_of_another_form(rows, message):
    with pytest.raises(DataError, match=message):
        ties_score(rows)


def test_ids_made_distinct_are_still_understood():
    rows = [replace(row, id=f"Ties/{row.id}") for row in ties(ref3=[1, 0], tied3=(2, [5, 5, 1]))]
    assert ties_score(rows).score == pytest.approx(1.01)


def test_credit_of_random_items_as_the_reference_counts_it():
    assert [credit(scored("x", scores)) for scores in ([2, 2, 2, 1], [1, 2, 0, 1])] == [1 / 3, 0.0]
    rng = np.random.default_rng(2)
    for _ in range(2000):
        scores = coarse(rng, 4)
        expected = 1 / scores.count(max(scores)) if scores[0] == max(scores) else 0
        assert credit(scored("x", scores)) == expected


def test_the_right_answer_must_come_first():
    row = replace(scored("x", [1, 0, 0, 0]), labels=[0.0, 1.0, 0.0, 0.0])
    with pytest.raises(DataError, match="row 'x': expected the one right response first"):
        credit(row)


def test_the_score_is_the_mean_of_six_subsets():
    rows = [scored(name, [1, 1, 0, 0], subset=name) for name in SUBSETS if name != "Ties"]
    rows += ties(ref0=[1, 0], tied0=(2, [5, 5, 1]))
    result = score(rows)
    assert result.score == pytest.approx((5 * 0.5 + 1.01) / 6)
    assert list(result.figures) == list(SUBSETS)
    assert result.missing == []


def test_a_missing_subset_leaves_no_score():
    result = score([scored("a", [1, 0, 0, 0], subset="Math"), scored("b", [1, 1], subset="mine")])
    assert result.score is None
    assert result.figures == {**dict.fromkeys(SUBSETS), "Math": 1.0}
    assert result.missing == ["Factuality", "Precise IF", "Safety", "Focus", "Ties"]
    assert result.details["mean_of_present"] == 1.0
    assert result.details["other_subsets"] == ["mine"]
