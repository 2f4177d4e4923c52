"""Studies of planted people: figures, splits, exclusions, resumption, traps."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError, PrbWarning, RunError
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.few_shot import protocol
from prb_jax.personal.few_shot.registry import METHODS, method_named, read_settings
from prb_jax.personal.saved import read_fitted
from prb_jax.reports.planning import render_people
from prb_jax.reports.report import report
from prb_jax.reports.study import render_study
from prb_jax.reports.table import NONE, gained, percent, signed
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.study import personalise as module
from prb_jax.study.outcomes import PLAIN, SplitData, make_part, read_outcome
from prb_jax.study.personalise import PICTURE, people_of_study
from prb_jax.study.population import CONTRADICTED, IDENTICAL, NO_USER, REPEATED, Population, read_population
from prb_jax.study.splits import (
    FOLDS,
    SEEN_PART,
    SPLITS,
    UNSEEN_PART,
    check_norms,
    check_wrappers,
    make_splits,
    posts_of_split,
)
from prb_jax.study.write_features import write_features
from tests.reports.conftest import printed
from tests.study.people import QUICK, WIDTH, PlantedFeatures, PlantedRewards, choice, planted_people

FIELDS = {
    "method", "split", "shots", "n", "users", "accuracy", "accuracy_ci95", "user_accuracy", "user_accuracy_ci95",
    "diff_to_pooled", "diff_to_pooled_ci95", "p_holm", "seconds_fit", "seconds_adapt_per_user", "bytes_per_user",
    "disk_bytes_per_user",
}  # fmt: skip


SOURCE = PlantedFeatures()
PEOPLE = planted_people(SOURCE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "store"
    write_features(SOURCE, PEOPLE, out=out, progress=False)
    return out


@pytest.fixture(scope="module")
def population(store: Path) -> Population:
    return population_of(PEOPLE, store.parent)


@pytest.fixture(scope="module")
def study(store: Path) -> prb.Study:
    return run(PEOPLE, store, store.parent / "run", methods=["pooled", "offset"])


def run(people: list[prb.Comparison], store: Path, out: Path, **options: Any) -> prb.Study:
    given = {"split": "other-question", "shots": (0, 8), "settings": read_settings(QUICK)} | options
    return prb.personalise(people, backbone=store, out=out, progress=False, **given)


def population_of(people: list[prb.Comparison], folder: Path) -> Population:
    """What is read of people whose features are written to ``folder/store``."""
    return read_population(people, write_features(SOURCE, people, out=folder / "store", progress=False))


def asked_and_known(part: SplitData) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each person and fold the choices to be predicted, and those that it is adapted on."""
    for row in range(len(part.queries.users)):
        yield tuple(rows.places[row][rows.mask[row]] for rows in (part.queries, part.contexts))  # pyright: ignore[reportReturnType]


def row_of(study: prb.Study, method: str, shots: int, split: str = "unseen") -> dict[str, Any]:
    wanted = (method, shots, split)
    (row,) = (row for row in study.results if (row["method"], row["shots"], row["split"]) == wanted)
    return row


def test_the_offset_learns_planted_tastes_and_another_persons_state_loses_them(study: prb.Study) -> None:
    for split in ("unseen", "seen"):
        pooled, offset = row_of(study, "pooled", 8, split), row_of(study, "offset", 8, split)
        shuffled = row_of(study, "offset, shuffled user", 8, split)
        assert pooled["accuracy"] < 0.7
        assert offset["accuracy"] > pooled["accuracy"] + 0.1
        assert offset["diff_to_pooled_ci95"][0] > 0
        assert offset["p"] < 0.03
        assert offset["p"] < offset["p_holm"] < 0.1
        assert shuffled["accuracy"] < offset["accuracy"] - 0.1
        assert row_of(study, "offset, no user", 0, split)["accuracy"] < 0.7
        assert offset["log_loss"] < pooled["log_loss"] - 0.1
        assert offset["log_loss_diff_to_pooled_ci95"][1] < 0
        assert offset["diff_to_no_user"] > 0.1
    assert row_of(study, "offset", 8).keys() >= FIELDS
    assert study.results == json.loads((study.out / "results.json").read_text())
    assert study.summary["not_above_offset"] == []
    spread = read_fitted(study.out / "fitted" / "offset").fitted.numbers["spread"]
    assert (spread, spread.dtype) == (3, np.float32)  # though it was given as a whole number
    assert {"length", "popularity"} <= {row["method"] for row in study.results}
    assert b"<svg" in (study.out / "curves.svg").read_bytes()
    page = prb.report(study.out, out=study.out / "page.html").read_text()
    row = row_of(study, "offset", 8)
    told = f"After 8 comparisons of a new person, offset predicts {percent(row['accuracy'], row['accuracy_ci95'])} of"
    assert f'<p class="answer">{told}' in page
    assert f"{gained(row['diff_to_pooled'], row['diff_to_pooled_ci95'])} more than pooled" in page
    shown = " ".join(printed(render_study(study.results, study.summary, title="people")).split())
    assert told in shown
    assert signed(row["diff_to_pooled"], row["diff_to_pooled_ci95"]) in shown
    for part in ("Controls", "offset, shuffled user", "Few-shot curves", "Time and memory of each method"):
        assert part in page
    assert row_of(study, "offset", 8)["bytes_per_user"] == 4 * WIDTH
    assert row_of(study, "offset", 8)["disk_bytes_per_user"] > 4 * WIDTH


def offset(study: prb.Study) -> PersonalisedModel:
    return PersonalisedModel(read_fitted(study.out / "fitted" / "offset"), SOURCE)


def unseen_of(study: prb.Study) -> set[str]:
    return set(json.loads((study.out / "splits.json").read_text())["splits"][0]["unseen"])


def test_the_swap_control_of_a_fitted_method_knows_another_person_whole(
    study: prb.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen, model = unseen_of(study), offset(study)
    asked = [one for one in PEOPLE if one.user_id in unseen]
    shown, score = list[Any](), PersonalisedModel._score
    monkeypatch.setattr(PersonalisedModel, "_score", lambda self, r: shown.extend(r) or score(self, r))
    summary = prb.evaluate(model, asked, controls="swap", progress=False).summary
    plain, swapped = shown[: len(asked)], shown[len(asked) :]
    owner = {one.id: one.user_id for one in PEOPLE}
    for (_, known, query), (donor, learned, again) in zip(plain, swapped, strict=True):
        assert query.id == again.id
        assert donor != owner[query.id]
        assert {one.user_id for one in learned} <= {donor}
        assert abs(len(learned) - len(known)) <= 2  # but for those that share a response with the query
    study_swap = row_of(study, "offset, shuffled user", 8)["accuracy"]
    assert summary["controls"]["swap"]["accuracy"] < min(study_swap + 0.15, summary["accuracy"] - 0.05)
    # with a history too, in which the other person judged the same pair
    first = next(one for one in asked if one.user_id != asked[0].user_id)
    crossed = [replace(one, user_id=other, id=f"{other} {one.id}") for one in asked[:3] for other in unseen]
    history = [one for one in crossed if one.user_id != asked[0].user_id] + [replace(first, id="h")]
    prb.evaluate(model, asked[:3], history=history, controls="blind", progress=False)
    others = [one for one in asked if one.user_id != asked[0].user_id and one is not first]
    prb.evaluate(model, [*asked[:3], *others], history=history, controls="swap", progress=False)


def with_posts(comparison: prb.Comparison, *texts: str) -> prb.Comparison:
    profile = [{"id": str(k), "text": text} for k, text in enumerate(texts)]
    return prb.Comparison.from_row(comparison.to_row() | {"profile": profile}, where="here")


def test_a_post_that_judges_a_response_of_the_query_is_not_shown_to_a_fitted_method(
    study: prb.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, states = list[Any](), PersonalisedModel._states
    monkeypatch.setattr(PersonalisedModel, "_states", lambda self, k: known.extend(k) or states(self, k))
    chosen = PEOPLE[0].responses[0]
    texts = [f"Agrees with: {chosen}", "Agrees with: r199", "r7 of mine", chosen]
    offset(study).score([with_posts(PEOPLE[0], *texts)])
    assert [post.text for _, posts in known for post in posts] == texts[1:3]


def test_the_controls_that_a_method_asks_for_are_shown(study: prb.Study) -> None:
    assert [name for name in METHODS if method_named(name).controls is not None] == ["vpl", "mrm"]
    summary = study.summary | {"controls": {"vpl": [{"active_units": 0.5, "accuracy_z_zero": 0.617}]}}
    shown = " ".join(printed(render_study(study.results, summary, title="people")).split())
    assert "vpl: active_units 0.5, accuracy_z_zero 0.617" in shown


def test_figures_are_those_of_the_metrics_room(study: prb.Study, population: Population) -> None:
    (split,), users = make_splits(population, by="other-question", seeds=1), population.choices.users
    rows: dict[str, list[ScoredRow]] = {}
    for name in ("pooled", "offset"):
        outcome = read_outcome(study.out / "outcomes" / f"{name}-0.npz")
        margins = dict(zip(outcome.places.tolist(), outcome.margins[PLAIN, 8].tolist(), strict=True))
        asked = [place for place in sorted(margins) if split.part[users[place]] == UNSEEN_PART]
        rows[name] = [
            ScoredRow(str(place), None, population.users[users[place]], [margins[place], 0], [1, 0])
            for place in asked
        ]
    clusters = population.clusters.take(asked)
    expected = paired_difference(rows["offset"], rows["pooled"], clusters=clusters)
    row = row_of(study, "offset", 8)
    assert row["n"] == len(asked)
    assert row["diff_to_pooled"] == pytest.approx(expected["difference"])
    assert row["diff_to_pooled_ci95"] == pytest.approx(expected["ci95"])


def test_outcomes_are_a_table_that_joins_by_the_ids_of_comparisons(study: prb.Study) -> None:
    with (study.out / "outcomes.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    by_id = {one.id: one for one in PEOPLE}
    assert all(by_id[line["id"]].user_id == line["user"] for line in lines)
    for row in study.results:
        if row["control"] is None and row["accuracy"] is not None:
            of_part = [line for line in lines if line["part"] == row["split"]]
            margins = np.array([float(line[f"{row['method']} {row['shots']}"]) for line in of_part])
            assert (len(margins), np.mean(margins > 0)) == (row["n"], pytest.approx(row["accuracy"]))
            half = np.mean(0.5 + np.sign(margins) / 2)
            assert row["half_credit_accuracy"] == pytest.approx(half)


def test_a_study_that_was_stopped_goes_on_and_another_one_is_refused(
    study: prb.Study, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fit, fitted = tmp_path / "run", module.fit_method, list[str]()

    def fit_method(method: Any, *arguments: Any, **options: Any) -> Any:
        if method.name == stop_at:
            raise KeyboardInterrupt
        fitted.append(method.name)
        return fit(method, *arguments, **options)

    monkeypatch.setattr(module, "fit_method", fit_method)
    stop_at = "offset"
    with pytest.raises(KeyboardInterrupt):
        run(PEOPLE, store, out, methods=["pooled", "offset"])
    assert not (out / "results.json").exists()
    stop_at = ""
    again = run(PEOPLE, store, out, methods=["pooled", "offset"])
    assert fitted == ["pooled", "offset"]
    timed = dict.fromkeys(("seconds_fit", "seconds_adapt_per_user", "disk_bytes_per_user"))
    assert [row | timed for row in again.results] == [row | timed for row in study.results]
    shutil.copy(
        out / "outcomes" / "offset-0.npz", out / "outcomes" / "individual-0.npz"
    )  # of an earlier call
    more = run(PEOPLE, store, out, methods=["pooled"])
    assert {"pooled", "offset", "individual"} <= {row["method"] for row in more.results}
    with pytest.raises(RunError, match="seeds: 1 -> 3"):
        run(PEOPLE, store, out, methods=["pooled"], seeds=3)


def test_without_matplotlib_a_study_has_its_figures(
    study: prb.Study, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = Path(shutil.copytree(study.out, tmp_path / "run"))
    for name in ("results.json", PICTURE):
        (out / name).unlink()
    message = (
        f"left out: {PICTURE}: needs matplotlib, which is not installed: pip install 'prb-jax\\[report\\]'"
    )
    with pytest.warns(prb.PrbWarning, match=message):
        again = run(PEOPLE, store, out, methods=["pooled", "offset"])
    assert again.results == study.results
    assert (out / "results.json").exists()
    assert not (out / PICTURE).exists()
    text = report(out, out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Few-shot curves: Accuracy on people" in text
    assert "Every method, number of shots and control" in text


@pytest.mark.parametrize("by", list(SPLITS))
def test_nobody_and_no_question_is_on_two_sides(population: Population, by: str) -> None:
    choices, unseen = population.choices, []
    for split in make_splits(population, by=by, seeds=3):
        saved = split.to_json(population)
        named = [user for name in ("seen", "validation", "unseen") for user in saved[name]]
        assert sorted(named) == sorted(population.users)  # each person in one part
        unseen += saved["unseen"]
        users = choices.users
        assert not (split.trained & split.queries).any()
        assert (split.part[users[split.trained]] == 0).all()
        asked = split.queries & (split.part[users] == UNSEEN_PART)
        assert set(users[asked]) == set(np.flatnonzero(split.part == UNSEEN_PART))
        if by == "user+question":
            fitted = split.trained | split.validated
            assert not set(choices.questions[fitted]) & set(choices.questions[asked])
        part = make_part(choices, split)
        pairs, texts = list(asked_and_known(part)), choices.texts
        for query, context in pairs:
            assert not set(query) & set(context)
            if by != "user" and split.part[choices.users[query[0]]] == UNSEEN_PART:
                assert not set(choices.questions[query]) & set(choices.questions[context])
            assert not {*texts[query].flat} & {*texts[context].flat}
        if by == "user":  # each choice of an unseen person is predicted, from about two thirds of the others
            assert (asked == (split.part[users] == UNSEEN_PART)).all()
            assert len(part.queries.users) > len(np.unique(part.queries.users)) * (1 + FOLDS) / 2 - 20
            same = [
                set(choices.questions[query]) & set(choices.questions[context]) for query, context in pairs
            ]
            assert sum(map(bool, same)) > len(same) / 2
    assert len(unseen) == len(set(unseen))


def test_choices_that_say_nothing_are_counted(tmp_path: Path) -> None:
    people = planted_people(SOURCE, users=9, each=6)
    a, b = people[0].responses
    more = [
        choice("x1", "user 0", a, b, people[0].question),
        choice("x2", "user 0", "r1", "r1", "Question 0?"),
        choice("x3", "user 3", "r1", "r2", "Question 0?"),
        choice("x4", "user 3", "r2", "r1", "Question 0?"),
        choice("x5", None, "r2", "r3 of nobody", "Question of nobody?"),
        choice("x6", "lone", "r2", "r1", "Question 1?"),
    ]
    data = people + more
    population = population_of(data, tmp_path)
    assert population.excluded == {NO_USER: 1, IDENTICAL: 1, REPEATED: 1, CONTRADICTED: 2}
    assert len(population.choices) == len(people) + 1
    # `trainable` makes a comparison of every row, also of one that nobody's choices have
    assert all(population.texts)
    assert all(population.prompts)
    study = run(data, tmp_path / "store", tmp_path / "run", methods=["pooled"], seeds=2, split="user")
    # Programs of many splits would exhaust the memory maps of a process.
    assert protocol._adapt._cache_size() == 0  # pyright: ignore[reportFunctionMemberAccess, reportPrivateUsage]
    assert study.summary["users_with_one_choice"] == 1
    assert row_of(study, "pooled", 8)["users"] == sum(study.summary["users_in_splits"]["unseen"])
    nobody, everybody = row_of(study, "pooled", 8), row_of(study, "pooled", 0)
    assert (nobody["short"], nobody["reached"]) == (nobody["users"], 0)  # of six, two are predicted from four
    expected = f"none of {nobody['users']} people has 8 comparisons to be adapted on (most: 4)"
    assert nobody["reason"] == expected
    undefined = ("accuracy", "ties", "diff_to_offset", "p", "p_holm", "above_offset")
    assert {nobody[name] for name in undefined} == {None}
    assert everybody["reached"] == everybody["users"]
    assert everybody["accuracy"] is not None
    shown = printed(render_study(study.results, study.summary, title="people"))
    assert re.search(rf"people who have k +{everybody['users']} +0 ", shown)
    assert re.search(rf"pooled +\d\.\d{{3}} +{NONE}", shown)
    page = prb.report(study.out, out=study.out / "page.html").read_text()
    assert "below: people who have so many" in page
    counts = people_of_study(data, seeds=2)
    assert len(counts["unseen"]) == everybody["users"]
    assert max(counts["unseen"]) == 4
    shown = printed(render_people(counts, (0, 8)))
    assert re.search(rf"unseen +{everybody['users']} +{everybody['users']} +0 ", shown)
    with pytest.raises(DataError, match="no comparison names a user"):
        population_of([more[4]], tmp_path / "nobody")


def test_wrapping_that_tells_the_label_fails_the_run(tmp_path: Path) -> None:
    listed = [
        choice(one.id, str(one.user_id), one.responses[0], f"{one.responses[1]} ']", one.question)
        for one in PEOPLE
    ]
    write_features(SOURCE, listed, out=tmp_path / "store", progress=False)

    def relaxed(*checks: str) -> prb.Study:
        return run(listed, tmp_path / "store", tmp_path / "run", methods=["pooled"], relax=checks)

    with pytest.raises(RunError, match="a list bracket at the end alone marks the rejected ones"):
        relaxed()
    assert not (tmp_path / "run" / "results.json").exists()
    study = relaxed("wrapper")
    shown = printed(render_study(study.results, study.summary, title="people"))
    assert "relaxed: the wrapping of the responses alone tells the labels with an accuracy of 1.000" in shown
    with pytest.raises(RunError, match="relax: expected wrapper, found 'norms'"):
        relaxed("norms")


def test_texts_that_are_quotations_and_happen_to_be_liked_are_no_wrapping(tmp_path: Path) -> None:
    """Texts that end in a quotation mark are better, and more often so than by chance; but each also loses."""
    rng, people = np.random.default_rng(3), []
    quality = rng.standard_normal(190)
    quoted = quality + 1.5 * rng.standard_normal(190) > 0.5
    for user in range(150):
        for number in range(12):
            one, other = rng.choice(190, 2, replace=False)
            if quality[one] - quality[other] + rng.logistic() < 0:
                one, other = other, one
            texts = [f'r{text} "said"' if quoted[text] else f"r{text}" for text in (one, other)]
            people.append(choice(f"{user}-{number}", f"u{user}", *texts))
    population = population_of(people, tmp_path)
    split = make_splits(population, by="user", seeds=1)[0]
    with pytest.warns(
        PrbWarning, match="a quotation mark at the end goes with the choices .* both win and lose"
    ):
        check = check_wrappers(population, split)
    assert check["wrapper"] == "a quotation mark at the end"
    assert check["wrapper_accuracy"] > 0.55
    assert 0.03 <= check["wrapper_detectable"] <= 0.5
    assert check["wrapper_both_ways"] > 0.8
    assert 0.5 <= check["wrapper_chance"] < 0.52
    assert check_wrappers(population, split, relaxed=True) == check


def test_a_wrapper_of_some_labels_is_found_in_texts_that_people_judge_again_and_again(tmp_path: Path) -> None:
    """One of six chosen answers was written as a list: a text has its bracket only where it won."""
    rng, people = np.random.default_rng(2), []
    for user in range(60):
        for number in range(10):
            texts = [f"r{text}" for text in rng.choice(150, 2, replace=False)]
            if rng.random() < 1 / 6:
                texts[0] += " ']"
            people.append(choice(f"{user}-{number}", f"u{user}", *texts))
    population = population_of(people, tmp_path)
    split = make_splits(population, by="user", seeds=1)[0]
    with pytest.raises(
        RunError, match=r"a list bracket at the end alone marks the preferred ones.*chance: 0\.5"
    ):
        check_wrappers(population, split)
    check = check_wrappers(population, split, relaxed=True)
    assert check["wrapper_both_ways"] == 0


def test_features_that_were_made_in_two_ways_fail_the_run(population: Population) -> None:
    split = make_splits(population, by="user", seeds=1)[0]
    features = np.array(population.choices.features)
    assert check_wrappers(population, split) == {"wrapper_accuracy": 0.5, "wrapper_detectable": None}
    assert check_norms(population, split, features) == pytest.approx(1, abs=0.1)
    unseen = split.part[population.choices.users] == UNSEEN_PART
    features[population.choices.chosen[unseen]] *= 9
    with pytest.raises(RunError, match="times as long as those of seen people"):
        check_norms(population, split, features)


def test_a_post_that_judges_an_own_candidate_is_taken_away(tmp_path: Path) -> None:
    people = planted_people(SOURCE, users=9, each=6)
    told = [with_posts(one, f"Agrees with: {one.responses[0]}") for one in people]
    population = population_of(told, tmp_path)
    split = make_splits(population, by="user", seeds=1)[0]
    posts, removed = posts_of_split(population, split)
    assert posts is not None
    assert removed == 9
    assert not posts.mask.any()


def test_a_choice_that_shares_a_response_with_a_query_is_not_learned_from(tmp_path: Path) -> None:
    liked, disliked = [[f"r{10 * user + k}" for user in range(12)] for k in (0, 1)]
    people = [
        choice(f"{user}-{k}", f"user {user}", liked[user], f"r{120 + 5 * user + k}")
        for user in range(12)
        for k in range(5)
    ] + [choice(f"{user}-own", f"user {user}", f"r{180 + user}", disliked[user]) for user in range(12)]
    population = population_of(people, tmp_path)
    texts, splits = population.choices.texts, make_splits(population, by="user", seeds=2)
    for split in (*splits, *make_splits(population, by="other-question", seeds=2)):
        for query, context in asked_and_known(make_part(population.choices, split)):
            assert not {*texts[query].flat} & {*texts[context].flat}
        assert split.leaking.any()
        assert not (split.leaking & split.trained).any()
        assert not (split.leaking & split.validated & ~split.queries).any()


def test_people_whose_choices_all_share_a_response_are_fitted_on(tmp_path: Path) -> None:
    people = [
        choice(f"{user}-{k}", f"user {user}", f"r{user}", f"r{20 + 3 * user + k}", f"Question {user}?")
        for user in range(12)
        for k in range(3)
    ]
    population = population_of(people, tmp_path)
    split = make_splits(population, by="user", seeds=1)[0]
    seen = split.part[population.choices.users] == SEEN_PART
    assert (split.trained == seen).all()
    assert split.queries[~seen].any()
    assert split.leaking[~seen].any()


def test_what_cannot_be(store: Path, tmp_path: Path) -> None:
    one_of = "split: expected one of user, other-question, user.question; found 'question'"
    other = "features are of another data: data.comparisons: expected '479', found '480'"
    for people, options, message in (
        (PEOPLE, {"shots": (1, 1)}, "shots: expected different numbers"),
        (PEOPLE, {"methods": ["lre"]}, "unknown method 'lre'"),
        (PEOPLE, {"split": "question"}, one_of),
        (PEOPLE, {"seeds": 0}, "seeds: expected at least 1"),
        (PEOPLE, {"settings": {"lore": 1}, "methods": ["pooled"]}, "'lore' is not among the methods"),
        (PEOPLE[:-1], {}, other),
    ):
        with pytest.raises((DataError, RunError), match=message):
            run(people, store, tmp_path / "x", **options)


def test_settings_from_the_command_line() -> None:
    settings = read_settings(["pooled.l2=0.1,1", "pref.rank=3", "pref.pull_to=mean"])
    assert settings["pooled"].l2 == (0.1, 1)
    assert (settings["pref"].rank, settings["pref"].pull_to) == (3, ("mean",))
    for text, message in (
        ("pooled", "expected METHOD.FIELD=VALUE"),
        ("pooled.step=1", "pooled has no 'step'.*did you mean steps"),
        ("pref.rank=3,4", "expected one value"),
        ("pooled.l2=-1", "expected each to be more than 0"),
    ):
        with pytest.raises(DataError, match=message):
            read_settings([text])


def test_rewards_of_the_backbone_with_and_without_the_profile(tmp_path: Path) -> None:
    people = [replace(one, subset="even" if int(one.id[-1]) % 2 == 0 else "odd") for one in PEOPLE]
    source = PlantedRewards({(one.profile[0].text, one.responses[0]) for one in people})
    write_features(
        source, people, out=tmp_path / "store", options=FeatureOptions(profile_posts=1), progress=False
    )
    few = ["lore_free.reference=head", "lore_free.bases=2", "lore_free.pull=1", "lore_free.anchor=1"]
    study = run(
        people, tmp_path / "store", tmp_path / "run", methods=["lore_free", "profile_in_context"], split="user",
        shots=(0,), settings=read_settings([*few, *QUICK]),
    )  # fmt: skip
    backbone, unseen = row_of(study, "backbone", 0), unseen_of(study)
    places = read_outcome(tmp_path / "run" / "outcomes" / "pooled-0.npz").places
    asked = [people[place] for place in places if people[place].user_id in unseen]
    scores = np.array([source.rows(one.responses) for one in asked]) @ np.arange(1, WIDTH + 1)
    assert backbone["accuracy"] == pytest.approx(np.mean(scores[:, 0] > scores[:, 1]))
    assert row_of(study, "profile_in_context", 0)["accuracy"] > max(backbone["accuracy"], 0.9)
    by_subset = json.loads((tmp_path / "run" / "subsets.json").read_text())
    assert {row["subset"] for row in by_subset} == {"even", "odd"}
    for name in ("pooled", "profile_in_context", "backbone"):
        assert sum(row["n"] for row in by_subset if row["method"] == name) == backbone["n"]
