"""The feature store: states of a reward model, of a language model and of an encoder; resumption and refusals."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.text_encoder import load_text_encoder
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.features import open_features
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.study import embedder as embedder_module
from prb_jax.study.embedder import POST_PROMPT, StateFeatures, open_embedder
from prb_jax.study.write_features import write_features
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import TooLongError
from tests.json_lines import write_lines
from tests.scoring.records import TOLERANCE, record
from tests.study.people import PlantedFeatures, choice, planted_people
from tests.tiny_encoders import WORDS, write_encoder

write = functools.partial(write_features, progress=False)
LABELLED = [dataclasses.replace(record(i), labels=(1.0, 0.0), user_id=f"u{i % 3}") for i in range(9)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", (one.to_row() for one in LABELLED))


def test_the_head_of_a_reward_model_gives_its_scores_from_the_features(
    folder: Path, model: RewardModel, data: str, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "features"
    command = ["features", str(folder), "--data", data, "--profile-posts", "2", "--out", str(out)]
    assert cli.main([*command, "--no-progress"]) == 0
    store = open_features(out)
    printed = capsys.readouterr().out
    assert "18 responses and" in printed
    assert "kept too: the reward of each response and 18 rewards with a profile" in printed
    for comparison, scores in zip(LABELLED, model.score(LABELLED, profile_posts=2), strict=True):
        np.testing.assert_allclose(store.shown_rewards(comparison), scores, atol=TOLERANCE)
    head = np.asarray(model.params["score"], np.float32)
    for comparison, scores in zip(LABELLED, model.score(LABELLED, profile_posts=0), strict=True):
        states = store.answers.read(store.answer_rows(comparison))
        np.testing.assert_allclose((states @ head)[:, 0], scores, atol=TOLERANCE)
        assert store.rewards is not None
        rewards = store.rewards.read(store.answer_rows(comparison))[:, 0]
        np.testing.assert_allclose(rewards, scores, atol=TOLERANCE)
        posts = store.posts.read(store.post_rows(comparison.profile))
        assert posts.shape == (len(comparison.profile), store.width)
    before = {path.name: path.read_bytes() for path in out.glob("*.npy")}
    options = FeatureOptions(profile_posts=2)
    halved = write(folder, data, out=tmp_path / "half", options=FeatureOptions(store="bfloat16"))
    row = store.answers.read([3])
    np.testing.assert_array_equal(halved.answers.read([3]), row.astype(ml_dtypes.bfloat16).astype(np.float32))
    with pytest.raises(RunError, match="limit: null -> 4"):
        write(folder, data, out=out, limit=4, options=options)
    (out / "features.json").unlink()
    (out / "answers-000000.npy").write_bytes(before["answers-000000.npy"])
    write(folder, data, out=out, options=options)
    assert {path.name: path.read_bytes() for path in out.glob("*.npy")} == before


def test_a_prompt_of_many_answers_is_computed_once_however_short_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder, counts = open_embedder(folder, LoadOptions(), view=ViewOptions()), list[Any]()
    assert isinstance(embedder, StateFeatures)

    def counted(*args: Any, stream: Any = embedder_module.stream_scores, **options: Any) -> Any:
        for batch in stream(*args, **options):
            counts.append(batch.computed)
            yield batch

    answers = [
        prb.Comparison(id=f"{question}{k}", question=question, responses=[f"{k} " + "hill " * (k + 1)])
        for question in ("Tea?", "Rain? " * 30)
        for k in range(5)
    ]
    tokens = {
        (one.prompt, tree.sequence(0)[:end].tobytes())
        for one, tree in zip(answers, embedder.model.encode(answers), strict=True)
        for end in range(1, tree.tokens + 1)
    }
    monkeypatch.setattr(embedder_module, "stream_scores", counted)
    embedder.answers(answers, advance=lambda done, tokens: None)
    assert sum(counts) == len(tokens)


def test_an_unfinished_store_is_refused_and_goes_on_with_the_next_part(tmp_path: Path) -> None:
    people, done = planted_people(PlantedFeatures(), users=9, each=1), list[int]()

    class Stopping(PlantedFeatures):
        def answers(self, comparisons: Any, **options: Any) -> Any:
            done.append(len(comparisons))
            if len(done) == 3:
                raise KeyboardInterrupt
            return super().answers(comparisons, **options)

    run, options = tmp_path / "run", FeatureOptions(file_rows=7)
    with pytest.raises(KeyboardInterrupt):
        write(Stopping(), people, out=run, options=options)
    with pytest.raises(RunError, match="it is unfinished"):
        open_features(run)
    with pytest.raises(RunError, match="it is unfinished"):
        prb.personalise(people, backbone=run, out=tmp_path / "study", progress=False)
    write(Stopping(), people, out=run, options=options)
    assert done == [7, 7, 3, 3]


def test_a_post_that_is_too_long_loses_its_end_and_a_response_is_named_by_its_record(
    folder: Path, tmp_path: Path
) -> None:
    embedder = open_embedder(folder, LoadOptions(), view=ViewOptions(max_length=300))
    advance: Any = lambda done, tokens: None  # noqa: E731
    words = " ".join(f"word{number}" for number in range(200))
    embedded = embedder.posts(["short", words], advance=advance)
    assert embedded.truncated == 1
    assert isinstance(embedder, StateFeatures)
    kept = embedder._cut_end(prb.Comparison(id="p", prompt=POST_PROMPT, responses=[words])).responses[0]
    again = embedder.posts([kept, words[: len(kept) + 40]], advance=advance)
    assert again.truncated == 1  # of the longer one
    np.testing.assert_allclose(embedded.features[1], again.features[0], atol=TOLERANCE)
    long = dataclasses.replace(LABELLED[4], responses=(words, "no"))
    with pytest.raises(TooLongError, match=f"comparison '{long.id}': its longest"):
        write(embedder, [*LABELLED[:4], long], out=tmp_path / "x")


def test_an_encoder_of_texts(tmp_path: Path) -> None:
    write_encoder(tmp_path / "bert")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) + str(i) for i in range(4)]
    comparisons = [choice(text[-1], None, text, "soup", "when is tea good ?") for text in texts]
    store = write(tmp_path / "bert", comparisons, out=tmp_path / "both")
    options = FeatureOptions(responses_alone=True)
    alone = write(tmp_path / "bert", comparisons, out=tmp_path / "alone", options=options)
    vectors = load_text_encoder(tmp_path / "bert").embed(["when is tea good ?\n\nsoup", "soup"]).vectors
    for kept, expected in zip((store, alone), vectors, strict=True):
        row = kept.answers.read(kept.answer_rows(comparisons[2])[1:])[0]
        np.testing.assert_allclose(row, expected, atol=TOLERANCE)
    assert store.rewards is None
    assert store.shown_rewards(comparisons[0]) is None
    options = FeatureOptions(profile_posts=1)
    with pytest.raises(RunError, match=r"profile_posts: .* gives no reward"):
        write(tmp_path / "bert", comparisons, out=tmp_path / "x", options=options)
    with pytest.raises(RunError, match="another data: data"):
        store.check_inputs({"data": {"sources": ["other"]}})


def test_a_reward_model_on_an_encoder(tmp_path: Path) -> None:
    """The features are the states of the first token, and equal texts of a window are computed once."""
    write_encoder(tmp_path, "DebertaV2ForSequenceClassification", num_labels=1)
    rows = [choice(str(n), None, f"{WORDS[n % 5]} soup", WORDS[n], "when is tea good ?") for n in range(12)]
    store = write(tmp_path, rows, out=tmp_path / "features")
    model = prb.load(tmp_path)
    head = {name: np.asarray(leaf, np.float64) for name, leaf in model.params["head"].items()}
    for one, scores in zip(rows, model.score(rows, profile_posts=0), strict=True):
        places = store.answer_rows(one)
        assert store.rewards is not None
        np.testing.assert_allclose(store.rewards.read(places)[:, 0], scores, atol=TOLERANCE)
        hidden = store.answers.read(places) @ head["pooler.dense.weight"] + head["pooler.dense.bias"]
        activated = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        rewards = activated @ head["classifier.weight"] + head["classifier.bias"]
        np.testing.assert_allclose(rewards[:, 0], scores, atol=TOLERANCE)


def test_what_cannot_be(folder: Path, data: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no features"):
        write("baseline:length", data, out=tmp_path / "x")
    options = FeatureOptions(responses_alone=True)
    with pytest.raises(RunError, match="for encoders of single texts"):
        write(folder, data, out=tmp_path / "x", options=options)
    with pytest.raises(RunError, match="store: expected one of bfloat16, float32"):
        FeatureOptions(store="int8")


def test_a_store_that_is_not_what_was_written_is_refused(folder: Path, data: str, tmp_path: Path) -> None:
    """Rows in another order, flipped bytes, files that are no arrays, and facts of other types."""
    out = write(folder, data, out=tmp_path / "run").path
    path, wrong = out / "answers-000000.npy", "is not the file that the run wrote"
    whole, rows = path.read_bytes(), np.load(path)
    flipped = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]
    record = json.loads((out / "run.json").read_text())
    earlier = {name: value for name, value in record.items() if name != "files"} | {"format": 1}
    for contents in (
        array_bytes(rows[::-1]),
        flipped,
        whole[:-8],
        b"",
        b"\x93NUMPY\1\0\xff\xff{'a",
        b"PK\3\4",
    ):
        path.write_bytes(contents)
        with pytest.raises(RunError, match=rf"answers-000000\.npy: {wrong}"):
            open_features(out)
    (out / "run.json").write_text(json.dumps(earlier))
    for contents in (b"", b"\x93NUMPY\1\0\xff\xff{'a", b"PK\3\4", whole[:-8], array_bytes(rows[:2])):
        path.write_bytes(contents)
        with pytest.raises(
            RunError, match=r"answers-000000\.npy: (cannot be read as an array|expected float32)"
        ):
            open_features(out)
    path.write_bytes(whole)
    facts = json.loads((out / "features.json").read_text())
    for change, message in (
        ({"width": "32"}, "field 'width': expected a whole number, found '32'"),
        ({"part": 0}, "field 'part': expected 1 or more, found 0"),
        ({"answers": -1}, "field 'answers': expected 1 or more, found -1"),
        ({"inputs": []}, "field 'inputs': expected an object"),
        ({"opened_with": {"dtype": [1]}}, "field 'opened_with.dtype'"),
        ({"format": 2}, "field 'format': expected 1, found 2"),
    ):
        (out / "features.json").write_text(json.dumps(facts | change))
        with pytest.raises(RunError, match=rf"features\.json: {message}"):
            open_features(out)
    (out / "features.json").write_text(json.dumps(facts))
    assert len(open_features(out).answers) == len(rows)  # of an earlier version


def array_bytes(array: np.ndarray) -> bytes:
    """The bytes of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
