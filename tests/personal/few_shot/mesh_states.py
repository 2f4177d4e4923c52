"""States, scores and fits of methods on meshes of 1, 4 and 8 devices: python -m tests.personal.few_shot.mesh_states OUT

Needs eight devices (XLA_FLAGS=--xla_force_host_platform_device_count=8).
"""

import sys
from pathlib import Path

import jax
import numpy as np

from prb_jax.personal.few_shot.protocol import adapt_users, score_users
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.personal.saved import UserStates, read_states, save_states
from prb_jax.sharding import batch_sharding, make_mesh
from tests.personal.few_shot.planted import world

SETTINGS = {
    "bases": (2,),
    "pull": (1.0,),
    "anchor": (1e-3,),
    "l2": (1e-2,),
    "steps": 40,
    "validation_shots": (9,),
}
MESHES = {"four": "data=2,fsdp=2", "eight": "fsdp=-1"}
SIZES = {"eight": 8, "four": 4}


def main(out: str) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 4)).astype(np.float32)
    rewards = rng.normal(size=(19, 4)) @ features.T
    made = world(features, rewards, seen=9, validation=5, choices=9, new_choices=18)
    method, key = method_named("lore_free"), jax.random.key(0)
    found = {}
    for place, text in {"none": None, **MESHES}.items():
        mesh = None if text is None else make_mesh(text, devices=jax.devices()[: 4 if place == "four" else 8])
        fitted = method.fit(
            made.seen, made.validation, settings=method.settings(**SETTINGS), key=key, mesh=mesh
        )
        states = adapt_users(method, fitted, made.new, made.contexts, key=key, mesh=mesh)
        scores = score_users(method, fitted, states, made.new, made.queries, mesh=mesh)
        found |= {f"{place}/basis": fitted.arrays["basis"], f"{place}/weights": states["weights"]}
        if place == "eight":
            found |= saved_states(states["weights"], Path(out).parent)
        found |= {
            f"{place}/scores": scores[made.queries.mask],
            f"{place}/loss": fitted.numbers["validation_loss"],
        }
    np.savez(out, **found)


def saved_states(weights: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """States that eight devices write, each its part, as four devices read them."""
    eight, four = (make_mesh(MESHES[name], devices=jax.devices()[:count]) for name, count in SIZES.items())
    rows = np.resize(weights, (16, weights.shape[1]))
    names = tuple(f"user {number}" for number in range(16))
    states = {"weights": jax.device_put(rows, batch_sharding(eight, 2))}
    save_states(folder / "states", UserStates(names, states), method="lore_free", fitted="x")
    read = read_states(folder / "states", method="lore_free", fitted="x", mesh=four)
    leaf = read.states["weights"]
    assert read.users == names
    assert {len(part.data) for part in leaf.addressable_shards} == {4}
    return {"rows": rows, "saved": np.asarray(leaf)}


if __name__ == "__main__":
    main(sys.argv[1])
