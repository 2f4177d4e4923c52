"""A path of stubs in place of the tools of a cloud or cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
# Variables that would change what the scripts do.
_FOREIGN = ("TPU_", "GKE_", "PRB_", "SLURM", "JAX_", "XLA_", "CUDA_VISIBLE_DEVICES", "DRY_RUN")

# Every call is a file of its own with the words as they came, each ended by a NUL byte.
_RECORDING = """#!/usr/bin/env bash
number=$(ls "$STUBS/calls" | wc -l)
printf '%s\\0' "{name}" "$@" >"$STUBS/calls/$(printf %04d "$number")"
"""


@dataclass(frozen=True)
class Stubs:
    """The folder of stubs, and a home folder for what they stand for."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def add(self, name: str, body: str = "") -> None:
        """A tool that records its words, then does what `body` (bash) says."""
        path = self.folder / "bin" / name
        path.write_text(_RECORDING.format(name=name) + body)
        path.chmod(0o755)

    def calls(self, *words: str) -> list[list[str]]:
        """What was called, in order; of the calls that have all these words."""
        files = sorted((self.folder / "calls").iterdir())
        calls = [file.read_bytes().decode().split("\0")[:-1] for file in files]
        return [call for call in calls if all(word in call for word in words)]

    def environment(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        path = f"{self.folder / 'bin'}:{clean['PATH']}"
        return clean | {"PATH": path, "STUBS": str(self.folder), "HOME": str(self.home)}

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One of the scripts in launch/, to its end."""
        return subprocess.run(
            [str(LAUNCH / script), *words],
            cwd=self.home,
            env=self.environment() | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def printed(self, script: str, *words: str, **variables: str) -> list[str]:
        """The commands that `--dry-run` prints; nothing may have been called."""
        end = words.index("--") if "--" in words else len(words)
        result = self.run(script, *words[:end], "--dry-run", *words[end:], **variables)
        assert result.returncode == 0, result.stderr
        assert self.calls() == []
        return result.stdout.splitlines()


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    stubs = Stubs(tmp_path)
    for name in ("bin", "calls", "home"):
        (tmp_path / name).mkdir()
    yield stubs
    # A test that failed may have left a job behind.
    for pid in tmp_path.glob("home/prb_jobs/*/child"):
        subprocess.run(["bash", "-c", f"kill -KILL -- -{pid.read_text().strip()}"], capture_output=True)
