"""First calls of a Python user: exchanged arguments, names, types and cut texts are told; objects are short."""

import inspect
import io
import json
import re
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prb_jax as prb
from tests.json_lines import write_lines
from tests.scoring.records import write_model

ROWS: list[dict[str, Any]] = [
    {"id": str(n), "user_id": "u", "question": "Tea?", "chosen": "Green tea.", "rejected": "No."}
    for n in range(3)
]
OTHER = {"ask": "?", "good": "a", "bad": "b"}
FIRST = "the model is the first argument"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def rm(model):
    return prb.load(model)


def private(value: object) -> list[str]:
    return [name for name in dir(value) if name.startswith("_") and not name.startswith("__")]


def test_exchanged_model_and_data_are_one_clear_error(model, rm, tmp_path):
    file, comparisons = write_lines(tmp_path / "pairs.jsonl", ROWS), prb.read_comparisons(ROWS)
    for first, second in (
        (file, str(model)),
        (file, rm),
        (file, "baseline:length"),
        (file, lambda comparison: [1.0, 0.0]),
        (comparisons, rm),
        (comparisons, comparisons),
        (file, file),
    ):
        with pytest.raises(prb.PrbError, match=FIRST):
            prb.evaluate(first, second, progress=False)  # pyright: ignore[reportArgumentType]


def test_a_keyword_with_a_spelling_mistake_is_refused():
    for name, near in (("profile_post", "profile_posts"), ("dtpye", "dtype")):
        for function, given in ((prb.evaluate, {}), (prb.evaluate_posts, {"profile_posts": [0, 1]})):
            with pytest.raises(
                TypeError, match=f"unexpected keyword argument '{name}'; did you mean '{near}'"
            ):
                function("baseline:length", ROWS, **given, **{name: 3})  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_every_public_function_names_the_nearest_keyword():
    for function, name, near in (
        (prb.load, "dtpye", "dtype"),
        (prb.train, "overide", "overrides"),
        (prb.report, "titel", "title"),
        (prb.read_comparisons, "limitt", "limit"),
    ):
        with pytest.raises(
            TypeError, match=rf"{function.__qualname__}\(\) got .* '{name}'; did you mean '{near}'"
        ):
            function("x", **{name: "y"})
    with pytest.raises(AttributeError, match="no attribute 'evalute'; did you mean 'evaluate'"):
        _ = prb.evalute


def test_values_of_another_type_are_one_error(rm):
    for call, error, said in (
        (lambda: prb.load(None), prb.CheckpointError, "expected a folder or a hub id, found None"),
        (
            lambda: prb.load(rm.name, mesh=4),
            prb.MeshError,
            "expected a text such as 'fsdp=4' or a mesh, found 4",
        ),
        (lambda: rm.score(ROWS, profile_posts="all"), prb.DataError, "expected 0 or more, found 'all'"),
        (lambda: rm.score(ROWS, max_length="long"), prb.DataError, "expected at least 1, found 'long'"),
        (
            lambda: prb.evaluate(rm, ROWS, limit="5"),
            prb.DataError,
            "positive number of comparisons, found '5'",
        ),
        (lambda: prb.evaluate(rm, ROWS, out=5), prb.RunError, "out: expected a path, found 5"),
        (lambda: prb.evaluate(rm, io.StringIO("x")), prb.DataError, "an open file; give its name"),
        (
            lambda: prb.personalise(ROWS, backbone="x", out="y", shots="0,a"),
            prb.RunError,
            "numbers of 0 or more",
        ),
    ):
        with pytest.raises(error, match=said):
            call()  # pyright: ignore[reportArgumentType]
    assert rm.score(ROWS, profile_posts=np.int64(0))[0].shape == (2,)


def test_people_are_checked_before_features_are_computed(model, tmp_path):
    rows = [{key: value for key, value in row.items() if key != "user_id"} for row in ROWS]
    with pytest.raises(prb.DataError, match="no comparison names a user"):
        prb.personalise(rows, backbone=str(model), out=tmp_path / "study", progress=False)
    assert not (tmp_path / "study").exists()


def test_a_folder_that_is_no_model_is_told_by_its_contents(model, tmp_path):
    prb.evaluate("baseline:length", ROWS, out=tmp_path / "runs" / "first", progress=False)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(model)
    for folder, said in (
        ("runs/first", "found no config.json in it; it is a run of the kind 'evaluation'$"),
        ("runs", "found no config.json in it; runs in it: .*runs/first$"),
        ("models", "found no config.json in it; models in it: .*models/tiny$"),
    ):
        with pytest.raises(prb.CheckpointError, match=said):
            prb.load(tmp_path / folder)
    with pytest.raises(prb.RunError, match=r"found no run.json in it.*; models in it: .*models/tiny$"):
        prb.report([tmp_path / "models"], out=tmp_path / "page.html")


def test_a_file_of_another_format_is_told_by_its_first_line(tmp_path):
    pairs = json.dumps(ROWS, indent=1)
    for name, content, said in (
        ("a.jsonl", pairs.encode(), "a JSON array, over any lines, belongs in a file named .json"),
        ("b.jsonl", pairs.encode("utf-16"), "looks like UTF-16: save it as UTF-8"),
        ("b.json", pairs.encode("utf-16"), "looks like UTF-16: save it as UTF-8"),
        ("b.csv", "question,chosen\n".encode("utf-16"), "looks like UTF-16: save it as UTF-8"),
        ("c.csv", b"question;chosen;rejected\n?;a;b\n", "';'; expected commas"),
        ("d.csv", b"question\tchosen\trejected\n?\ta\tb\n", r"'\\t'; expected commas"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(prb.DataError, match=said):
            prb.read_comparisons(tmp_path / name)
    (tmp_path / "a.json").write_text(pairs)
    assert len(prb.read_comparisons(tmp_path / "a.json")) == len(ROWS)


def test_a_dtype_may_be_the_type_of_numpy_or_jax(model):
    for dtype in ("float32", jnp.float32, np.float32, np.dtype("float32")):
        assert prb.load(model, dtype=dtype).dtype == "float32"
    assert prb.LoadOptions(dtype=jnp.bfloat16) == prb.LoadOptions(dtype="bfloat16")  # pyright: ignore[reportArgumentType]
    assert prb.TrainSettings(dtype=jnp.float32).dtype == "float32"  # pyright: ignore[reportArgumentType]
    result = prb.evaluate(str(model), ROWS, dtype=jnp.float32, progress=False)
    assert result.summary["n"] == 3
    for dtype in (jnp.int32, np.float16, "float16"):
        with pytest.raises(prb.CheckpointError, match="expected float32 or bfloat16, found"):
            prb.load(model, dtype=dtype)


def test_a_file_given_as_comparisons_names_the_function_that_reads_it(rm, tmp_path):
    file = write_lines(tmp_path / "pairs.jsonl", ROWS)
    with pytest.raises(prb.DataError, match=r"prb\.read_comparisons\(NAME\)"):
        rm.score(file)
    assert len(rm.score(prb.read_comparisons(file))) == 3


def test_missing_columns_list_those_found(tmp_path):
    files = {"a.jsonl": json.dumps(OTHER), "a.csv": "ask,good,bad\n?,a,b\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    pq.write_table(pa.Table.from_pylist([OTHER]), tmp_path / "a.parquet")
    for source in (*(tmp_path / name for name in (*files, "a.parquet")), [OTHER]):
        with pytest.raises(prb.DataError, match=r"found .*'ask', 'good', 'bad'.*--columns"):
            prb.read_comparisons(source)
    pairs = {"who": "u", "question": "?", "better": "a", "worse": "b"}
    (tmp_path / "b.csv").write_text("who,question,better,worse\nu,?,a,b\n")
    pq.write_table(pa.Table.from_pylist([pairs]), tmp_path / "b.parquet")
    for source in (tmp_path / "b.csv", tmp_path / "b.parquet", pa.Table.from_pylist([pairs]), [pairs]):
        with pytest.raises(prb.DataError, match="field 'chosen': missing") as raised:
            prb.read_comparisons(source)
        assert {name for name in pairs if repr(name) in str(raised.value)} == set(pairs)
    with pytest.raises(prb.DataError, match="field 'rejected': missing; found 'question', 'chosen', 'worse'"):
        prb.read_comparisons([{"question": "?", "chosen": "a", "worse": "b"}])
    with pytest.raises(prb.DataError, match="field 'question': missing") as raised:
        prb.Comparison(responses=["a", "b"])
    assert "--columns" not in str(raised.value)


def test_text_cut_in_python_is_one_warning(rm):
    long = [{**row, "question": "Rain? " * 300} for row in ROWS]
    for call, count in (
        (lambda: rm.score([*long, ROWS[0]], max_length=60), "3 of 4 comparisons"),
        (lambda: rm.score(long[0], max_length=60), "1 of 1 comparison"),
        (lambda: prb.evaluate(rm, long, max_length=60, progress=False), "3 of 3 comparisons"),
        (lambda: rm.score(ROWS, max_length=60), ""),
        (lambda: prb.evaluate("baseline:length", long, progress=False), ""),
    ):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", prb.PrbWarning)
            call()
        texts = [str(one.message) for one in told if issubclass(one.category, prb.PrbWarning)]
        assert len(texts) == bool(count), texts
        assert not texts or f"{count} did not fit the maximum length" in texts[0]


def test_objects_show_only_what_has_a_value(rm):
    comparison = prb.Comparison(**ROWS[0])
    assert repr(comparison).startswith("Comparison(id='0', prompt=(Message(role='user', content='Tea?'")
    result = prb.evaluate("baseline:length", ROWS, progress=False)
    assert repr(result).startswith("Evaluation(model='baseline:length', n=3, accuracy=1.0")
    assert re.fullmatch(
        r"RewardModel\(name='.*', model_type='qwen3', dtype='float32', readout='.*', devices=1\)", repr(rm)
    )
    assert max(map(len, re.findall(r"\d+\.\d+", repr(result)))) <= 8
    assert repr(prb.LoadOptions()) == "LoadOptions()"
    assert repr(prb.SampleOptions(n=4)) == "SampleOptions(n=4)"
    assert repr(prb.ServeOptions(port=1, token="secret")) == "ServeOptions(port=1)"
    endpoint = prb.EndpointOptions(url="u", model="m")
    for value in (comparison, result, rm, prb.load("baseline:length"), prb.TrainSettings(), endpoint):
        assert "None" not in repr(value), repr(value)
        assert len(repr(value)) < 800


def test_completion_shows_public_names_only(rm):
    comparison = prb.Comparison(**ROWS[0])
    for value in (
        rm,
        comparison,
        prb.load("baseline:length"),
        prb.evaluate("baseline:length", ROWS, progress=False),
    ):
        assert private(value) == [], type(value).__name__
    assert {"score", "reward", "params", "module"} <= set(dir(rm))


def test_the_help_of_evaluate_is_one_screen():
    about = inspect.cleandoc(prb.evaluate.__doc__ or "")  # Python 3.13 removes the indentation itself
    assert len(inspect.signature(prb.evaluate).parameters) + len(about.splitlines()) <= 50
    named = re.findall(r"^  ([a-z_, ]+):", about, re.MULTILINE)
    assert {name for names in named for name in names.split(", ")} == inspect.signature(
        prb.evaluate
    ).parameters.keys()
