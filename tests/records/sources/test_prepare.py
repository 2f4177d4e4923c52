"""Prepared data sets: what was written is what is read, by us and by tensorflow-datasets."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import DataError, RunError
from prb_jax.records.intake import benchmark_of, describe_source, read_comparisons
from prb_jax.records.sources.prepare import prepare
from prb_jax.records.sources.prepared import PreparedComparisons, is_prepared
from tests import plain_process
from tests.json_lines import write_lines
from tests.records.benchmarks.layouts import write_rewardbench, write_rm_bench
from tests.records.sources.hub_layout import prb_row, prb_tables, write_layout

ROOT = Path(__file__).resolve().parents[3]
TURNS = (("system", "Be brief."), ("user", "q"), ("assistant", "r"), ("user", "last"))
ROWS = [
    prb_row("a") | {"user_id": "u", "question": "Où?", "rejected": "ici 🙂", "subset": "s", "margin": 0.5},
    {
        "id": "b",
        "prompt": [{"role": role, "content": content} for role, content in TURNS],
        "responses": ["x", "y", "z" * 100_000],
        "labels": [0.1, 3.0, -2.0],
        "profile": ["a post without id and category"],
    },
    {"id": "c", "question": "q", "responses": ["a", "b"], "labels": [0, 1], "margin": 0, "category": ""},
]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file of 3,000 pairs and the folder prepared from it."""
    root = tmp_path_factory.mktemp("many")
    rows = [
        {"id": f"r{i}", "user_id": f"u{i % 7}", "question": f"{i}?"}
        | {"chosen": "a" * (i % 9 + 1), "rejected": "bbb"}
        for i in range(3000)
    ]
    file = write_lines(root / "x.jsonl", rows)
    prepare([file], out=root / "prepared")
    return file, root / "prepared"


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "x.jsonl", ROWS)


def test_every_field_comes_back(file, tmp_path):
    prepared = prepare([file], out=tmp_path / "out")
    assert prepared.counts == {"test": 3}
    for folder in (tmp_path / "out", prepared.folder):
        comparisons = read_comparisons(folder)
        assert comparisons == read_comparisons(file)
        assert [c.is_pair for c in comparisons] == [True, False, False]
        assert comparisons[2].margin == 0.0


def test_random_access_in_the_order_of_the_source(many):
    file, folder = many
    comparisons, lazy = read_comparisons(file), PreparedComparisons(folder)
    assert len(lazy) == len(comparisons) == 3000
    for number in (0, 1, 1234, 2999, -1):
        assert lazy[number] == comparisons[number]
    assert lazy[10:20] == comparisons[10:20]
    assert lazy[20:10] == []
    assert list(lazy) == comparisons
    with pytest.raises(IndexError):
        lazy[3000]
    assert read_comparisons(folder, split="train") == comparisons  # one split answers to any name
    assert read_comparisons(folder, limit=3) == comparisons[:3]


def test_every_process_writes_the_same_bytes_and_removes_what_a_killed_one_left(many, tmp_path):
    file, folder = many
    left = tmp_path / "out" / "prb_comparisons" / "incomplete.ABCDEF_1.1.0"
    left.mkdir(parents=True)
    (left / "dataset_info.json").write_text('{"name": "prb_comparisons"}')
    plain_process.prb("prepare", "--data", file, "--out", tmp_path / "out", check=True)
    contents = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (folder, tmp_path / "out")
    ]
    assert contents[0] == contents[1]
    assert not left.exists()


def test_a_copy_continues_the_run_of_its_source_and_a_changed_one_does_not(many, tmp_path):
    file, folder = many
    described = describe_source(folder)
    assert described == describe_source(file)
    assert all(digest.startswith("sha256:") for digest in described["files"].values())
    out = tmp_path / "run"
    whole = prb.evaluate("baseline:length", file, out=out, progress=False)
    scores = (out / "scores.jsonl").read_bytes()
    (out / "summary.json").unlink()
    (out / "scores.jsonl").write_bytes(scores[:1000])
    assert prb.evaluate("baseline:length", folder, out=out, progress=False).summary == whole.summary
    assert (out / "scores.jsonl").read_bytes() == scores
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shard = next(copy.rglob("*.array_record*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match=r"array_record.*: changed since it was prepared"):
        describe_source(copy)


def test_a_folder_is_prepared_by_one_process_at_a_time(many, tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(RunError, match="another process prepares"):
        prepare([many[0]], out=tmp_path)
    os.close(descriptor)


def test_it_is_a_source_for_training(many):
    from prb_jax.training.config import TrainSettings
    from prb_jax.training.data import read_training_data

    from_file, from_folder = (read_training_data(TrainSettings(data=str(path))) for path in many)
    for role in ("train", "validation"):
        of_file, of_folder = getattr(from_file, role), getattr(from_folder, role)
        assert list(of_folder.comparisons) == list(of_file.comparisons)
        assert list(of_folder.known) == list(of_file.known)


def test_several_splits(tmp_path):
    folder = write_layout(tmp_path / "hub", prb_tables(rows=2), readme=True, splits=("train", "test"))
    words = ["prepare", "--data", f"prb:{folder}", "--split", "train", "test", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert len(read_comparisons(tmp_path / "out", split="train")) == 6
    assert [c.subset for c in read_comparisons(tmp_path / "out", subset="Art")] == ["Art", "Art"]
    with pytest.raises(DataError, match="no split 'validation'; it has"):
        read_comparisons(tmp_path / "out", split="validation")


def test_a_prepared_benchmark_keeps_its_rule(tmp_path):
    folder = write_rewardbench(tmp_path / "rb")
    source = f"rewardbench:{folder}"
    prepare([source], out=tmp_path / "out")
    assert benchmark_of(tmp_path / "out") == "rewardbench"
    assert read_comparisons(tmp_path / "out") == read_comparisons(source)
    one = prb.evaluate("baseline:random", source, out=tmp_path / "one", progress=False)
    for name in (str(tmp_path / "out"), f"rewardbench:{tmp_path / 'out'}"):
        two = prb.evaluate("baseline:random", name, out=tmp_path / "two", progress=False)
        assert two.summary["benchmarks"] == one.summary["benchmarks"]
    with pytest.raises(DataError, match="contains the benchmark 'rewardbench'"):
        read_comparisons(f"rm-bench:{tmp_path / 'out'}")
    rm = write_rm_bench(tmp_path / "rm")
    prepare([f"rm-bench:{rm}"], out=tmp_path / "rm-out")
    assert read_comparisons(f"rm-bench:{tmp_path / 'rm-out'}") == read_comparisons(f"rm-bench:{rm}")


def test_the_command_says_what_it_wrote_and_repeats_itself(file, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["prepare", "--data", file, "--out", str(out)]
    contents = []
    for _ in range(2):
        assert cli.main(command) == 0
        written = f"test: 3 comparisons\nwritten to {out / 'prb_comparisons' / '1.1.0'}\n"
        assert capsys.readouterr().out == written
        contents.append({path: path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert contents[0] == contents[1]
    write_lines(Path(file), ROWS[:2])
    assert cli.main(command) == 2
    assert "contains another prepared data set" in capsys.readouterr().err


def test_what_fails_leaves_nothing_behind(file, tmp_path):
    bad = write_lines(tmp_path / "bad.jsonl", [ROWS[1], {"id": "z"}])
    same = write_lines(tmp_path / "same.jsonl", ROWS[:1])
    for sources, message in (
        ([bad], r"bad\.jsonl:2: field 'question': missing"),
        ([file, same], "comparison id 'a' occurs twice: in .*x.jsonl and in .*same.jsonl"),
        ([str(tmp_path / "none.jsonl")], "no such file"),
        ([], "at least one source"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(sources, out=tmp_path / "deep" / "out")
        assert not (tmp_path / "deep").exists()
    for out, message in (
        (file, "the output folder is a file"),
        (f"{file}/out", r"cannot write .*x\.jsonl/out: Not a directory"),
    ):
        with pytest.raises(RunError, match=message):
            prepare([file], out=out)
    assert not is_prepared(tmp_path)


def test_damaged_files_are_named(file, tmp_path):
    prepared = prepare([file], out=tmp_path / "out")
    (prepared.folder / "features.json").unlink()
    with pytest.raises(DataError, match=r"out: cannot be read: .*prepare the data set again"):
        read_comparisons(tmp_path / "out")
    (prepared.folder / "metadata.json").write_text("[]")
    with pytest.raises(DataError, match=r"metadata\.json: expected a JSON object"):
        read_comparisons(tmp_path / "out")


TFDS = """
import socket, sys
def refuse(*arguments):
    raise AssertionError("no network is needed")
socket.socket.connect = socket.getaddrinfo = refuse
import tensorflow_datasets as tfds
source = tfds.data_source("prb_comparisons", split="test", data_dir={folder!r})
example = source[1234]
assert len(source) == 3000 and example["id"] == b"r1234" and example["question"] == b"1234?"
assert example["responses"] == [b"aa", b"bbb"] and list(example["labels"]) == [1.0, 0.0]
again = tfds.builder_from_directory({version!r}).as_data_source(split="test[10:20]")
assert [example["id"] for example in again] == [b"r%d" % i for i in range(10, 20)]
import prb_jax.records.sources.tfds_builder
assert tfds.builder_cls("prb_comparisons") is prb_jax.records.sources.tfds_builder.PrbComparisons
options = {{"sources": [{file!r}]}}
other = tfds.data_source("prb_comparisons", split="test", data_dir={other!r}, builder_kwargs=options)
assert other[7]["id"] == b"r7"
print({{"tensorflow", "torch", "jax"}} & set(sys.modules))
"""


def test_tensorflow_datasets_finds_it_by_name_without_tensorflow(many, tmp_path):
    file, folder = many
    code = TFDS.format(
        folder=str(folder),
        version=str(folder / "prb_comparisons" / "1.1.0"),
        file=file,
        other=str(tmp_path / "other"),
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"
