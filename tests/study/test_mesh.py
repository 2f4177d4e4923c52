"""A study does not depend on the mesh."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from prb_jax.personal.saved import read_fitted, read_states
from tests.plain_process import plain_environment
from tests.study.mesh_studies import MESHES

ROOT = Path(__file__).resolve().parents[2]
VPL = {"active_units", "kl_per_dimension", "accuracy", "accuracy_z_zero", "accuracy_shuffled_context",
       "accuracy_swapped_labels"}  # fmt: skip
COSTS = {"seconds_fit", "seconds_adapt_per_user", "disk_bytes_per_user"}


@pytest.mark.slow
def test_a_study_is_the_same_on_four_and_on_eight_devices(tmp_path: Path) -> None:
    environment = plain_environment(devices=8) | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.study.mesh_studies", str(tmp_path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=900)
    rows, arrays, states = {}, {}, {}
    for name in MESHES:
        out = tmp_path / name
        found = json.loads((out / "results.json").read_text())
        rows[name] = [{key: value for key, value in row.items() if key not in COSTS} for row in found]
        for method in ("pooled", "offset", "lore_free", "vpl"):
            arrays[name, method] = jax.tree.leaves(read_fitted(out / "fitted" / method).fitted.arrays)
            states[name, method] = jax.tree.leaves(read_states(out / "states" / method, method=method).states)
    assert len({len(leaf) for leaf in states["one", "offset"]}) == 1
    for (name, method), leaves in states.items():
        for kept, expected in (
            (leaves, states["one", method]),
            (arrays[name, method], arrays["one", method]),
        ):
            for leaf, other in zip(kept, expected, strict=True):
                np.testing.assert_allclose(leaf, other, atol=1e-5, err_msg=f"{name} {method}")
        controls = json.loads((tmp_path / name / "study.json").read_text())["controls"]["vpl"][0]
        assert controls.keys() == VPL
    assert rows["four"] == rows["one"]
    assert rows["eight"] == rows["one"]
