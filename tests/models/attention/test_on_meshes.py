"""Attention over streams on eight devices, in a process of their own, against one device."""

import json
import subprocess
import sys

import pytest

from tests.plain_process import ROOT, plain_environment
from tests.sweeps import sweep

MESHES = ("data=2,sequence=2,tensor=2", "data=2,fsdp=2,tensor=2", "fsdp=2,sequence=4")


@pytest.mark.parametrize("mesh", sweep(MESHES, few=(0,)))
def test_streams_heads_and_queries_are_split_and_the_numbers_stay(mesh: str) -> None:
    """Of every implementation, with windows: output, and gradients, those of keys and values added up over the
    parts."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.attention.kernel_on_mesh", mesh],
        capture_output=True, text=True, cwd=ROOT, env=plain_environment(), timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, one in found.items():
        assert max(one["differences"]) < 1e-5, (name, one["differences"])
        kind = name.partition(" ")[0]
        rows = 1 if mesh.startswith("data=2,fsdp") else 2
        sizes = {"sequence=2": (512, 2), "sequence=4": (256, 4)}
        tokens, heads = next((sizes[part] for part in mesh.split(",") if part in sizes), (1024, 2))
        assert one["shard"] == [rows, tokens, heads, 32], name
        assert one.get("calls") == (1 if kind == "cudnn" else None), name
