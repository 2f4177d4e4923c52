"""Samples of one policy on several meshes of four fake devices.

python -m tests.generation.mesh_samples FOLDER OUT MESH...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

_rng = np.random.default_rng(1)
PROMPTS = [_rng.integers(4, 400, size).tolist() for size in (5, 60, 21, 3)]
SAMPLING: dict[str, Any] = {"n": 3, "max_new_tokens": 10, "stop_ids": [3], "seed": 9}


def tokens(found: list[list[Any]]) -> list[list[list[int]]]:
    """The ids of samples."""
    return [[sample.token_ids.tolist() for sample in samples] for samples in found]


def main(folder: str, out: str, *meshes: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    import prb_jax as prb

    found = {mesh: tokens(prb.load_policy(folder, mesh=mesh).sample(PROMPTS, **SAMPLING)) for mesh in meshes}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
