"""A user's module trained on a mesh of four devices, a parameter of it split by the user.

python -m tests.training.module_on_mesh FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    from jax.sharding import NamedSharding, PartitionSpec

    import prb_jax as prb
    from prb_jax.platform.meshes import make_mesh
    from prb_jax.training.modules import ModuleTrainer
    from tests.tiny_module import tiny_module
    from tests.training.test_modules import settings
    from tests.training.tiny import rows

    module = tiny_module()
    split = NamedSharding(make_mesh("data=2,fsdp=2"), PartitionSpec("fsdp"))
    module.embed.embedding.set_value(jax.device_put(module.embed.embedding.get_value(), split))
    seen = []
    update = ModuleTrainer.update

    def watched(self, parts):
        metrics = update(self, parts)
        seen.append([leaf.sharding.spec for leaf in jax.tree.leaves(self.state["weights"]) if leaf.ndim == 2])
        return metrics

    ModuleTrainer.update = watched
    given = {"model": module, "tokenizer": Path(folder) / "tokenizer", "data": rows(40)}
    prb.train(settings(mesh="data=2,fsdp=2"), out=Path(folder) / "run", progress=False, **given)
    # The embedding and its two moments are split, and nothing else.
    assert all(specs.count(split.spec) == 3 for specs in seen), seen


if __name__ == "__main__":
    main(*sys.argv[1:])
