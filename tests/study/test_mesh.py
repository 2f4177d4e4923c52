"""A study does not depend on the mesh.

`python -m tests.study.test_mesh FOLDER` makes the same study on 1, 4 and 8 devices; it needs eight of them.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.personal.few_shot.registry import read_settings
from prb_jax.personal.saved import read_fitted, read_states
from prb_jax.platform.meshes import make_mesh
from prb_jax.study.write_features import write_features
from tests.plain_process import plain_environment
from tests.study.people import PlantedFeatures, planted_people

MESHES = {"one": (1, "fsdp=1"), "four": (4, "data=2,fsdp=2"), "eight": (8, "fsdp=-1")}
SETTINGS = ("pooled.l2=0.01", "offset.l2=0.01", "offset.spread=3", "lore_free.bases=3", "lore_free.l2=0.01",
            "lore_free.pull=0.3", "lore_free.anchor=0.001", "vpl.steps=40", "vpl.rounds=1", "vpl.hidden=8")  # fmt: skip


def run_studies(folder: Path) -> None:
    """Write FOLDER/one, FOLDER/four and FOLDER/eight."""
    source = PlantedFeatures()
    people = planted_people(source)
    write_features(source, people, out=folder / "store", progress=False)
    for name, (devices, mesh) in MESHES.items():
        prb.personalise(
            people, backbone=folder / "store", out=folder / name, methods=["lore_free", "vpl"], shots=(0, 4),
            settings=read_settings(SETTINGS), mesh=make_mesh(mesh, devices=jax.devices()[:devices]), progress=False,
        )  # fmt: skip


ROOT = Path(__file__).resolve().parents[2]
VPL = {"active_units", "kl_per_dimension", "accuracy", "accuracy_z_zero", "accuracy_shuffled_context",
       "accuracy_swapped_labels"}  # fmt: skip
COSTS = {"seconds_fit", "seconds_adapt_per_user", "disk_bytes_per_user"}


@pytest.mark.slow
def test_a_study_is_the_same_on_four_and_on_eight_devices(tmp_path: Path) -> None:
    environment = plain_environment(devices=8) | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.study.test_mesh", str(tmp_path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=900)
    rows, arrays, states = {}, {}, {}
    for name in MESHES:
        out = tmp_path / name
        results = json.loads((out / "results.json").read_text())
        rows[name] = [{key: value for key, value in row.items() if key not in COSTS} for row in results]
        for method in ("pooled", "offset", "lore_free", "vpl"):
            arrays[name, method] = jax.tree.leaves(read_fitted(out / "fitted" / method).fitted.arrays)
            states[name, method] = jax.tree.leaves(read_states(out / "states" / method, method=method).states)
    assert len({len(leaf) for leaf in states["one", "offset"]}) == 1
    for name, method in states:
        for kept in (states, arrays):
            for leaf, other in zip(kept[name, method], kept["one", method], strict=True):
                np.testing.assert_allclose(leaf, other, atol=1e-5, err_msg=f"{name} {method}")
        controls = json.loads((tmp_path / name / "study.json").read_text())["controls"]["vpl"][0]
        assert controls.keys() == VPL
    assert rows["four"] == rows["one"]
    assert rows["eight"] == rows["one"]


if __name__ == "__main__":
    run_studies(Path(sys.argv[1]))
