import os
from pathlib import Path

import datasets
import pytest

from prb_jax.benchmarks.prb import PRB_REPOSITORY, short_name
from prb_jax.data.lines import Row
from prb_jax.errors import DataError
from prb_jax.sources.reading import describe_source, each_row, read_comparisons

from .hub_layout import CONFIGS, prb_row, prb_tables, write_layout


@pytest.fixture(params=[True, False], ids=["readme", "folders"])
def folder(request, tmp_path):
    return write_layout(tmp_path / "prb", prb_tables(), readme=request.param)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub replaced by a folder; what ``load_dataset`` is asked for is recorded."""
    folder = write_layout(tmp_path / "hub", prb_tables(), readme=True)
    asked = []
    load_dataset = datasets.load_dataset

    def load_from_folder(path, name=None, **options):
        asked.append((path, name, options["split"]))
        return load_dataset(str(folder), name, **(options | {"cache_dir": str(tmp_path / "cache")}))

    monkeypatch.setattr(datasets, "load_dataset", load_from_folder)
    return asked


def test_three_configs_in_the_papers_order(folder):
    comparisons = read_comparisons(folder)
    assert [c.subset for c in comparisons] == ["Lifestyle"] * 3 + ["Art"] * 3 + ["Society"] * 3
    assert [c.id for c in comparisons] == ["L0", "L1", "L2", "A0", "A1", "A2", "S0", "S1", "S2"]
    first = comparisons[0]
    assert first.question == "What should I do about L0?"
    assert first.responses == ("good L0", "bad L0")
    assert [post.text for post in first.profile] == ["post 0 of L0", "post 1 of L0"]
    assert first.rubric_aspects[0].reason == "r"
    assert first.narrative == "private"
    assert first.user_id is None


@pytest.mark.parametrize("subset", ["Art", "art", "Art_and_Entertainment"])
def test_one_subset_by_long_or_short_name(folder, subset):
    comparisons = read_comparisons(str(folder), subset=subset)
    assert [c.id for c in comparisons] == ["A0", "A1", "A2"]
    assert {c.subset for c in comparisons} == {"Art"}


def test_unknown_subset_and_split(folder):
    with pytest.raises(DataError, match="no subset 'Sport'; expected one of Lifestyle, Art, Society"):
        read_comparisons(folder, subset="Sport")
    with pytest.raises(DataError, match=r"prb \(Lifestyle\w+\): no split 'train'; it has test"):
        read_comparisons(folder, split="train")


def test_other_splits(tmp_path):
    folder = write_layout(tmp_path / "x", prb_tables(rows=1), readme=True, split="validation")
    assert len(read_comparisons(folder, split="validation")) == 3


@pytest.mark.parametrize("source", ["prb", PRB_REPOSITORY])
def test_the_papers_data_set_by_name(hub, source):
    comparisons = read_comparisons(source)
    assert hub == [(PRB_REPOSITORY, config, "test") for config in CONFIGS]
    assert len(comparisons) == 9


def test_one_subset_of_the_papers_data_set_loads_no_other(hub):
    comparisons = read_comparisons("prb", subset="Society", limit=2)
    assert hub == [(PRB_REPOSITORY, "Society_and_Culture", "test")]
    assert [(c.id, c.subset) for c in comparisons] == [("S0", "Society"), ("S1", "Society")]
    with pytest.raises(DataError, match="no subset 'Sport'; expected one of Lifestyle, Art, Society"):
        read_comparisons("prb", subset="Sport")


def test_another_hub_data_set(hub, monkeypatch):
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["Art_and_Entertainment"])
    comparisons = read_comparisons("someone/some-set")
    assert hub == [("someone/some-set", "Art_and_Entertainment", "test")]
    assert [c.subset for c in comparisons] == [None] * 3


def test_no_network(monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    with pytest.raises(DataError, match=r"hub cannot be reached \(Couldn't reach the Hub\)"):
        read_comparisons("prb")
    with pytest.raises(DataError, match="someone/some-set: no such file or folder"):
        read_comparisons("someone/some-set")


def test_ids_shared_by_configs_are_told_apart(tmp_path):
    tables = {config: [prb_row("1"), prb_row("2")] for config in CONFIGS}
    folder = write_layout(tmp_path / "x", tables, readme=True)
    ids = [c.id for c in read_comparisons(folder)]
    assert ids == ["Lifestyle/1", "Lifestyle/2", "Art/1", "Art/2", "Society/1", "Society/2"]
    assert [c.id for c in read_comparisons(folder, subset="Art")] == ["1", "2"]


def test_ids_used_twice_in_one_config_are_an_error(tmp_path):
    tables = {CONFIGS[0]: [prb_row("1"), prb_row("2"), prb_row("1")]}
    folder = write_layout(tmp_path / "x", tables, readme=True)
    with pytest.raises(DataError, match=r"row 3: field 'id': '1' was already used at .*row 1"):
        read_comparisons(folder)


def test_wrong_column_type_names_config_row_and_field(tmp_path):
    tables = prb_tables()
    tables[CONFIGS[1]] = [row | {"chosen": 5} for row in tables[CONFIGS[1]]]
    folder = write_layout(tmp_path / "x", tables, readme=True)
    with pytest.raises(
        DataError, match=r"/test-00000-of-00001.parquet: row 1: field 'chosen': expected a string, found 5"
    ):
        read_comparisons(folder)


def test_objects_of_lists_are_turned_back(tmp_path):
    row = prb_row("1")
    turned = row | {"profile": {k: [p[k] for p in row["profile"]] for k in ("id", "category", "text")}}
    folder = write_layout(tmp_path / "x", {"only": [turned]}, readme=True)
    assert [p.text for p in read_comparisons(folder)[0].profile] == ["post 0 of 1", "post 1 of 1"]


def test_one_config_has_no_subset_of_its_own(tmp_path):
    rows = [prb_row("1") | {"subset": "x"}, prb_row("2") | {"subset": "y"}]
    folder = write_layout(tmp_path / "x", {"data": rows}, readme=False)
    assert [c.subset for c in read_comparisons(folder)] == ["x", "y"]
    assert [c.id for c in read_comparisons(folder, subset="y")] == ["2"]
    with pytest.raises(DataError, match="no subset 'z'; expected one of x, y"):
        read_comparisons(folder, subset="z")


def test_json_lines_in_the_same_layout(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"id": "1", "question": "q", "chosen": "a", "rejected": "b"}\n')
    assert read_comparisons(tmp_path)[0].responses == ("a", "b")


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read as a data set"):
        read_comparisons(tmp_path)


def test_damaged_parquet(folder):
    file = next(folder.rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{file}: not a whole parquet file"):
        read_comparisons(folder)


def test_reading_a_folder_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before = set(tmp_path.rglob("*")), set(cache.iterdir()) if cache.is_dir() else set()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    read_comparisons(folder)
    assert not os.listdir(temporary)
    temporary.rmdir()
    assert (set(tmp_path.rglob("*")), set(cache.iterdir()) if cache.is_dir() else set()) == before


def test_a_changed_file_is_read_anew(tmp_path):
    folder = write_layout(tmp_path / "a" / "x", {"data": [prb_row("1")]}, readme=True)
    described = describe_source(folder)
    assert [c.id for c in read_comparisons(folder)] == ["1"]
    folder.rename(tmp_path / "moved")
    assert describe_source(tmp_path / "moved") == described
    write_layout(folder, {"data": [prb_row("2")]}, readme=True)
    assert [c.id for c in read_comparisons(folder)] == ["2"]
    assert describe_source(folder) != described


def test_rows_say_where_they_stand(folder):
    row = list(each_row(folder, subset="Art"))[1]
    assert isinstance(row, Row)
    assert row.where == f"{folder}/Art_and_Entertainment/test-00000-of-00001.parquet: row 2"


def test_rows_of_the_hub_say_where_they_stand(hub):
    row = list(each_row(PRB_REPOSITORY, subset="Art"))[1]
    assert row.where == f"{PRB_REPOSITORY} (Art, test): row 2"


def test_short_names():
    assert [short_name(config) for config in CONFIGS] == ["Lifestyle", "Art", "Society"]
    assert short_name("society") == "Society"
    assert short_name("chat") == "chat"
