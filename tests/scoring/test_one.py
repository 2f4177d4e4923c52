"""A single comparison, a single response, plain functions and baselines as scorers, results without a folder."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from tests.scoring.records import TOLERANCE, assert_close, read_json
from tests.scoring.slow_scorer import comparisons


def one(comparison: prb.Comparison, response: str, name: str = "one") -> prb.Comparison:
    return prb.Comparison(
        id=name, question=comparison.question, responses=[response], profile=comparison.profile
    )


def prefers_tea(comparison: prb.Comparison) -> list[float]:
    return [float(len(text)) for text in comparison.responses]


class TestRewardModel:
    @pytest.mark.parametrize("batch_tokens", [None, 1])
    def test_a_response_alone_scores_as_beside_others(self, model, mixed, scores, batch_tokens) -> None:
        singles = [
            one(comparison, text, f"{comparison.id}-{k}")
            for comparison in mixed
            for k, text in enumerate(comparison.responses)
        ]
        assert_close(model.score(singles, batch_tokens=batch_tokens), np.concatenate(scores)[:, None])
        # Beside comparisons of several responses too, and batch by batch.
        both = [*singles[:3], *mixed[:3]]
        assert_close(model.score(both), [*np.concatenate(scores)[:3, None], *scores[:3]])
        assert sum(len(batch.indices) for batch in model.stream(singles)) == len(singles)
        tree = model.encode(singles[:1])[0]
        assert len(tree.responses) == 1
        rewards = model.score_fn(model.params, model.batch([tree]))
        assert abs(float(rewards[0, 0]) - scores[0][0]) < TOLERANCE

    def test_records_score_as_comparisons_do_and_a_single_one_gives_its_array(
        self, model, mixed, scores
    ) -> None:
        alone = model.score(mixed[2])
        assert isinstance(alone, np.ndarray)
        assert_close([alone], scores[2:3])
        rows = [comparison.to_row() for comparison in mixed]
        assert_close(model.score(iter(rows)), scores)
        row = {key: value for key, value in rows[2].items() if key not in ("id", "labels")}
        assert_close([model.score(row)], scores[2:3])
        assert prb.load("baseline:length").score(row).shape == (4,)
        conversation = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes."}]
        expected = model.score(prb.Comparison(question="Tea?", responses=["Yes."]))
        assert model.score({"responses": [conversation]}) == expected

    def test_a_bare_reward(self, model, mixed, scores) -> None:
        c = mixed[3]
        posts = [{"id": post.id, "category": post.category, "text": post.text} for post in c.profile]
        reward = model.reward(c.question, c.responses[1], profile=posts)
        assert isinstance(reward, float)
        assert abs(reward - scores[3][1]) < TOLERANCE
        messages = [{"role": "user", "content": c.question}]
        blind = model.reward(messages, c.responses[1], profile=posts, profile_posts=0)
        assert abs(blind - model.reward(c.question, c.responses[1])) < TOLERANCE < abs(blind - reward)
        with pytest.raises(prb.DataError, match="responses"):
            model.reward(c.question, "")


def test_a_baseline_is_loaded_as_a_model_is(tmp_path: Path) -> None:
    items = comparisons(6)
    length = prb.load("baseline:length")
    expected = [np.array([len(text) for text in c.responses], np.float32) for c in items]
    assert_close(length.score(items), expected)
    assert_close([length.score(items[0]), length.score(one(items[0], "four"))], [expected[0], [4.0]])
    loaded = prb.evaluate(length, items, out=tmp_path / "a", progress=False)
    named = prb.evaluate("baseline:length", items, out=tmp_path / "b", progress=False)
    assert loaded.summary == named.summary
    inputs = [read_json(tmp_path / name / "run.json")["inputs"] for name in ("a", "b")]
    assert inputs[0] == inputs[1]


class TestFunction:
    def test_it_is_a_scorer_and_no_folder_is_left(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        items = comparisons(9)
        result = prb.evaluate(lambda c: [len(text) for text in c.responses], items, progress=False)
        assert result.out is None
        assert [row.scores for row in result.rows] == [prefers_tea(c) for c in items]
        assert result.summary["accuracy"] == result.summary["length_baseline"]
        assert os.listdir(tmp_path) == []

    def test_its_name_is_what_a_folder_knows_of_it(self, tmp_path: Path) -> None:
        items = comparisons(5)
        asked = []

        def judge(comparison: prb.Comparison) -> np.ndarray:
            if len(asked) == 3:
                raise KeyboardInterrupt
            asked.append(comparison.id)
            return np.arange(len(comparison.responses))

        with pytest.raises(KeyboardInterrupt):
            prb.evaluate(judge, items, out=tmp_path / "j", progress=False)
        asked.clear()
        result = prb.evaluate(judge, items, out=tmp_path / "j", progress=False)
        assert asked == ["c3", "c4"]  # each score is kept as soon as it is there
        identity = read_json(tmp_path / "j" / "run.json")["inputs"]["model"]
        assert identity["function"].endswith("judge")
        assert "not recorded" in identity["code"]
        assert result.summary["model"].startswith("tests.scoring.test_one.")
        with pytest.raises(prb.RunError, match=r"model.function: .*judge.* -> .*prefers_tea"):
            prb.evaluate(prefers_tea, items, out=tmp_path / "j", progress=False)
        named = prb.evaluate(lambda c: prefers_tea(c), items, out=tmp_path / "n", name="mine", progress=False)
        assert named.summary["model"] == "mine"
        with pytest.raises(prb.RunError, match=r"a lambda has no name .*name="):
            prb.evaluate(lambda c: prefers_tea(c), items, out=tmp_path / "l", progress=False)

    @pytest.mark.parametrize(
        ("values", "quoted"),
        [
            ([1.0], r"\[1.0\]"),
            ([1.0, float("nan")], "nan"),
            ([1.0, 1e300], "1e\\+300"),
            (["1", "2"], r"\['1', '2'\]"),
            (3.0, "3.0"),
            (None, "None"),
            ([[1.0], [2.0, 3.0]], "2.0"),
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_wrong_numbers_name_the_comparison(self, values, quoted) -> None:
        with pytest.raises(prb.RunError, match=rf"judge: comparison 'c0': expected 2 finite .*{quoted}"):
            prb.evaluate(lambda c: values, comparisons(1), name="judge", progress=False)

    def test_options_that_have_no_effect_are_refused(self) -> None:
        with pytest.raises(prb.RunError, match=r"max_length: .*prefers_tea reads the whole text"):
            prb.evaluate(prefers_tea, comparisons(1), max_length=5)
        with pytest.raises(prb.RunError, match="expected a model, a name or a function, found int"):
            prb.evaluate(3, comparisons(1))  # pyright: ignore[reportArgumentType]
