"""The same study on 1, 4 and 8 devices: python -m tests.study.mesh_studies FOLDER

Needs eight devices (XLA_FLAGS=--xla_force_host_platform_device_count=8).
"""

import sys
from pathlib import Path

import jax

import prb_jax as prb
from prb_jax.personal.few_shot.registry import read_settings
from prb_jax.sharding import make_mesh
from prb_jax.study.write_features import write_features
from tests.study.people import PlantedFeatures, planted_people

MESHES = {"one": (1, "fsdp=1"), "four": (4, "data=2,fsdp=2"), "eight": (8, "fsdp=-1")}
SETTINGS = ("pooled.l2=0.01", "offset.l2=0.01", "offset.spread=3", "lore_free.bases=3", "lore_free.l2=0.01",
            "lore_free.pull=0.3", "lore_free.anchor=0.001", "vpl.steps=40", "vpl.rounds=1", "vpl.hidden=8")  # fmt: skip


def main(folder: Path) -> None:
    """Write FOLDER/one, FOLDER/four and FOLDER/eight."""
    source = PlantedFeatures()
    people = planted_people(source)
    write_features(source, people, out=folder / "store", progress=False)
    for name, (devices, mesh) in MESHES.items():
        prb.personalise(
            people,
            backbone=folder / "store",
            out=folder / name,
            methods=["lore_free", "vpl"],
            shots=(0, 4),
            settings=read_settings(SETTINGS),
            mesh=make_mesh(mesh, devices=jax.devices()[:devices]),
            progress=False,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
