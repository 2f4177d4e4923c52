"""Rewards of a user's module on one device and on a mesh of four, a parameter of it split by the user.

python -m tests.scoring.module_on_mesh OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax


def main(out: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    from jax.sharding import NamedSharding, PartitionSpec

    from prb_jax.models.readouts.load_options import LoadOptions
    from prb_jax.platform.meshes import make_mesh
    from prb_jax.scoring.module_model import load_module
    from tests.scoring.records import record
    from tests.tiny_module import tiny_module
    from tests.tiny_tokenizer import write_tokenizer

    tokenizer = write_tokenizer(Path(out).with_name("tokenizer"))
    rows = [record(number, 3) for number in range(16)]
    alone, four = make_mesh(devices=jax.devices()[:1]), make_mesh("data=2,fsdp=2")
    module = tiny_module()
    expected = load_module(module, LoadOptions(tokenizer=tokenizer, mesh=alone)).score(rows)
    split = NamedSharding(four, PartitionSpec("fsdp"))
    module.embed.embedding.set_value(jax.device_put(module.embed.embedding.get_value(), split))
    model = load_module(module, LoadOptions(tokenizer=tokenizer, mesh=four))
    found = {
        "scores": [[row.tolist() for row in scores] for scores in (expected, model.score(rows))],
        "embedding": str(model.params["embed"]["embedding"].get_value().sharding.spec),
        "kernel": str(model.params["head"]["kernel"].get_value().sharding.spec),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
