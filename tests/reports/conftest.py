"""Runs that several tests of reports read, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

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


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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
    return prb_jax.evaluate(
        scorer, data if isinstance(data, list) else str(data), out=out, progress=False, **options
    ).summary
