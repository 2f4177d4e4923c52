"""Samples of one policy on a mesh of four fake devices, and what they gather for a token and for a new prompt.

python -m tests.behaviour.generation.mesh_samples FOLDER OUT MESH|default
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute"
_rng = np.random.default_rng(1)
PROMPTS = [_rng.integers(4, 400, size).tolist() for size in (5, 60, 21, 3)]
SAMPLING: dict[str, Any] = {"n": 3, "max_new_tokens": 10, "stop_ids": [3], "seed": 9}


def tokens(samples: list[list[Any]]) -> list[list[list[int]]]:
    """The ids of samples."""
    return [[sample.token_ids.tolist() for sample in of_prompt] for of_prompt in samples]


def main(folder: str, out: str, mesh: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    import prb_jax as prb
    from prb_jax.behaviour.generation.programs import Task, choose_shape, make_programs, program_shardings
    from prb_jax.behaviour.generation.reading import lay_out_prompts, reading_program
    from prb_jax.behaviour.generation.rules import SampleOptions
    from prb_jax.behaviour.generation.steps import put_prompts
    from prb_jax.measure.plan.sampling import sampling_program
    from prb_jax.measure.plan.streams import BatchShape
    from prb_jax.platform.sharding import batch_sharding, to_global

    policy = prb.load_policy(folder, mesh=None if mesh == "default" else mesh)
    shape = BatchShape(batch=4, prefix=32, responses=2, response_length=16)
    program, _ = sampling_program(policy.config, shape, mesh=policy.mesh, dtype="float32")
    text = program.function.lower(*program.arguments, **program.named).compile().as_text()
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    prompts = [np.asarray(ids, np.int32) for ids in PROMPTS]
    task = Task(prompts=prompts, options=SampleOptions(max_new_tokens=10), stop_ids=())
    sizes = choose_shape(policy.program, task.options, longest=60, prompts=4)
    held, _ = make_programs(policy.program, sizes).empty(task)
    batch, new = lay_out_prompts(policy.program, prompts)
    streams = reading_program(policy.program)(policy.params, batch)
    new = jax.tree.map(lambda x: to_global(x, batch_sharding(policy.mesh, x.ndim)), new)
    put = jax.jit(put_prompts, out_shardings=program_shardings(policy.program)[0])
    moved = re.findall(COLLECTIVES, put.lower(held, streams, new).compile().as_text())
    facts = {
        "samples": tokens(policy.sample(PROMPTS, **SAMPLING)),
        "axes": {axis: size for axis, size in policy.mesh.shape.items() if size > 1},
        "moved": sorted(set(moved)),
        "gathered": [math.prod(map(int, sizes.split(","))) for sizes in gathered],
    }
    Path(out).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
