"""A training step of 10,000 users on several devices: which arrays they exchange, and what comes out.

python -m tests.personal.step_programs OUT DEVICES MESH...
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

USERS, TOKENS, ROWS = 10_000, 3, 8
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def collectives(program: str) -> list[tuple[str, list[int]]]:
    """(kind, shape) of every array that devices exchange in a compiled program."""
    return [
        (kind, [int(size) for size in shape.split(",") if size])
        for types, kind in _COLLECTIVE.findall(program)
        for shape in _SHAPE.findall(types)
    ]


def one_step(mesh: Any) -> dict[str, Any]:
    """Two microbatches and an update; the exchanged arrays of each program, and the touched rows after it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from prb_jax.personal.method import Users, with_prefixes
    from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
    from prb_jax.training.objective import USER
    from tests.training.small_batches import (
        batch_of,
        build,
        extras_of,
        initial_params,
        random_trees,
        rows_of,
        small_config,
    )

    config, users = small_config(), Users(tuple(f"{user:05}" for user in range(USERS)))
    method = SoftPrompts(
        table=users,
        tokens=TOKENS,
        width=config.hidden_size,
        places=ROWS,
        generic_share=0.0,
        seed=0,
        optimizer=RowAdam(learning_rate=lambda step: 1e-2),
        mesh=mesh,
    )
    step, state, frozen = build(
        config, tuning="lora", params=initial_params(config), mesh=mesh, method=method
    )
    trees = with_prefixes(random_trees(8), [np.zeros(TOKENS, np.int32)] * 8)
    of_users = np.array([7, 7, 0, 9_999, 10_000, 3, 0, 7])
    chosen = method.rows_of_step(of_users, np.arange(len(of_users)), step=0)
    extras = dataclasses.replace(extras_of(trees), users=chosen.slots)
    whole = batch_of(trees)
    batches = [
        step.place(jax.tree.map(lambda leaf, rows=rows: leaf[rows], whole), rows_of(extras, rows))
        for rows in (slice(0, 4), slice(4, 8))
    ]
    before = np.asarray(state[USER]["table"][0])
    programs = {
        "take": step.take.lower(state, chosen.ids),
        "accumulate": step.accumulate.lower(state, frozen, *batches[0]),
        "update": step.update.lower(state),
    }
    exchanged = {name: collectives(lowered.compile().as_text()) for name, lowered in programs.items()}
    for number in range(2):
        state = step.take(state, jnp.asarray(chosen.ids))
        for placed in batches:
            state = step.accumulate(state, frozen, *placed)
        state, metrics = step.update(state)
        assert float(metrics["finite"]) == 1.0, number
    table = np.asarray(state[USER]["table"])
    compiled: tuple[Any, ...] = (step.accumulate, step.update, step.take)
    return {
        "collectives": exchanged,
        "moved": np.flatnonzero(np.abs(table - before).max(axis=(1, 2)) > 0).tolist(),
        "rows": table[np.unique(of_users)].tolist(),
        "compiles": [function._cache_size() for function in compiled],
        "local": list(state[USER]["table"].addressable_shards[0].data.shape),
    }


def main(out: str, devices: int, meshes: list[str]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)

    from prb_jax.sharding import make_mesh

    Path(out).write_text(json.dumps({spec: one_step(make_mesh(spec)) for spec in meshes}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
