"""`.ci/run`: what fails is named at the end, and types and tests both run whatever the other says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.plain_process import ROOT

MAKE = """#!/usr/bin/env bash
echo "$1 ran"
[[ " $FAILING " != *" $1 "* ]]
"""


@pytest.mark.parametrize(
    ("failing", "last"),
    [
        ("", None),
        ("types", "FAILED: types"),
        ("test", "FAILED: tests"),
        ("types test", "FAILED: types tests"),
    ],
)
def test_types_and_tests_run_both_and_each_fails_the_run(
    tmp_path: Path, failing: str, last: str | None
) -> None:
    for name in ("make", "chromium"):
        (tmp_path / name).write_text(MAKE)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FAILING": failing,
        "TESTS": "test",
    }
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert {"lint ran", "types ran", "test ran"} <= set(lines), done.stderr
    assert done.returncode == (1 if failing else 0)
    assert (done.stderr.splitlines() or [None])[-1] == last
