"""Attention kernels on eight devices, in a process of their own, against one device."""

import json
import subprocess
import sys

from tests.plain_process import ROOT, plain_environment


def test_trees_heads_and_queries_are_split_and_the_numbers_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.attention.kernel_on_mesh"],
        capture_output=True, text=True, cwd=ROOT, env=plain_environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert max(max(kernel.pop("differences")) for kernel in kernels.values()) < 2e-5
    assert kernels == {
        "splash": {"shard": [1, 192, 2, 32]},
        "cudnn_of_trees": {"shard": [1, 112, 2, 16], "calls": 2},
        "cudnn_of_streams": {"shard": [1, 512, 2, 16], "calls": 1},
    }
