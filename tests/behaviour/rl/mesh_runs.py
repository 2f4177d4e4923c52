"""Short runs of one policy on several meshes of four fake devices.

python -m tests.behaviour.rl.mesh_runs MODEL OUT MESH...
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(model: str, out: str, *meshes: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    import prb_jax as prb
    from prb_jax.commands.process import enable_compilation_cache
    from tests.behaviour.rl.tiny import comparisons, has_letter, settings

    enable_compilation_cache()
    for mesh in meshes:
        given = settings(Path(model)) | {"mesh": mesh, "steps": 2, "value.trunk": "own"}
        prb.ppo(given, out=Path(out) / mesh, data=comparisons(), reward=has_letter, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
