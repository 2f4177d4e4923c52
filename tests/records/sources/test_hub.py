import os
from pathlib import Path

import datasets
import pytest

from prb_jax.errors import DataError
from prb_jax.records.benchmarks.prb import PRB_REPOSITORY
from prb_jax.records.intake import each_row, read_comparisons
from prb_jax.records.sources.source import short_name

from .hub_layout import CONFIGS, prb_row, prb_tables, write_layout


@pytest.fixture(params=[True, False], ids=["readme", "folders"])
def folder(request, tmp_path):
    return write_layout(tmp_path / "prb", prb_tables(), readme=request.param)


@pytest.fixture
def hub(hub_of, tmp_path):
    """What the hub, which has the data set of the paper alone, is asked for."""
    return hub_of(write_layout(tmp_path / "hub", prb_tables(), readme=True))


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
    for source in (folder, "prb"):
        with pytest.raises(DataError, match="no subset 'Sport'; expected one of Lifestyle, Art, Society"):
            read_comparisons(source, subset="Sport")
    with pytest.raises(DataError, match=r"prb \(Lifestyle\w+\): no split 'train'; it has test"):
        read_comparisons(folder, split="train")


@pytest.mark.parametrize("source", ["prb", PRB_REPOSITORY])
def test_the_papers_data_set_by_name(hub, source):
    comparisons = read_comparisons(source)
    assert hub == [(PRB_REPOSITORY, config, "test") for config in CONFIGS]
    assert len(comparisons) == 9


def test_one_subset_of_the_papers_data_set_loads_no_other(hub):
    comparisons = read_comparisons("prb", subset="Society", limit=2)
    assert hub == [(PRB_REPOSITORY, "Society_and_Culture", "test")]
    assert [(c.id, c.subset) for c in comparisons] == [("S0", "Society"), ("S1", "Society")]


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


def test_ids_shared_by_configs_are_told_apart_and_those_of_one_config_are_an_error(tmp_path):
    tables = {config: [prb_row("1"), prb_row("2")] for config in CONFIGS}
    folder = write_layout(tmp_path / "x", tables, readme=True)
    ids = [c.id for c in read_comparisons(folder)]
    assert ids == ["Lifestyle/1", "Lifestyle/2", "Art/1", "Art/2", "Society/1", "Society/2"]
    assert [c.id for c in read_comparisons(folder, subset="Art")] == ["1", "2"]
    twice = {CONFIGS[0]: [prb_row("1"), prb_row("2"), prb_row("1")]}
    with pytest.raises(DataError, match=r"row 3: field 'id': '1' was already used at .*row 1"):
        read_comparisons(write_layout(tmp_path / "y", twice, readme=True))


def test_one_config_has_no_subset_of_its_own(tmp_path):
    rows = [prb_row("1") | {"subset": "x"}, prb_row("2") | {"subset": "y"}]
    folder = write_layout(tmp_path / "x", {"data": rows}, readme=False)
    assert [c.subset for c in read_comparisons(folder)] == ["x", "y"]
    assert [c.id for c in read_comparisons(folder, subset="y")] == ["2"]
    with pytest.raises(DataError, match="no subset 'z'; expected one of x, y"):
        read_comparisons(folder, subset="z")


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


def test_rows_say_where_they_stand(folder, hub):
    file = f"{folder}/Art_and_Entertainment/test-00000-of-00001.parquet"
    for source, place in ((folder, file), (PRB_REPOSITORY, f"{PRB_REPOSITORY} (Art, test)")):
        assert list(each_row(source, subset="Art"))[1].where == f"{place}: row 2"


def test_short_names():
    assert [short_name(config) for config in CONFIGS] == ["Lifestyle", "Art", "Society"]
    assert short_name("society") == "Society"
    assert short_name("chat") == "chat"
