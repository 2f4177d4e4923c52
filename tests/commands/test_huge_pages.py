"""A process that computes starts again with huge pages, once, and only where the system has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prb_jax.commands import COMPUTING, VERBS, process

PROGRAM = """
import os, sys
from prb_jax.commands.process import start_with_huge_pages
start_with_huge_pages()
print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


def test_every_computing_verb_exists() -> None:
    assert {*COMPUTING} <= {name for verbs in VERBS.values() for name in verbs}


def glibc(number: str) -> object:
    return lambda name: f"glibc {number}"


def test_it_starts_once_with_the_same_words(tmp_path: Path) -> None:
    """The same process with the same arguments, in place of an endless chain."""
    if not process._have_huge_pages():
        pytest.skip("no huge pages on request here")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), "a b", "--c"]
    environment = {"PYTHONPATH": str(Path(process.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        output, _ = child.communicate(timeout=60)
    assert output == f"{child.pid} {process.HUGE_PAGES} ['a b', '--c']\n"


@pytest.mark.parametrize(
    ("number", "mode", "expected"),
    [
        ("2.36", "always [madvise] never", True),
        ("2.36", "[always] madvise never", False),
        ("2.36", "always madvise [never]", False),
        ("2.34", "always [madvise] never", False),
    ],
)
def test_only_where_the_system_has_them_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, mode: str, expected: bool
) -> None:
    (tmp_path / "enabled").write_text(mode)
    monkeypatch.setattr(process, "_KERNEL_MODE", tmp_path / "enabled")
    monkeypatch.setattr("os.confstr", glibc(number))
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    process.start_with_huge_pages()  # the user's own settings, also none, are kept
    assert not started
    monkeypatch.delenv("GLIBC_TUNABLES")
    process.start_with_huge_pages()
    assert bool(started) == expected
