"""First calls of a Python user: exchanged arguments, names, types and cut texts are told; objects are short."""

import inspect
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
    lines = len(inspect.signature(prb.evaluate).parameters) + len((prb.evaluate.__doc__ or "").splitlines())
    assert lines <= 50
    named = re.findall(r"^ {6}([a-z_, ]+):", prb.evaluate.__doc__ or "", re.MULTILINE)
    assert {name for names in named for name in names.split(", ")} == inspect.signature(
        prb.evaluate
    ).parameters.keys()
