"""The simulated ceiling of a study, and the plan of how many people one needs."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot.bayes import METHOD, NUMBERS, BayesSettings
from prb_jax.personal.few_shot.choices import Posts
from prb_jax.personal.few_shot.protocol import Fitted
from prb_jax.personal.few_shot.registry import read_settings
from prb_jax.personal.few_shot.stacked import StackedSettings
from prb_jax.personal.few_shot.taste_posterior import pooled_margins
from prb_jax.personal.few_shot.taste_prior import judgements_of
from prb_jax.personal.saved import read_fitted
from prb_jax.reports.planning import render_plan, render_questions
from prb_jax.reports.study import render_study
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.study.ask import known_of_person
from prb_jax.study.draws import draw_choices, prior_sampler
from prb_jax.study.outcomes import make_part
from prb_jax.study.personalise import Study, personalise
from prb_jax.study.population import read_population
from prb_jax.study.results import held_ceilings, reached_ceilings
from prb_jax.study.simulation import ceiling, expected_wins, people_needed, plan_study, power_of
from prb_jax.study.splits import make_splits
from prb_jax.study.write_features import write_features
from tests.personal.few_shot.planted import choices_of, sigmoid, world
from tests.records.benchmarks.people_layouts import STUDIES, WRITERS, features_of
from tests.reports.conftest import printed
from tests.study.people import QUICK, WIDTH, PlantedFeatures, planted_people

FEW = BayesSettings(l2=(1e-3,), item_precision=(1.0,), rank=(2,), scale=(1.0,), spread=(1.0,), directions=4)


def prior(*, size: float) -> Fitted:
    """A common taste and two directions in which people differ."""
    basis = np.zeros((WIDTH, 4), np.float32)
    basis[0, 0] = basis[1, 1] = size
    arrays = {"direction": np.full(WIDTH, 0.3, np.float32), "basis": basis, "items": np.zeros(1, np.float32)}
    return Fitted(arrays, {"isotropic": np.float32(0), "typical": np.float32(0)}, FEW)


PEOPLE = planted_people(PlantedFeatures(), users=60)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ceiling")
    write_features(PlantedFeatures(), PEOPLE, out=out / "features", progress=False)
    return out


def test_the_ceiling_is_the_accuracy_of_one_who_knows_the_prior_or_the_person(work: Path) -> None:
    population = read_population(PEOPLE, open_features(work / "features"))
    part = make_part(population.choices, make_splits(population, by="user", seeds=1)[0])
    rng = np.random.default_rng(0)
    drawn, margins = draw_choices(prior(size=2.0), population.choices, rng=rng)
    # Chosen with the probability that the true margin says.
    assert abs(np.mean(margins > 0) - np.mean(1 / (1 + np.exp(-np.abs(margins))))) < 0.04
    turned = drawn.chosen != population.choices.chosen
    assert (drawn.rejected[turned] == population.choices.chosen[turned]).all()
    unseen = [row for row in ceiling(prior(size=2.0), part, shots=(0, 2, 8)) if row["split"] == "unseen"]
    accuracy, loss = (
        {(row["known"], row["shots"]): row[name] for row in unseen} for name in ("accuracy", "log_loss")
    )
    order = [accuracy[key] for key in (("no user", 0), ("", 2), ("", 8), ("person known", 8))]
    assert order == sorted(order)
    assert order[0] + 0.1 < order[2]
    assert accuracy["", 0] == accuracy["no user", 0]
    assert loss["person known", 8] < loss["", 8] < loss["", 0]
    # By an independent simulation of the person who is wholly known.
    asked = part.queries.places[part.queries.mask]
    deltas = population.choices.deltas[asked].astype(np.float64)
    tastes = 0.3 + 2.0 * rng.standard_normal((400, len(asked), WIDTH)) * ([1, 1] + [0] * (WIDTH - 2))
    sizes = np.abs(np.einsum("rnd,nd->rn", tastes, deltas))
    assert accuracy["person known", 8] == pytest.approx(np.mean(1 / (1 + np.exp(-sizes))), abs=0.02)
    nothing = ceiling(prior(size=0.0), part, shots=(2,))
    assert len({round(row["accuracy"], 6) for row in nothing if row["split"] == "unseen"}) == 1


@pytest.mark.parametrize(("gain", "power"), [(0.02, 0.5), (0.04, 0.975), (0.0, 0.025)])
def test_power_is_the_chance_that_the_interval_lies_above_zero(gain: float, power: float) -> None:
    rows = [
        {"n": 9, "expected": gain, "diff_to_pooled_ci95": [gain - half, gain + half]} for half in (0.01, 0.03)
    ]
    assert power_of(rows)["power"] == pytest.approx(power, abs=1e-4)
    assert power_of(rows[:1])["power_error"] is None
    assert power_of([{"n": 9, "diff_to_pooled_ci95": None}])["power"] is None


def test_the_error_of_a_power_is_that_of_simulated_studies() -> None:
    rng = np.random.default_rng(0)

    def plan() -> dict[str, Any]:
        gains, halves = 0.02 + 0.003 * rng.standard_normal(6), 0.02 + 0.001 * rng.standard_normal(6)
        return power_of(
            [{"n": 9, "expected": g, "diff_to_pooled_ci95": [0, 2 * h]} for g, h in zip(gains, halves)]
        )

    plans = [plan() for _ in range(400)]
    for name in ("gain", "power"):
        spread = np.std([one[name] for one in plans])
        assert np.sqrt(np.mean([one[f"{name}_error"] ** 2 for one in plans])) == pytest.approx(
            spread, rel=0.12
        )


def test_expected_wins_are_those_of_drawn_outcomes() -> None:
    rng = np.random.default_rng(1)
    truth, margins = rng.normal(size=50), np.round(rng.normal(size=50))
    expected = expected_wins(margins, truth)
    drawn = np.where(rng.random((20_000, 50)) < 1 / (1 + np.exp(-truth)), 1, -1)
    assert expected == pytest.approx((drawn * margins > 0).mean(0), abs=0.02)


@pytest.fixture(scope="module")
def study(work: Path) -> Study:
    return personalise(
        PEOPLE, backbone=work / "features", out=work / "study", methods=["bayes"], shots=(0, 4),
        settings={"bayes": FEW, **read_settings(QUICK)}, progress=False,
    )  # fmt: skip


def test_bayes_is_used_like_any_method_and_says_how_much_is_known_of_a_person(study: Study) -> None:
    model = PersonalisedModel(read_fitted(study.out / "fitted" / "bayes"), PlantedFeatures())
    unseen = json.loads((study.out / "splits.json").read_text())["splits"][0]["unseen"]
    of_user = [one for one in PEOPLE if one.user_id == unseen[0]]
    pool = [{"id": one.id, "question": "?", "responses": [*one.responses]} for one in of_user[8:]]
    unknown, known = (prb.ask(model, user=user, candidates=pool) for user in (None, of_user[:8]))
    assert known_of_person(unknown) == pytest.approx(0, abs=1e-9)
    assert [one.probability for one in unknown] == pytest.approx([one.of_anybody for one in unknown])
    assert [one.of_anybody for one in known] != pytest.approx([one.probability for one in known], abs=0.01)
    assert known_of_person(known) > 0.01
    assert unknown[0].information > known[0].information > 0
    assert "not enough is known of this person" in printed(render_questions(unknown, top=3))
    texts = {one.id: one.responses for one in of_user}
    table = render_questions(unknown, top=3)
    for row, one in zip(table.rows, unknown):
        first, second = texts[one.id]
        assert row[0].splitlines()[1:] == [f"1: {first}", f"2: {second}"]
    assert max(map(len, printed(table, width=80).splitlines())) <= 80
    told = "not enough is known" in printed(render_questions(known, top=3))
    assert told == (known_of_person(known) < known[0].information)
    before = model.score(of_user[8], user="new")
    model.adapt("new", [one.to_row() | {"user_id": None} for one in of_user[:8]])
    assert not np.allclose(model.score(of_user[8], user="new"), before, atol=1e-3)
    asked = [one for one in PEOPLE if one.user_id in unseen]
    figures = prb.evaluate(model, asked, progress=False).summary
    nobody = next(row for row in study.results if row["method"] == "bayes, no user")
    assert figures["accuracy"] > nobody["accuracy"]


def test_how_many_people_a_gain_takes() -> None:
    rows = [
        {"people": people, "choices": 3 * people, "ci95_half": 0.5 / people**0.5} for people in (50, 100, 400)
    ]
    needed = people_needed([*rows, {"people": 20, "choices": 60, "ci95_half": None}])
    # Two-sided at 0.05 with power 0.8, for a standard error of 0.5 / 1.96 / sqrt(people).
    people = (0.5 / 1.96 * (norm.ppf(0.975) + norm.ppf(0.8)) / 0.01) ** 2
    assert needed["people"] == pytest.approx(people, rel=1e-3)
    assert needed["choices"] == pytest.approx(3 * people, rel=1e-3)
    half = 0.5 / needed["people"] ** 0.5
    row = {"n": 9, "expected": 0.01, "diff_to_pooled_ci95": [0.01 - half, 0.01 + half]}
    assert power_of([row])["power"] == pytest.approx(0.8, abs=1e-3)
    assert people_needed(rows[:0])["people"] is None


def test_a_prior_is_drawn_from_the_posterior_of_a_dense_float64_solve() -> None:
    """The covariance of the mean taste and the effects of texts is the inverse of their Hessian."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(12, 4)).astype(np.float32)
    one, other = np.array([rng.choice(12, 2, replace=False) for _ in range(150)]).T
    data = choices_of(features, one, other, users=np.arange(150, dtype=np.int32) % 15)
    count = int(np.max(data.texts)) + 1
    arrays = {
        "direction": 0.1 * rng.standard_normal(data.deltas.shape[1]).astype(np.float32),
        "items": 0.1 * rng.standard_normal(count).astype(np.float32),
        "basis": 0.3 * rng.standard_normal((data.deltas.shape[1], 2)).astype(np.float32),
    }
    numbers = dict.fromkeys(NUMBERS, np.float32(0)) | {
        "l2": np.float32(0.01),
        "item_precision": np.float32(2),
        "slope": np.float32(1),
    }
    prior = Fitted(arrays, numbers, BayesSettings())
    hot = np.zeros((len(data), count + 1))
    np.add.at(hot, (np.arange(len(data)), data.texts[:, 0]), 1)
    np.add.at(hot, (np.arange(len(data)), data.texts[:, 1]), -1)
    rows = np.concatenate([data.deltas, hot], axis=1)
    shrink = 1 / np.sqrt(1 + np.pi / 8 * ((data.deltas @ arrays["basis"]) ** 2).sum(1))
    margins = shrink * (rows @ np.concatenate([arrays["direction"], arrays["items"], [0]]))
    weights = shrink**2 * sigmoid(margins) * (1 - sigmoid(margins))
    width = data.deltas.shape[1]
    penalty = np.diag(np.repeat([0.01 * len(data), 2.0], [width, count + 1]))
    expected = np.linalg.inv((rows * weights[:, None]).T @ rows + penalty)
    draw = prior_sampler(prior, data)
    draws = [draw(rng) for _ in range(1500)]
    moved = np.array(
        [
            np.concatenate([one.arrays["direction"], one.arrays["items"], [one.numbers["typical"]]])
            for one in draws
        ]
    ) - np.concatenate([arrays["direction"], arrays["items"], [0]])
    found = moved.T @ moved / len(moved)
    assert np.diag(found) == pytest.approx(np.diag(expected), rel=0.2)  # 5 standard errors
    assert np.abs(found - expected).max() < 0.2 * np.diag(expected).max()
    assert {one.numbers["slope"] for one in draws} == {1.0}


def test_a_drawn_prior_has_margins_times_the_slope_of_the_estimated_one() -> None:
    rng, kinds = np.random.default_rng(3), {"word_gain": 2.0, "vote_gain": 0.5}
    features = rng.normal(size=(30, WIDTH)).astype(np.float32)
    posts = Posts(
        rng.normal(size=(6, 2, WIDTH)).astype(np.float32),
        np.ones((6, 2), bool),
        np.tile(np.array([0, 1], np.float32), (6, 1)),
        np.tile(np.array([-1, 4], np.int32), (6, 1)),
    )
    users = np.repeat(np.arange(6, dtype=np.int32), 5)
    data = choices_of(features, *rng.permutation(60).reshape(2, 30) % 30, users=users, posts=posts)
    data = replace(data, items=np.arange(30, dtype=np.int32))
    means = {
        name: rng.normal(size=WIDTH).astype(np.float32) for name in ("post_mean", "word_mean", "vote_mean")
    }
    arrays = means | {
        "direction": rng.normal(size=WIDTH).astype(np.float32),
        "items": rng.normal(size=30).astype(np.float32),
        "basis": rng.normal(size=(WIDTH, 2)).astype(np.float32),
        "texts": rng.normal(size=(30, 3)).astype(np.float32),
        "profile": rng.normal(size=(WIDTH, 2)).astype(np.float32),
        "moment": np.eye(WIDTH, dtype=np.float32),
    }
    numbers = dict.fromkeys(NUMBERS, np.float32(0)) | {
        "isotropic": np.float32(0.3),
        "typical": np.float32(0.2),
    }
    numbers |= {name: np.float32(value) for name, value in kinds.items()}

    def margins(slope: float) -> np.ndarray:
        prior = Fitted(arrays, numbers | {"slope": np.float32(slope)}, FEW)
        made, truth = draw_choices(prior_sampler(prior, data)(rng), data, rng=np.random.default_rng(4))
        return np.where(made.chosen == data.chosen, truth, -truth)

    np.testing.assert_allclose(margins(1.7), 1.7 * margins(1.0), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_a_ceiling_is_not_below_what_is_observed_where_a_penalty_is_too_strong(spread: float) -> None:
    """Texts that many people judge differ by an effect with this standard deviation; the only precision that is tried
    allows 1."""
    rng = np.random.default_rng(0)
    features, users = rng.normal(size=(200, 12)).astype(np.float32), 330
    rewards = features @ (0.2 * rng.normal(size=12)) + spread * rng.normal(size=200)
    items = np.arange(200, dtype=np.int32)
    made = world(
        features,
        np.tile(rewards, (users, 1)),
        seen=200,
        validation=60,
        choices=8,
        new_choices=16,
        items=items,
    )
    settings = replace(FEW, spread=(0.3,), text_rank=(4,), text_scale=(1.0,), basis_l2=(1.0,))
    fitted = METHOD.fit(made.seen, made.validation, settings=settings, key=jax.random.key(0))
    asked, truth = judgements_of(made.new, votes=False), made.query_margins()
    places = made.queries.places[made.queries.mask]
    ours = pooled_margins(fitted, asked)[places]
    observed = np.where(ours > 0, sigmoid(truth), sigmoid(-truth)).mean()
    draw = prior_sampler(fitted, made.seen)
    drawn = [pooled_margins(draw(rng), asked)[places] for _ in range(8)]
    found = np.mean([sigmoid(np.abs(margins)) for margins in drawn])
    assert observed < found < sigmoid(np.abs(truth)).mean() + 0.005


class WordedFeatures(PlantedFeatures):
    """Features of the responses of a layout, and zeros for other texts."""

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        return np.stack([features_of(text) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_plan_on_each_data_set_of_people(tmp_path: Path, name: str) -> None:
    source = f"{name}:{WRITERS[name](tmp_path / 'data', **STUDIES[name])}"
    write_features(WordedFeatures(), source, out=tmp_path / "features", progress=False)
    plan = plan_study(
        source, backbone=tmp_path / "features", out=tmp_path / "plan", people=(40,), shots=4, repeats=1,
        settings=FEW, progress=False,
    )  # fmt: skip
    text = printed(render_plan(plan))
    if plan["needed"]["people"] is None:
        assert {row["ci95_half"] for row in plan["rows"]} == {None}
        assert "a gain of 0.01 cannot be planned for" in text
    else:
        assert plan["needed"]["people"] > 40
        assert "a gain of 0.01 is found in 80% of studies of" in " ".join(text.split())


def test_ceilings_are_shown_for_shots_that_somebody_reaches() -> None:
    simulated = [("ceiling, no user", 0), ("ceiling", 4), ("ceiling", 16), ("ceiling, person known", 16)]
    rows = [{"method": name, "shots": shots} for name, shots in simulated]
    shown = [(row["method"], row["shots"]) for row in reached_ceilings(rows, {0, 4})]
    assert shown == [("ceiling, no user", 0), ("ceiling", 4), ("ceiling, person known", 4)]


def test_ceilings_below_an_observed_accuracy_are_none() -> None:
    names = [("ceiling, no user", 0), ("ceiling", 0), ("ceiling", 4), ("ceiling, person known", 4)]
    figures = {"control": "simulated", "split": "unseen", "n": 9, "log_loss": 0.6, "reason": None}
    ceilings = [{"method": name, "shots": shots, "accuracy": 0.7, **figures} for name, shots in names]

    def observed(low: float, shots: int, control: str | None = None) -> dict[str, Any]:
        interval = [low, low + 0.04]
        return {
            "method": "m",
            "control": control,
            "shots": shots,
            "accuracy": low + 0.02,
            "accuracy_ci95": interval,
        }

    below = [observed(0.69, 0), observed(0.69, 4), observed(0.8, 2), observed(0.8, 4, "no profile")]
    assert held_ceilings(ceilings, [*below, observed(0.5, 4) | {"accuracy_ci95": None}]) == ceilings
    shown = held_ceilings(ceilings, [*below, observed(0.71, 4), observed(0.72, 0)])
    assert [(row["method"], row["shots"]) for row in shown] == names
    assert {(row["accuracy"], row["log_loss"], row["n"]) for row in shown} == {(None, None, 9)}
    (reason,) = {row["reason"] for row in shown}
    assert reason.startswith("m has 0.740 [0.720, 0.760] with k = 0, above the simulated 0.700: ")


def test_a_study_of_people_above_the_ceiling_says_so_and_shows_none(study: Study) -> None:
    plain = [row for row in study.results if row["control"] is None and row["split"] == "unseen"]
    low = dict.fromkeys(plain[0]) | {
        "method": "ceiling",
        "control": "simulated",
        "split": "unseen",
        "shots": 4,
    }
    for accuracy, shows in ((0.99, True), (0.01, False)):
        (row,) = held_ceilings([low | {"accuracy": accuracy}], plain)
        without = {} if shows else {"unseen": row["reason"]}
        summary = study.summary | {"without_ceiling": without}
        shown = printed(render_study([*plain, row], summary, title="x"))
        assert ("ceiling (simulated)" in shown) == shows
        assert ("no ceiling of unseen people: " in shown) == (not shows)
    lacking = {
        row["split"] for row in study.results if row["control"] == "simulated" and row["accuracy"] is None
    }
    assert set(study.summary["without_ceiling"]) == lacking


@pytest.mark.slow
def test_a_study_shows_the_ceiling_and_a_plan_says_how_many_people_it_takes(work: Path) -> None:
    people = planted_people(PlantedFeatures(), users=60, own=3.0, noise=1.0)
    write_features(PlantedFeatures(), people, out=work / "noisy", progress=False)
    study = personalise(
        people, backbone=work / "noisy", out=work / "noisy_study", methods=["bayes"], shots=(0, 4),
        settings={"bayes": FEW, **read_settings(QUICK)}, progress=False,
    )  # fmt: skip
    assert study.summary["without_ceiling"] == {}
    rows = {row["method"]: row for row in study.results if row["split"] == "unseen" and row["shots"] == 4}
    assert rows["ceiling"]["control"] == rows["ceiling, person known"]["control"] == "simulated"
    assert rows["ceiling"]["diff_to_no_user"] > 0.05
    assert rows["bayes"]["accuracy"] > rows["ceiling"]["accuracy"] - 0.15
    shown = printed(render_study(study.results, study.summary, title="x"))
    assert "ceiling, person known (simulated)" in shown
    plan = plan_study(
        people, backbone=work / "noisy", out=work / "plan", people=(30, 60), shots=4, repeats=1, settings=FEW,
        progress=False,
    )  # fmt: skip
    few, many = plan["rows"]
    assert (few["people"], many["people"]) == (30, 60)
    assert many["ci95_half"] < few["ci95_half"]
    assert 0 < many["power"] < 1
    assert many["gain_error"] is None  # of one study
    assert 0 < plan["ceiling"]["choices"] < plan["ceiling"]["person"]
    assert "60" in printed(render_plan(plan))
    assert plan["needed"] == people_needed(plan["rows"])
    alike = planted_people(PlantedFeatures(), users=60, own=0.0)
    write_features(PlantedFeatures(), alike, out=work / "alike", progress=False)
    with pytest.raises(DataError, match="nothing personal in these data"):
        plan_study(alike, backbone=work / "alike", out=work / "none", shots=4, settings=FEW, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "told"), [(0.3, 0.0), (0.8, 0.0), (0.2, 1.4)])
def test_the_ceiling_of_planted_people_is_not_below_what_is_observed(
    tmp_path: Path, own: float, told: float, record_property: Any
) -> None:
    """The ceiling lies at or above the best row within its error, and probabilities of `bayes` have a slope of 1.

    Tastes move margins by a standard deviation of 1.0 and 2.8; of the third kind the profile tells nearly all of them.
    """
    features = PlantedFeatures(rows=6000)
    people = planted_people(features, users=500, each=24, own=own, told=told, noise=1.0, seed=5)
    write_features(features, people, out=tmp_path / "features", progress=False)
    wide = replace(FEW, spread=(1.0, 2.0, 4.0))
    few = {"bayes": wide, "stacked": StackedSettings(**asdict(wide)), **read_settings(QUICK)}
    study = personalise(
        people, backbone=tmp_path / "features", out=tmp_path / "study", methods=["bayes", "stacked"], shots=(0, 2, 8),
        settings=few, progress=False,
    )  # fmt: skip
    unseen = [row for row in study.results if row["split"] == "unseen"]
    for shots in (0, 2, 8):
        of_shots = [row for row in unseen if row["shots"] == shots]
        ceilings = {row["method"]: row for row in of_shots if row["method"].startswith("ceiling")}
        best = max(
            (row for row in of_shots if row["control"] is None and row["method"] not in ceilings),
            key=lambda row: row["accuracy"],
        )
        error = np.ptp(best["accuracy_ci95"]) / 2
        record_property(
            f"{shots}", [ceilings["ceiling"]["accuracy"], best["method"], best["accuracy"], error]
        )
        assert ceilings["ceiling"]["accuracy"] > best["accuracy"] - error, (shots, best, ceilings)
        assert ceilings["ceiling"]["accuracy"] < best["accuracy"] + 2 * error, (shots, best, ceilings)
    with (study.out / "outcomes.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["part"] == "unseen"]
    for column in (f"{method} {shots}" for method in ("bayes", "stacked") for shots in (0, 2, 8)):
        chosen = np.array([float(line[column]) for line in lines])
        slope = minimize_scalar(
            lambda b, chosen=chosen: np.logaddexp(0, -b * chosen).mean(), bounds=(0.3, 3)
        ).x
        record_property(column, slope)
        assert 0.9 < slope < 1.1, (column, slope)
