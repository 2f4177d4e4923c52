"""Time and memory of adapting a method to many people at once.

    python docs/many_users.py --users 25000,50000,100000

Each person has 16 comparisons of responses with 384 features, as of MiniLM, drawn at random; the method is `lore_free`
with 8 directions. The first line compiles. States are written as `prb personalise` writes them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from prb_jax.personal.few_shot.choices import Choices, UserRows
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users, bytes_per_user
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.personal.saved import UserStates, save_states
from prb_jax.platform.meshes import make_mesh

METHOD, WIDTH, BASES, RESPONSES = "lore_free", 384, 8, 3_000


def main() -> None:
    """Print a line for each number of users."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", default="2048,25000,50000,100000", help="with commas between them")
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--mesh", help="as of prb personalise")
    options = parser.parse_args()
    mesh, rng = make_mesh(options.mesh), np.random.default_rng(0)
    features = rng.normal(size=(RESPONSES, WIDTH)).astype(np.float32)
    basis = rng.normal(size=(WIDTH, BASES)).astype(np.float32) / np.sqrt(WIDTH)
    method = method_named(METHOD)
    fitted = Fitted(
        {"basis": basis, "mean": np.ones(BASES, np.float32)}, {"pull": np.float32(1)}, method.settings()
    )
    print(f"{METHOD}, {options.shots} comparisons of {WIDTH} features a person, {jax.device_count()} devices")
    print(f"{'users':>8} {'seconds':>8} {'us a user':>10} {'bytes, device':>14} {'bytes, disk':>12}")
    for users in map(int, options.users.split(",")):
        choices, contexts = people(rng, features, users=users, shots=options.shots)
        start = time.perf_counter()
        states = adapt_users(method, fitted, choices, contexts, key=jax.random.key(0), mesh=mesh)
        seconds = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            states_of_users = UserStates(tuple(map(str, range(users))), states)
            disk = save_states(Path(folder) / "states", states_of_users, method=METHOD, fitted="none")
        size = bytes_per_user(states, users)
        print(f"{users:>8,} {seconds:>8.2f} {1e6 * seconds / users:>10.1f} {size:>14} {disk / users:>12.1f}")


def people(
    rng: np.random.Generator, features: np.ndarray, *, users: int, shots: int
) -> tuple[Choices, UserRows]:
    """Choices at random, and the rows of each person."""
    count = users * shots
    choices = Choices(
        features=features,
        chosen=rng.integers(len(features), size=count),
        rejected=rng.integers(len(features), size=count),
        users=np.repeat(np.arange(users), shots),
        questions=np.zeros(count, np.int32),
        number_of_users=users,
    )
    places = np.arange(count).reshape(users, shots)
    return choices, UserRows(np.arange(users, dtype=np.int32), places, np.ones((users, shots), bool))


if __name__ == "__main__":
    main()
