"""Folders: every data file is read, or refused by name."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prb_jax.errors import DataError
from prb_jax.records.intake import describe_source, read_comparisons
from tests.json_lines import write_lines

HEADER = "id,question,chosen,rejected\n"


def write(folder, *names):
    """Files of each kind with a record; its id says which file it is from."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"id": f"{name}:0", "question": "q", "chosen": "a", "rejected": "b"}
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist([row]), path)
        elif name.endswith(".csv"):
            path.write_text(HEADER + ",".join(row.values()) + "\n")
        else:
            write_lines(path, [row])
    return folder


def names(folder, **options):
    return [c.id.split(":")[0] for c in read_comparisons(folder, **options)]


def test_files_of_every_kind_are_read_and_only_they_are_described(tmp_path):
    folder = write(tmp_path, "test-0.parquet", "test-1.jsonl", "test_2.csv", "eval.json", "train.jsonl")
    write(tmp_path, ".test.jsonl", "__cache__/test.jsonl", "dataset_info.json")
    (tmp_path / "LICENSE").write_text("free")
    for split, files in {
        "test": ["eval.json", "test-0.parquet", "test-1.jsonl", "test_2.csv"],
        "train": ["train.jsonl"],
    }.items():
        assert names(folder, split=split) == files
        assert list(describe_source(folder, split=split)["files"]) == files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["test.jsonl", "Art/test.jsonl"], "1 data file beside sub-folders, .*: test.jsonl; "),
        (["test.jsonl", "more.jsonl", "x.csv"], "2 data files whose names contain no split, .*: more.jsonl, x.csv; "),
        (["test.jsonl", "train_test.jsonl"], "names contain no split, or several: train_test.jsonl; "),
        (["test.jsonl", "test.tsv", "test.jsonl.zst"], "of an unsupported kind: test.jsonl.zst, test.tsv; "),
        ([], "cannot be read as a data set: no data files in it"),
        (["train.jsonl"], "no split 'test'; it has train"),
        (["Art/test.jsonl", "Life/train.jsonl"], r"\(Life\): no split 'test'; it has train"),
    ],
)  # fmt: skip
def test_files_that_would_be_lost_are_refused(tmp_path, files, message):
    write(tmp_path, *files)
    with pytest.raises(DataError, match=message):
        read_comparisons(tmp_path)


def test_folders_may_name_splits_and_subsets(tmp_path):
    write(tmp_path / "a", "test/0.jsonl", "test/1.csv", "dev/0.jsonl")
    assert names(tmp_path / "a") == ["test/0.jsonl", "test/1.csv"]
    assert names(tmp_path / "a", split="validation") == ["dev/0.jsonl"]
    write(tmp_path / "b", "data/filtered-00000-of-00001.jsonl", "data/test_raw-00000-of-00001.jsonl")
    assert names(tmp_path / "b", split="test_raw") == ["data/test_raw-00000-of-00001.jsonl"]
    write(tmp_path / "c", "Art/data/test.jsonl", "Art/train.jsonl", "Other/test/0.parquet")
    assert [c.subset for c in read_comparisons(tmp_path / "c")] == ["Art", "Other"]
    write(tmp_path / "d", "one.jsonl", "two.csv")  # no name says a split
    assert names(tmp_path / "d", split="train") == ["one.jsonl", "two.csv"]


def declare(folder, configs):
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n# A data set\n")
    return folder


def test_a_declaration_says_what_belongs_to_the_data_set(tmp_path):
    files = ["a/x.jsonl", "a/y.csv", "b/deep/z.jsonl", "c/test.jsonl"]
    write(tmp_path, *files, "raw/all.jsonl", "c/train.jsonl")
    configs = [
        {"config_name": "A", "data_files": [{"split": "test", "path": ["a/*.jsonl", "a/y.*"]}]},
        {"config_name": "B", "data_files": [{"split": "test", "path": "b/**"}]},
        {"config_name": "C", "data_dir": "c"},
    ]
    declare(tmp_path, configs)
    assert names(tmp_path) == files
    assert [c.subset for c in read_comparisons(tmp_path)] == ["A", "A", "B", "C"]
    assert set(describe_source(tmp_path)["files"]) == {"README.md", *files}
    declare(tmp_path, [{"config_name": "default", "data_files": "raw/*.jsonl"}])
    assert names(tmp_path, split="train") == ["raw/all.jsonl"]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([{"data_files": "x"}], r"README.md: configs: expected objects with a config_name, found .*data_files"),
        ([{"config_name": "A", "data_files": [{"path": "x"}]}], "configs: A: data_files: expected a split and a path"),
        ([{"config_name": "A", "data_files": "../x.jsonl"}], "expected a path within the folder, found '../x.jsonl'"),
        ([{"config_name": "A", "data_files": "https://x.org/y.csv"}], "expected a path within the folder"),
        ([{"config_name": "A", "data_files": "/etc/*"}], "expected a path within the folder"),
        ([{"config_name": "A", "data_files": "none*.jsonl"}], "no split 'test'; it has train"),
        ({"config_name": "A"}, "configs: expected a list, found dict"),
    ],
)  # fmt: skip
def test_declarations_that_cannot_be(tmp_path, configs, message):
    with pytest.raises(DataError, match=message):
        read_comparisons(declare(write(tmp_path, "test.jsonl"), configs))


def test_texts_that_look_like_dates_stay_texts(tmp_path):
    row = {"id": "2024-01-05", "question": "When?", "chosen": "2024-01-05 10:00:00", "rejected": "2024-01-06"}
    write_lines(tmp_path / "test-0.jsonl", [row])
    (tmp_path / "test-1.csv").write_text(HEADER + ",".join((row | {"id": "2024-01-06"}).values()) + "\n")
    pq.write_table(pa.Table.from_pylist([row | {"id": "2024-01-07"}]), tmp_path / "test-2.parquet")
    comparisons = read_comparisons(tmp_path)
    assert [c.id for c in comparisons] == ["2024-01-05", "2024-01-06", "2024-01-07"]
    assert {c.responses for c in comparisons} == {("2024-01-05 10:00:00", "2024-01-06")}
