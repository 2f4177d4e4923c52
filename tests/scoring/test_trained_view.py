"""A model is scored as it was trained: its folder says how, that is the default, and overrides are said."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.text.trained_view import TrainedView, read_trained_view
from prb_jax.text.view import TRAINED_VIEW, TextProtocol, View, ViewOptions, choose_view
from prb_jax.training.config import default_config
from prb_jax.training.convert import convert
from prb_jax.training.train import train
from tests.scoring.records import read_json, score_rows
from tests.training.tiny import rows, write_model, write_rows

LENGTH = 60
VIEWS = {"user_blind": View(0, max_length=LENGTH), "profile_context": View(1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Profiles of up to two posts: what a model sees with one post is not what it sees with ten."""
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows(9))


@pytest.fixture(scope="module")
def runs(model, data, tmp_path_factory):
    """A short run of each method, neither with ten posts."""
    made = {}
    for method, view in VIEWS.items():
        config = default_config()
        config.model, config.data, config.method, config.tuning = str(model), str(data), method, "lora"
        config.profile_posts, config.max_length = 1, view.max_length
        config.steps, config.batch.comparisons, config.validation.fraction = 1, 4, 0.0
        config.log.plot = config.log.tensorboard = False
        made[method] = train(config, out=tmp_path_factory.mktemp("runs") / method, progress=False).out
    return made


def evaluate(*arguments) -> None:
    assert main(["evaluate", *map(str, arguments), "--no-progress"]) == 0


def run_of(out: Path):
    return read_json(out / "run.json")


def prefixes(rm, records, **options) -> list[list[int]]:
    """The token ids before the responses, as the model sees them."""
    return [tree.prefix.tolist() for tree in rm.encode(records, **options)]


def test_without_flags_a_run_is_scored_as_with_the_flags_of_its_training(runs, data, tmp_path, capsys):
    run = runs["user_blind"]
    evaluate(run, "--data", data, "--out", tmp_path / "plain")
    assert "warning" not in capsys.readouterr().err
    inputs = run_of(tmp_path / "plain")["inputs"]
    assert [inputs[name] for name in ("profile_posts", "protocol", "max_length")] == [0, "default", LENGTH]
    assert "overrides" not in run_of(tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error", prb.PrbWarning)
        warnings.filterwarnings("ignore", ".* did not fit the maximum length")
        options = {"profile_posts": 0, "protocol": "default", "max_length": LENGTH}
        prb.evaluate(run, data, out=tmp_path / "explicit", progress=False, **options)
    plain, explicit = (tmp_path / name / "scores.jsonl" for name in ("plain", "explicit"))
    assert plain.read_bytes() == explicit.read_bytes()


def test_an_override_is_one_line_and_stands_in_the_run(runs, data, tmp_path, capsys):
    run = runs["user_blind"]
    capsys.readouterr()
    evaluate(run, "--data", data, "--out", tmp_path, "--profile-posts", 2, "--max-length", 512)
    said = f"profile_posts 2 instead of 0, max_length 512 instead of {LENGTH}"
    assert capsys.readouterr().err == f"prb: warning: {run} is scored otherwise than it was trained: {said}\n"
    assert run_of(tmp_path)["overrides"] == {
        "profile_posts": {"trained": 0, "used": 2},
        "max_length": {"trained": LENGTH, "used": 512},
    }
    as_trained = prb.load(run).score(prb.read_comparisons(data))
    scores = [row["scores"] for row in score_rows(tmp_path)]
    assert not np.array_equal(scores, as_trained)  # the posts decide what it sees


@pytest.mark.parametrize("method", VIEWS)
def test_python_and_every_folder_of_a_run_have_the_same_defaults(runs, data, tmp_path, method):
    run, view, records = runs[method], VIEWS[method], prb.read_comparisons(data)
    trained = TrainedView(view, method)
    expected = prb.evaluate(run, data, out=tmp_path / "run", progress=False)
    shutil.copytree(run / "model", tmp_path / "moved")
    folders = [run / "model", tmp_path / "moved"]
    folders.append(convert(run, tmp_path / "merged"))
    folders.append(convert(tmp_path / "merged", tmp_path / "again"))
    options = {"profile_posts": view.profile_posts, "protocol": "default", "max_length": view.max_length}
    with warnings.catch_warnings():
        warnings.simplefilter("error", prb.PrbWarning)
        warnings.filterwarnings(
            "ignore", ".* did not fit the maximum length|.* of 9 comparisons have no profile"
        )
        for folder in folders:
            rm = prb.load(folder)
            assert rm.reader.trained == trained
            assert [row.tolist() for row in rm.score(records)] == [row.scores for row in expected.rows]
        assert prefixes(rm, records) == prefixes(rm, records, **options)
    assert read_trained_view(convert(run, tmp_path / "adapter", adapter=True)) == trained
    assert read_json(run / "train.json")["view"] == trained.to_json()
    with pytest.warns(prb.PrbWarning, match=r"profile_posts 10 instead of"):
        rm.score(records[:1], profile_posts=10)
    with pytest.warns(prb.PrbWarning, match=r"protocol paper instead of default"):
        rm.encode(records[:1], protocol="paper")


def test_inspect_prints_the_defaults_and_says_what_differs(runs, model, data, capsys):
    for place, shown in (
        (runs["user_blind"], r"profile posts 0, protocol default, max length 60 tokens .*user_blind"),
        (runs["profile_context"], r"profile posts 1, .*the model's context .*profile_context"),
        (model, r"profile posts 10, protocol default, .*general defaults"),
    ):
        assert main(["inspect", str(place)]) == 0
        assert re.search("scored with +" + shown, " ".join(capsys.readouterr().out.split()))
    blind = ["inspect", str(runs["user_blind"]), "--data", str(data)]
    assert main(blind) == 0
    said = capsys.readouterr()
    assert "9 comparisons, 0 posts" in said.out
    assert said.err == ""
    assert main([*blind, "--profile-posts", "2"]) == 0
    assert capsys.readouterr().err.count("profile_posts 2 instead of 0") == 1


def test_without_a_trained_view_score_and_evaluate_have_the_general_defaults(model, data, tmp_path):
    rm, records = prb.load(model), prb.read_comparisons(data)
    assert rm.reader.trained is None
    for protocol, posts in (("default", 10), ("paper", 0)):
        result = prb.evaluate(rm, data, out=tmp_path / protocol, protocol=protocol, progress=False)
        assert result.summary["profile_posts"] == posts
        scores = rm.score(records, protocol=protocol)
        assert [row.scores for row in result.rows] == [row.tolist() for row in scores]
    assert len(prefixes(rm, records)[2]) > len(prefixes(rm, records, profile_posts=0)[2])


def test_the_models_whole_context_is_no_override():
    trained = TrainedView(View(3), "profile_context")
    assert choose_view(trained, ViewOptions(max_length=512), context=512).overrides == {}
    assert list(choose_view(trained, ViewOptions(max_length=500), context=512).overrides) == ["max_length"]
    chosen = choose_view(trained, ViewOptions(protocol="paper"))
    assert chosen.view == View(3, TextProtocol.PAPER)
    assert chosen.overrides == {"protocol": {"trained": "default", "used": "paper"}}


def test_a_model_of_the_time_when_prompts_always_claimed_an_order_is_scored_so(runs, data, tmp_path):
    old = shutil.copytree(runs["profile_context"] / "model", tmp_path / "old")
    view = read_json(old / TRAINED_VIEW)
    assert view.pop("order_claim") == "recorded"
    (old / TRAINED_VIEW).write_text(json.dumps(view))
    records = prb.read_comparisons(data)
    rm, now = prb.load(old), prb.load(runs["profile_context"])
    texts = [model.tokenizer.tokenizer.decode(prefixes(model, records)[2]) for model in (rm, now)]
    assert ["most relevant first" in text for text in texts] == [True, False]
    ranked = [dataclasses.replace(record, profile_order="bm25") for record in records]
    assert prefixes(now, ranked) == prefixes(rm, records)
    prb.evaluate(rm, data, out=tmp_path / "run", controls="none", progress=False)
    assert run_of(tmp_path / "run")["inputs"]["order_claim"] == "always"
    assert "overrides" not in run_of(tmp_path / "run")
    with pytest.raises(prb.RunError, match='order_claim: "always" -> "recorded"'):
        prb.evaluate(now, data, out=tmp_path / "run", controls="none", progress=False)
    assert read_trained_view(convert(old, tmp_path / "again")) == rm.reader.trained


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile_posts": "3"}, "field 'profile_posts': expected int, found '3'"),
        ({"profile_posts": True}, "field 'profile_posts': expected int, found True"),
        ({"profile_posts": -1}, "profile_posts: expected 0 or more, found -1"),
        ({"max_length": 1.5}, "field 'max_length': expected int | None, found 1.5"),
        ({"protocol": "other"}, "protocol: expected one of"),
        ({"posts": 3}, "field 'posts': unknown"),
        ({"order_claim": "no"}, "field 'order_claim': expected recorded or always, found 'no'"),
        ({"method": None}, "field 'method': expected str, found None"),
    ],
)
def test_a_broken_view_is_one_clear_error(tmp_path, change, said):
    TrainedView(View(3), "profile_context").save(tmp_path)
    path = tmp_path / TRAINED_VIEW
    path.write_text(json.dumps(read_json(path) | change))
    with pytest.raises(prb.CheckpointError, match=re.escape(f"{path}: {said}")):
        read_trained_view(tmp_path)
    path.write_text("[")
    with pytest.raises(prb.CheckpointError, match=re.escape(f"{path}: not valid JSON")):
        read_trained_view(tmp_path)


def test_a_model_of_profiles_on_data_without_them_is_told_once(runs, data, tmp_path, capsys):
    posted = [row | {"profile": [{"text": "tea"}]} for row in rows(4)]
    plain = write_rows(tmp_path / "plain.jsonl", [row | {"profile": []} for row in posted])
    mixed = write_rows(tmp_path / "mixed.jsonl", [*posted[:3], posted[3] | {"profile": []}])
    whole = write_rows(tmp_path / "whole.jsonl", posted)
    told = "was trained with 1 post of each user's profile, and"
    text = f"{told} no comparison has a profile"
    for method, source, flags, count in (
        ("profile_context", plain, [], 1),
        ("profile_context", mixed, [], 1),
        ("profile_context", whole, [], 0),
        ("profile_context", plain, ["--profile-posts", "0"], 0),  # told as an override
        ("user_blind", plain, [], 0),
    ):
        out = tmp_path / f"{method}-{source.stem}-{len(flags)}"
        evaluate(runs[method], "--data", source, "--out", out, *flags)
        err = capsys.readouterr().err
        assert err.count(told) == count, (method, source)
        assert err.count(f"{told} 1 of 4 comparisons have no profile" if source == mixed else text) == count
    with pytest.warns(prb.PrbWarning, match=text):
        prb.load(runs["profile_context"]).score(prb.read_comparisons(plain))
