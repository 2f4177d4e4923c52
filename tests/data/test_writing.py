"""Comparisons to disk and back."""

import errno
import os

import pytest

from prb_jax import Comparison, DataError, read_comparisons
from prb_jax.data.writing import write_comparisons

ITEMS = [
    Comparison(
        id="1", question="Größe? 😀", chosen="a\u2028b", rejected="c", user_id="u", subset="s", margin=0.5,
        profile=[{"id": "p", "category": "x", "text": "line\nline"}], narrative="n",
        rubric_aspects=[{"aspect": "a", "evidence": "e", "reason": "r"}],
    ),
    Comparison(
        id="2", responses=["a", "b", "c"], labels=[0, 1, 0.5],
        prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "below/a.jsonl.gz"])
def test_there_and_back(tmp_path, name):
    path = tmp_path / name
    assert write_comparisons(path, ITEMS) == 2
    assert read_comparisons(path) == ITEMS
    before = path.read_bytes()
    write_comparisons(path, ITEMS)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_another_kind_of_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv: expected a name ending in \.jsonl"):
        write_comparisons(tmp_path / "a.csv", ITEMS)


def test_no_space_left_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_comparisons(path, ITEMS)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"cannot write .*a\.jsonl: No space left on device"):
        write_comparisons(path, ITEMS[:1])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.jsonl"]
