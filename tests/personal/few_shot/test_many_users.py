"""Many users at once: the same states on every mesh, and a hundred thousand of them.

`python -m tests.personal.few_shot.test_many_users OUT` needs eight devices.
"""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from prb_jax.personal.few_shot import bayes, protocol
from prb_jax.personal.few_shot.choices import Posts, UserRows, group
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users, bytes_per_user, score_users
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.personal.saved import UserStates, read_states, save_states
from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.sharding import batch_sharding
from tests.personal.few_shot.planted import choices_of, world
from tests.plain_process import plain_environment

ROOT = Path(__file__).resolve().parents[3]
MESHES = {"data=2,fsdp=2": 4, "fsdp=-1": 8}  # their devices


def write_states(out: str) -> None:
    """States, scores and fits of a method on meshes of 1, 4 and 8 devices."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 4)).astype(np.float32)
    rewards = rng.normal(size=(19, 4)) @ features.T
    made = world(features, rewards, seen=9, validation=5, choices=9, new_choices=18)
    method, key = method_named("lore_free"), jax.random.key(0)
    one = {name: (value,) for name, value in {"bases": 2, "pull": 1.0, "anchor": 1e-3, "l2": 1e-2}.items()}
    settings, results = method.settings(**one, steps=40, validation_shots=(9,)), {}
    meshes = {text: make_mesh(text, devices=jax.devices()[:count]) for text, count in MESHES.items()}
    for name, mesh in {"none": None, **meshes}.items():
        fitted = method.fit(made.seen, made.validation, settings=settings, key=key, mesh=mesh)
        states = adapt_users(method, fitted, made.new, made.contexts, key=key, mesh=mesh)
        scores = score_users(method, fitted, states, made.new, made.queries, mesh=mesh)
        results |= {
            f"{name}/basis": fitted.arrays["basis"],
            f"{name}/weights": states["weights"],
            f"{name}/scores": scores[made.queries.mask],
            f"{name}/loss": fitted.numbers["validation_loss"],
        }
    np.savez(out, **results)
    # States that eight devices write, each its part, as four devices read them.
    four, eight = meshes.values()
    names, rows = tuple(f"user {number}" for number in range(16)), rng.normal(size=(16, 2))
    states = UserStates(names, {"weights": jax.device_put(rows, batch_sharding(eight, 2))})
    save_states(Path(out).parent / "states", states, method="lore_free", fitted="x")
    read = read_states(Path(out).parent / "states", method="lore_free", fitted="x", mesh=four)
    assert read.users == names
    assert {len(part.data) for part in read.states["weights"].addressable_shards} == {4}
    np.testing.assert_array_equal(read.states["weights"], states.states["weights"])


def test_fits_scores_and_saved_states_do_not_depend_on_the_mesh(tmp_path):
    environment = plain_environment(devices=8) | {"JAX_PLATFORMS": "cpu"}
    out = tmp_path / "states.npz"
    command = [sys.executable, "-m", "tests.personal.few_shot.test_many_users", out]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    results = np.load(out)
    assert results["none/scores"].shape[0] > 20
    assert np.ptp(results["none/scores"]) > 0.1
    for mesh in MESHES:
        # fits are made on one device
        np.testing.assert_array_equal(results[f"{mesh}/basis"], results["none/basis"])
        for name in ("weights", "scores", "loss"):
            np.testing.assert_allclose(results[f"{mesh}/{name}"], results[f"none/{name}"], atol=1e-5)


def test_profiles_of_unequal_lengths_give_the_states_of_padded_ones(monkeypatch):
    rng = np.random.default_rng(0)
    lengths, width = np.array([3, 40, 0, 17, 16]), 6
    users = len(lengths)
    mask = (np.arange(40) < lengths[:, None]) & (np.arange(40) != 1)  # a post may be missing among the others
    words = rng.normal(size=(users, 40, width)).astype(np.float32)
    posts = Posts(words, mask, rng.choice([-1.0, 0, 1], mask.shape))
    pairs = rng.integers(20, size=(2, 3 * users))
    features, of_users = rng.normal(size=(20, width)).astype(np.float32), np.repeat(np.arange(users), 3)
    choices = choices_of(features, *pairs, users=of_users, posts=posts)
    vectors, matrices = ("direction", *bayes.MEANS, "post_mean"), ("basis", "profile")
    arrays = {name: rng.normal(size=width).astype(np.float32) for name in vectors}
    arrays |= {name: rng.normal(size=(width, 2)).astype(np.float32) for name in matrices}
    arrays |= {"items": np.zeros(1, np.float32)}
    numbers = {"word_gain": 1.0, "vote_gain": 0.5, "isotropic": 0.1, "typical": 0.0}
    fitted = Fitted(arrays, numbers, bayes.BayesSettings())
    contexts = group(choices).of(np.array([4, 1, 0, 3, 2, 1]))

    def states() -> dict[str, np.ndarray]:
        return adapt_users(bayes.METHOD, fitted, choices, contexts, key=jax.random.key(0))

    trimmed = states()
    monkeypatch.setattr(protocol, "FEWEST_POSTS", 64)
    padded = states()
    assert np.ptp(padded["weights"]) > 0.1
    for name, leaf in padded.items():
        np.testing.assert_allclose(trimmed[name], leaf, atol=1e-5)
    holding = replace(bayes.METHOD, adapt=lambda fitted, context, key: context.posts.mask, holds_posts=True)
    held = adapt_users(holding, fitted, choices, contexts, key=jax.random.key(0))
    np.testing.assert_array_equal(held, mask[contexts.users])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("lore_free", 32), ("bayes", 4 * (16 + 16 * 16 + 384 + 1))])
def test_a_hundred_thousand_users_are_adapted(name, size):
    rng = np.random.default_rng(0)
    users, shots, width, rows = 100_000, 16, 384, 3_000
    method, basis = method_named(name), rng.normal(size=(width, 16)).astype(np.float32) / np.sqrt(width)
    arrays = {
        "lore_free": {"basis": basis[:, :8], "mean": np.ones(8, np.float32)},
        "bayes": {"basis": basis, "direction": basis[:, 0], "items": np.zeros(1, np.float32)},
    }
    numbers = {"pull": np.float32(1), "isotropic": np.float32(1e-3)}
    fitted = Fitted(arrays[name], numbers, method.settings())
    features = rng.normal(size=(rows, width)).astype(np.float32)
    pairs = (rng.integers(rows, size=users * shots) for _ in range(2))
    choices = choices_of(features, *pairs, users=np.repeat(np.arange(users), shots))
    places = np.arange(users * shots).reshape(users, shots)
    contexts = UserRows(np.arange(users, dtype=np.int32), places, np.ones((users, shots), bool))
    start = time.process_time()
    states = adapt_users(method, fitted, choices, contexts, key=jax.random.key(0))
    spent = time.process_time() - start
    print(f"{name}: {users:,} people in {spent:.1f} seconds of one core")
    assert spent < 40  # 20 on a quiet machine: ten seconds of two cores
    assert bytes_per_user(states, users) == size
    few = UserRows(contexts.users[-3:], contexts.places[-3:], contexts.mask[-3:])
    alone = adapt_users(method, fitted, choices, few, key=jax.random.key(0))
    np.testing.assert_allclose(states["weights"][-3:], alone["weights"], atol=1e-5)


if __name__ == "__main__":
    write_states(sys.argv[1])
