"""Ground truth of any text for generated people: it agrees with their labels, and repeating a word gains nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.records.sources import personas
from prb_jax.records.sources.personas.satisfaction import FULL
from prb_jax.scoring.baselines import PERSONA_TRUTH, score_baseline


@pytest.mark.parametrize("part", ["test-seen", "test-unseen", "test-unseen-wording", "train-more-wording"])
def test_it_orders_the_labelled_responses_as_one_who_knows_the_tastes(part: str) -> None:
    benchmark = personas.generate()
    records = benchmark.parts[part]
    people = {person.id: person for person in benchmark.people}
    scores = np.array(score_baseline(PERSONA_TRUTH, records))
    right = scores[:, 0] > scores[:, 1]
    assert np.mean(right) == pytest.approx(benchmark.ceilings[part].persona_aware, abs=0.01)
    # wrong almost nowhere but at the slips
    aware = np.array([people[str(c.user_id)].leaning(benchmark.levels[c.id]) > 0 for c in records])
    assert np.mean(right == aware) > 0.99


def test_levels_are_those_of_the_design() -> None:
    benchmark = personas.generate()
    for comparison in benchmark.parts["test"][::10]:
        wanted = benchmark.levels[comparison.id]
        shown = personas.shown_levels(comparison.responses[0])
        assert all(level * measured > 0 for level, measured in zip(wanted, shown, strict=True) if level)


def test_a_text_is_worth_no_more_when_it_says_a_thing_again() -> None:
    comparison = personas.load("test-seen")[0]
    user, text = str(comparison.user_id), comparison.responses[0]
    once, twice = (personas.satisfaction(user, said) for said in (text, f"{text} {text}"))
    assert twice == pytest.approx(once, abs=1 / FULL / 4)
    for other in {str(comparison.user_id) for comparison in personas.load("test")}:
        assert abs(personas.satisfaction(other, text)) <= 1.0
        assert personas.satisfaction(other, "") == personas.satisfaction(other, "Of the and.") == 0.0


def test_people_who_disagree_are_pleased_by_opposite_texts() -> None:
    assert personas.shown_levels("Trust your feel for it: go when your instinct says so.")[3] < -0.5
    people = personas.generate().people
    first, second = (next(p for p in people if p.tastes[3] == taste).id for taste in (1, -1))
    text = "Trust your feel, your gut feeling and your instinct."
    assert personas.satisfaction(first, text) < 0 < personas.satisfaction(second, text)


def test_as_a_model_it_is_an_upper_bound_that_no_table_mixes_in(tmp_path: Path) -> None:
    some = personas.load("test-seen")[:6]
    for name in ("baseline:length", PERSONA_TRUTH):
        prb.evaluate(name, some, out=tmp_path / name.partition(":")[2], progress=False)
    assert [row["model"] for row in prb.leaderboard(tmp_path)] == ["baseline:length"]
    bounds = prb.leaderboard(tmp_path, upper_bounds=True)
    expected = {"baseline:length": False, PERSONA_TRUTH: True}
    assert {row["model"]: row["upper_bound"] for row in bounds} == expected
    runs = [tmp_path / name for name in ("length", "persona-truth")]
    with pytest.raises(prb.RunError, match=r"persona-truth: is an upper bound, .*; remove it"):
        prb.correlate(runs, runs)


def test_who_is_no_generated_person_is_one_error() -> None:
    with pytest.raises(DataError, match=r"no person 'ana'; expected persona-01 to persona-60"):
        personas.satisfaction("ana", "Hello.")
    nobody = Comparison(id="7", question="?", responses=["a", "b"])
    with pytest.raises(DataError, match=r"comparison '7': baseline:persona-truth knows .* generated people"):
        score_baseline(PERSONA_TRUTH, [nobody])
