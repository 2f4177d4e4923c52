"""Runs that several tests of reports read, and the command line in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import prb_jax
from prb_jax import cli

Run = Callable[..., str]


@pytest.fixture
def prb(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a verb, and return what it printed; one that is refused (status 2) says so in the one line returned."""

    def run(*words: object, status: int = 0) -> str:
        assert cli.main(list(map(str, words))) == status
        printed = capsys.readouterr()
        if not status:
            assert printed.err == ""
            return printed.out
        (line,) = printed.err.splitlines()
        return line

    return run


def printed(table: object, *, width: int = 200) -> str:
    """A table as a terminal shows it."""
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def pairs(count: int, *, words: str = "green tea ") -> list[prb_jax.Comparison]:
    return [
        prb_jax.Comparison(
            id=f"c{i}",
            question="?",
            chosen=words * (1 + i * 7 % 5),
            rejected="no " * (1 + i % 3),
            user_id=f"u{i % 8}",
            profile=[{"id": f"p{i % 8}", "text": "I grow green tea." if i % 2 else "No."}],
        )
        for i in range(count)
    ]


def evaluate(scorer: Any, data: Any, out: Path, **options: Any) -> dict[str, Any]:
    """The summary of a run."""
    return prb_jax.evaluate(scorer, data, out=out, progress=False, **options).summary
