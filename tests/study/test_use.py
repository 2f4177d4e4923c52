"""From a study to use: a fitted method with its backbone is evaluated, adapted and asked like any model."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.judges.best_of_n import best_of_n
from prb_jax.behaviour.rl.rewards import open_reward
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.errors import DataError, RunError
from prb_jax.models.checkpoints.array_folder import write_arrays
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot.choices import Context, Responses
from prb_jax.personal.history import CONTRADICTED, IDENTICAL
from prb_jax.reports.summary import render_summary
from prb_jax.scoring.personalised import PersonalisedModel
from tests.json_lines import write_lines
from tests.reports.conftest import printed
from tests.tiny_encoders import WORDS, write_encoder


def people() -> list[dict[str, Any]]:
    """Comparisons of people of whom each prefers a word of the person's own to a word of another one."""
    rng, favourites, rows = np.random.default_rng(0), ("soup", "rain", "chess", "bread"), []
    for user in range(16):
        for number in range(8):
            words = [str(word) for word in rng.choice(WORDS[:20], 4)]
            other = [word for word in words if word not in favourites] or ["the"]
            favourite = favourites[user % 4]
            rival = favourites[(user + 1 + number % 3) % 4]
            row = {"id": f"{user}-{number}", "user_id": f"user {user}", "rejected": " ".join([*other, rival])}
            row |= {"question": f"what {WORDS[number % 3]} ?", "chosen": " ".join([*other, favourite])}
            rows.append(row | {"profile": [{"id": "p", "text": f"i read {favourite}"}]})
    return rows


ROWS = people()
EARLY, LATE = ROWS[::2], ROWS[1::2]
ASKED = [prb.Comparison(**row) for row in LATE[:12]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, data, and a study."""
    folder = tmp_path_factory.mktemp("use")
    write_encoder(folder / "bert")
    for name, part in (("data", ROWS), ("early", EARLY), ("late", LATE)):
        write_lines(folder / f"{name}.jsonl", part)
    command = "personalise --data data.jsonl --backbone bert --methods offset --shots 0,4"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "80")
        patch.chdir(folder)
        command += " --split other-question --out study --no-progress"
        assert cli.main(command.split()) == 0
    (folder / "shown.txt").write_text(shown.getvalue())
    return folder


@pytest.fixture(scope="module")
def fitted(work: Path) -> Path:
    return work / "study" / "fitted" / "offset"


@pytest.fixture(scope="module")
def model(fitted: Path) -> PersonalisedModel:
    loaded: object = prb.load(fitted)
    assert isinstance(loaded, PersonalisedModel)
    return loaded


def test_the_table_fits_a_terminal_and_names_controls(work: Path) -> None:
    shown = (work / "shown.txt").read_text()
    assert max(map(len, shown.splitlines())) <= 80
    for text in ("unseen", "popularity", "the controls", "written to study", "minus pooled", "p by Holm"):
        assert text in " ".join(shown.split())


def test_scores_are_those_of_the_method_on_the_stored_features(model: PersonalisedModel, work: Path) -> None:
    store = open_features(work / "study" / "features")
    of_user = [prb.Comparison(**row) for row in ROWS[:6]]
    fitted, method, standard = model.fitted.fitted, model.fitted.method, model.fitted.standard
    pairs = np.array([store.answer_rows(one) for one in of_user])
    features = standard(store.answers.read(pairs.ravel())).reshape(*pairs.shape, -1)
    context = Context(Responses(features[:4, 0]), Responses(features[:4, 1]), np.ones(4, bool))
    state = method.adapt(fitted, context, jax.random.key(0))
    adapted = model.adapt("user 0", of_user[:4])
    for ours, theirs in zip(jax.tree.leaves(adapted), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for one, features_of_one in zip(of_user[4:], features[4:], strict=True):
        expected = method.score(fitted, state, Responses(features_of_one))
        np.testing.assert_allclose(model.score(one), expected, atol=1e-4)
        np.testing.assert_allclose(model.score([one], user="user 0")[0], expected, atol=1e-4)
    assert not np.allclose(model.score(of_user[5], user="nobody"), model.score(of_user[5]), atol=1e-4)
    with pytest.raises(DataError, match="user 'user 0', expected 'user 1'"):
        model.adapt("user 1", of_user[:1])


def adapt_to_early(model: PersonalisedModel) -> None:
    for user in dict.fromkeys(row["user_id"] for row in EARLY):
        model.adapt(user, [row for row in EARLY if row["user_id"] == user])


def test_a_policy_is_scored_with_the_state_of_each_user(
    work: Path, fitted: Path, model: PersonalisedModel
) -> None:
    """The reward of `prb ppo`: rollouts have no labels, so that it learns users from the history alone."""
    texts = [[*one.responses, one.responses[0] + " the"] for one in ASKED]
    settings = PpoSettings(scoring=ScoringSettings(history=str(work / "early.jsonl")))
    reward = open_reward(settings, str(fitted))
    rewards = reward.score(ASKED, texts, step=1).values
    assert reward.unknown(ASKED) == set()
    adapt_to_early(model)
    for one, responses, scores in zip(ASKED, texts, rewards, strict=True):
        alone = replace(one, responses=tuple(responses), labels=None)
        np.testing.assert_allclose(scores, model.score(alone), atol=1e-5)
    blind = open_reward(PpoSettings(), str(fitted))
    bare = [replace(one, profile=()) for one in ASKED]
    assert blind.unknown(bare) == {one.user_id for one in bare}
    assert not np.allclose(blind.score(bare, texts, step=1).values, rewards, atol=1e-4)


def test_behaviour_tells_users_whom_the_history_lacks(work: Path, fitted: Path, tmp_path: Path) -> None:
    samples = [
        {"id": row["id"], "sample": number, "text": row[side]}
        for row in LATE[:6]
        for number, side in enumerate(("chosen", "rejected"))
    ]
    path = write_lines(tmp_path / "samples.jsonl", samples)
    history = [row | {"user_id": row["user_id"].upper()} for row in EARLY]
    users = len({row["user_id"] for row in LATE[:6]})
    with pytest.warns(prb.PrbWarning, match=rf"the history knows nothing of {users} of {users} user"):
        best_of_n(
            path, [str(fitted)], out=tmp_path / "best", data=[str(work / "late.jsonl")], history=history
        )


def test_evaluate_adapts_on_a_history_or_on_earlier_comparisons(work: Path, fitted: Path) -> None:
    late = work / "late.jsonl"
    known = prb.evaluate(fitted, late, history=work / "early.jsonl", out=work / "known", progress=False)
    parts = json.loads((work / "study" / "splits.json").read_text())["splits"][0]
    assert known.summary["users_fitted_on"] == len(parts["seen"] + parts["validation"]) == 12
    summary = printed(render_summary(known.summary, title=""))
    assert "was fitted on 12 of these users" in " ".join(summary.split())
    assert "not those of new people" in prb.report(work / "known", out=work / "page.html").read_text()
    new = [row for row in LATE if row["user_id"] in parts["unseen"]]
    assert prb.evaluate(fitted, new, progress=False).summary["users_fitted_on"] == 0
    earlier = prb.evaluate(fitted, late, progress=False)
    nobody = [row | {"user_id": None} for row in LATE]
    blind = prb.evaluate(fitted, nobody, progress=False)
    assert known.summary["accuracy"] >= earlier.summary["accuracy"] >= blind.summary["accuracy"]
    assert known.summary["unknown_users"] == 0
    recorded = json.loads((work / "known" / "run.json").read_text())["inputs"]["model"]
    assert recorded["adapts_on"] == "the history alone"
    assert recorded["history"].startswith("sha256:")
    idle = [
        EARLY[0] | {"id": "other way", "chosen": EARLY[0]["rejected"], "rejected": EARLY[0]["chosen"]},
        EARLY[1] | {"id": "same", "rejected": EARLY[1]["chosen"]},
    ]
    partly = prb.evaluate(fitted, late, history=EARLY + idle, progress=False).summary
    assert partly["history_left_out"] == {CONTRADICTED: 2, IDENTICAL: 1}
    without = prb.evaluate(fitted, late, history=EARLY[1:], progress=False).summary
    assert partly["accuracy"] == without["accuracy"]
    assert known.summary["users_without_history"] == 0
    assert "users_without_history" not in earlier.summary
    others = [row | {"user_id": row["user_id"].upper()} for row in EARLY]
    unmatched = prb.evaluate(fitted, late, history=others, out=work / "unmatched", progress=False).summary
    assert unmatched["users_without_history"] == unmatched["users"] == known.summary["users"]
    assert "the history knows nothing" in prb.report(work / "unmatched", out=work / "page.html").read_text()
    for scorer, options, error, message in (
        (fitted, {"history": late}, DataError, "is in the history too, as '0-1'"),
        ("baseline:length", {"history": late}, RunError, "does not adapt to users"),
        (fitted, {"profile_posts": 3}, RunError, "profile_posts: what a fitted method reads"),
    ):
        with pytest.raises(error, match=message):
            prb.evaluate(scorer, late, progress=False, **options)


def test_saved_states_stand_for_the_comparisons_of_a_person(work: Path, fitted: Path, tmp_path: Path) -> None:
    model: Any = prb.load(fitted)
    again: Any = prb.load(fitted)
    with pytest.raises(RunError, match="states: there are no users"):
        model.save_states(tmp_path / "none")
    adapt_to_early(model)
    assert model.save_states(tmp_path / "states") > 16 * 4 * model.embedder.width
    blind = again.score(ASKED)
    assert set(again.load_states(tmp_path / "states")) == {row["user_id"] for row in EARLY}
    np.testing.assert_allclose(again.score(ASKED), model.score(ASKED), atol=1e-5)
    assert not np.allclose(again.score(ASKED), blind, atol=1e-4)
    known, saved = (
        prb.evaluate(fitted, LATE, history=history, progress=False).summary
        for history in (EARLY, tmp_path / "states")
    )
    assert (saved["accuracy"], saved["unknown_users"]) == (known["accuracy"], 0)
    # those of a study are of the people whom it asked, of whom the validation part is not
    asked_users = again.load_states(work / "study" / "states" / "offset")
    parts = json.loads((work / "study" / "splits.json").read_text())["splits"][0]
    assert set(asked_users) == {*parts["seen"], *parts["unseen"]}


def test_states_of_another_method_or_fit_are_refused(
    work: Path, model: PersonalisedModel, tmp_path: Path
) -> None:
    other = "method: expected 'offset', found 'pooled': these are states of another method"
    with pytest.raises(RunError, match=other):
        model.load_states(work / "study" / "states" / "pooled")
    folder = shutil.copytree(work / "study" / "states" / "offset", tmp_path / "states")
    facts = json.loads((folder / "states.json").read_text())
    earlier = {name: value for name, value in facts.items() if name != "facts_digest"} | {"format": 1}
    for known, change, message in (
        (facts, {"users": facts["users"][::-1]}, "differs from the file that was written"),
        (earlier, {"fitted": "sha256:0"}, "these are states of another fit of offset"),
        (earlier, {"users": [7]}, r"field 'users\[0\]': expected a string, found 7"),
        (facts, {"format": 9}, "format: expected 1 or 2, found 9"),
        (facts, {"kind": "x"}, "kind: expected 'prb_jax states', found 'x'"),
    ):
        (folder / "states.json").write_text(json.dumps(known | change))
        with pytest.raises(RunError, match=message):
            model.load_states(folder)
    (folder / "states.json").write_text(json.dumps(earlier))  # of an earlier version
    model.load_states(folder)
    write_arrays(folder / "arrays", {"offset": model.saved.states["offset"][::-1]})
    with pytest.raises(RunError, match="damaged: the arrays are not those that were saved"):
        model.load_states(folder)
    (folder / "states.json").unlink()
    with pytest.raises(RunError, match=r"states\.json"):
        model.load_states(folder)


def test_a_folder_that_does_not_belong_together_is_refused(fitted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(fitted, tmp_path / "copy")
    facts = json.loads((folder / "personalised.json").read_text())
    with pytest.raises(RunError, match="dtype: decided where"):
        prb.load(folder, dtype="bfloat16")
    identity = facts["backbone"]["identity"] | {"dtype": "other"}
    earlier = {name: value for name, value in facts.items() if name != "facts_digest"} | {"format": 2}
    settings = facts["settings"]
    for known, change, message in (
        (
            facts,
            {"settings": settings | {"steps": 7}},
            "differs from the file that was written",
        ),
        (facts | {"facts_digest": None}, {}, "field 'facts_digest': expected a string, found null"),
        (earlier, {"settings": settings | {"steps": "7"}}, "settings: steps: expected a whole number"),
        (earlier, {"settings": settings | {"more": 7}}, "settings: 'more': does not exist in this version"),
        (earlier, {"backbone": facts["backbone"] | {"identity": identity}}, r"than .* is now: dtype"),
        (earlier, {"backbone": facts["backbone"] | {"opened_with": {"x": 1}}}, "opened_with: 'x': no option"),
        (earlier, {"method": "unheard"}, "method 'unheard': expected one of"),
        (earlier, {"tree": {}}, "tree: expected 'arrays' in it, found none"),
        (facts, {"format": 1}, "format: expected 2 or 3, found 1"),
    ):
        (folder / "personalised.json").write_text(json.dumps(known | change))
        with pytest.raises(RunError, match=message):
            prb.load(folder)
    (folder / "personalised.json").write_text(json.dumps(earlier))  # of an earlier version
    prb.load(folder)
    (folder / "personalised.json").write_text(json.dumps(facts))
    shutil.rmtree(folder / "arrays" / "d")
    with pytest.raises(RunError, match="arrays: cannot be read"):
        prb.load(folder)


def test_ask_ranks_questions_by_what_their_answers_tell(
    model: PersonalisedModel, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [
        {"id": row["id"], "question": row["question"], "responses": [row["chosen"], row["rejected"]]}
        for row in ROWS[2:12]
    ]
    user, candidates = (
        write_lines(work / f"{name}.jsonl", rows) for name, rows in (("ana", ROWS[:2]), ("ask", questions))
    )
    command = ["ask", str(model.fitted.path), "--user", user, "--candidates", candidates]
    assert cli.main([*command, "--top", "3", "--out", str(work / "asked.json")]) == 0
    assert "a question at random" in capsys.readouterr().out
    asked = json.loads((work / "asked.json").read_text())
    assert {one["id"] for one in asked} == {one["id"] for one in questions}
    information = [one["information"] for one in asked]
    assert information == sorted(information, reverse=True)
    # the best one, by hand: adapt to each answer and see how far the other probabilities move
    judged = [prb.Comparison(**row) for row in ROWS[:2]]
    pool = [prb.Comparison(**one) for one in questions]
    best = next(number for number, one in enumerate(pool) if one.id == asked[0]["id"])

    def chances(known: list[prb.Comparison]) -> np.ndarray:
        model.adapt("ana", [dict(one.to_row(), user_id=None) for one in known])
        scores = np.array(model.score(pool, user="ana"), np.float64)
        return 1 / (1 + np.exp(scores[:, 1] - scores[:, 0]))

    before, told = chances(judged), 0.0
    for answer, chance in ((0, before[best]), (1, 1 - before[best])):
        labels = [1.0 - answer, float(answer)]
        p = chances([*judged, prb.Comparison.from_row(questions[best] | {"labels": labels}, where="best")])
        divergence = p * np.log(p / before) + (1 - p) * np.log((1 - p) / (1 - before))
        told += chance * np.delete(divergence, best).mean()
    assert information[0] == pytest.approx(told, rel=1e-2)
    for responses, count in ((["a", "b", "c"], "3"), (["a", "a"], "2 equal ones")):
        with pytest.raises(DataError, match=f"expected 2 different responses, found {count}"):
            prb.ask(model, user=None, candidates=[questions[0] | {"responses": responses}, questions[1]])
    both_ways = ROWS[0] | {"id": "x", "chosen": ROWS[0]["rejected"], "rejected": ROWS[0]["chosen"]}
    with pytest.raises(DataError, match="'0-0' is uninformative: a pair that the same user judged both ways"):
        prb.ask(model, user=[ROWS[0], both_ways], candidates=questions)
    with pytest.raises(RunError, match="does not adapt to users"):
        prb.ask("baseline:length", user=None, candidates=questions)
    for use in (
        lambda: prb.ask(work / "study", user=None, candidates=questions),
        lambda: prb.load(work / "study"),
        lambda: prb.evaluate(work / "study", LATE, progress=False),
    ):
        several = r"several methods: name one of them: .*fitted/offset, .*fitted/pooled"
        with pytest.raises(RunError, match=several):
            use()
    # a method without a personal part learns nothing from an answer, and says so
    pooled = str(work / "study" / "fitted" / "pooled")
    assert cli.main(["ask", pooled, "--candidates", candidates]) == 0
    assert "no answer tells anything" in " ".join(capsys.readouterr().out.split())
