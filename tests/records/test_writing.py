"""Files that a verb writes once: a repeated call ends well, and another one's file is never written over."""

from __future__ import annotations

from pathlib import Path

import pytest

from prb_jax.errors import RunError
from prb_jax.records.writing import write_once


def test_the_same_files_again_are_finished_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "new" / "one", tmp_path / "two"
    write_once({one: b"1", two: b"2"})
    assert capsys.readouterr().err == ""
    write_once({one: b"1", two: b"2"})
    assert capsys.readouterr().err == f"prb: {one}, {two}: finished already by an earlier call\n"
    two.unlink()  # as after a kill between them
    write_once({one: b"1", two: b"2"})
    assert (capsys.readouterr().err, two.read_bytes()) == ("", b"2")
    one.unlink()
    with pytest.raises(
        RunError,
        match="two: exists already with other contents; remove it, or choose another name with --out",
    ):
        write_once({one: b"1", two: b"3"})
    assert not one.exists()
    write_once({one: b"1", two: b"3"}, replace=True)
    assert two.read_bytes() == b"3"
    with pytest.raises(RunError, match="new: exists already"):
        write_once({tmp_path / "new": b"1"})
