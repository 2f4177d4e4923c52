"""The table of users: whose row is whose, lazy Adam on the rows of a step, and which arrays of it devices exchange.

`python -m tests.personal.test_embedding OUT MESH` needs four devices.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prb_jax import Comparison
from prb_jax.errors import DataError, MeshError
from prb_jax.personal.method import GENERIC, Users, with_prefixes
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.sharding import replicated
from prb_jax.training.microbatches import named_tree
from prb_jax.training.trainer import USER
from tests.plain_process import ROOT, plain_environment
from tests.sweeps import sweep
from tests.training.small_batches import (
    batch_of,
    build,
    extras_of,
    initial_params,
    random_trees,
    small_config,
)

USERS, TOKENS, ROWS = 10_000, 3, 8
_COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def by(user: str | None, number: int = 0) -> Comparison:
    return Comparison(id=f"{user}{number}", question="q", chosen="a", rejected="b", user_id=user)


def test_rows_of_users() -> None:
    users = Users.of([by("b"), by("a"), by(None), by("b", 1)])
    assert users.names == ("a", "b")
    assert users.size == 3
    rows = users.rows([by("b"), by(None), by("z"), by("a")])
    assert rows.dtype == np.int32
    assert rows.tolist() == [2, GENERIC, GENERIC, 1]
    assert users.unknown([by("b"), by(None), by("z"), by("y"), by("z", 1)]) == {"y", "z"}

    with pytest.raises(DataError, match="users: 'b' is given twice"):
        Users(("a", "b", "b"))


def prompts(
    users: int = 5, *, tokens: int = 4, width: int = 64, share: float = 0.0, seed: int = 1, mesh: Any = None
) -> SoftPrompts:
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    adam = RowAdam(learning_rate=optax.constant_schedule(0.1))
    names = tuple(f"{user:05}" for user in range(users))
    return SoftPrompts(
        table=Users(names), tokens=tokens, width=width, places=6, generic_share=share, seed=seed, optimizer=adam,
        mesh=mesh,
    )  # fmt: skip


def test_the_users_of_a_step_fill_a_fixed_number_of_rows() -> None:
    chosen = prompts().rows_of_step(np.array([9, 5, 0, 5, 2]), np.array([1, 2, 3, 4]), step=0)
    assert chosen.ids.tolist() == [0, 2, 5, 6, 6, 6]
    assert chosen.ids[chosen.slots].tolist() == [5, 0, 5, 2]
    assert (chosen.ids.dtype, chosen.slots.dtype) == (np.int32, np.int32)
    with pytest.raises(ValueError, match="could not broadcast"):  # more users than places
        prompts().rows_of_step(np.arange(7), np.arange(7), step=0)


def test_a_share_trains_the_generic_user_instead() -> None:
    rows = np.arange(1, 4001)

    def drawn(step: int, share: float = 0.3) -> np.ndarray:
        method = replace(prompts(4000, share=share, seed=5), places=4000)
        chosen = method.rows_of_step(rows, np.arange(4000), step=step)
        return chosen.ids[chosen.slots]

    trained = drawn(17)
    kept = trained != GENERIC
    assert 0.27 < 1 - kept.mean() < 0.33
    np.testing.assert_array_equal(trained[kept], rows[kept])
    np.testing.assert_array_equal(trained, drawn(17))
    assert (trained != drawn(18)).any()
    np.testing.assert_array_equal(rows, drawn(17, share=0.0))
    twice = replace(prompts(share=0.5), places=6).rows_of_step(rows, np.array([3, 3, 3, 3]), step=0)
    assert len(set(twice.slots.tolist())) == 1  # a comparison that comes twice has one row


def test_everybody_starts_as_the_generic_user_at_the_scale_of_the_words() -> None:
    words: Any = 3.0 + 0.5 * np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    table = np.asarray(prompts().start(words)["table"])
    assert table.shape == (6, 4, 64)
    assert (table == table[0]).all()
    assert table[0].mean() == pytest.approx(3.0, abs=0.1)
    assert table[0].std() == pytest.approx(words.std(), rel=0.2)
    assert (table[0, 0] != table[0, 1]).any()
    assert (table != np.asarray(prompts(seed=2).start(words)["table"])).any()


def small_state() -> dict[str, jax.Array]:
    table = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    return prompts(tokens=2, width=3).start(jnp.zeros((4, 3))) | {"table": jnp.asarray(table)}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_where_every_row_is_touched_it_is_adam(clip_norm: float | None) -> None:
    """Also with the rows of a step in another order than the table, and a learning rate that changes."""
    schedule = optax.linear_schedule(0.1, 0.01, 6)
    ours = RowAdam(learning_rate=schedule, b1=0.8, b2=0.95, eps=1e-6, clip_norm=clip_norm)
    theirs = optax.adam(schedule, b1=0.8, b2=0.95, eps=1e-6)
    if clip_norm is not None:
        theirs = optax.chain(optax.clip_by_global_norm(clip_norm), theirs)
    state = small_state()
    expected: Any = state["table"]
    moments = theirs.init(expected)
    rng = np.random.default_rng(1)
    for step in range(8):
        gradient = rng.normal(size=expected.shape).astype(np.float32)
        change, moments = theirs.update(jnp.asarray(gradient), moments)
        expected = optax.apply_updates(expected, change)
        order = rng.permutation(6)
        state = {**state, "ids": jnp.asarray(order, jnp.int32)}
        state = ours.apply_rows(state, jnp.asarray(gradient[order]), jnp.asarray(step))
    np.testing.assert_allclose(state["table"], expected, atol=1e-6)
    np.testing.assert_array_equal(state["count"], np.full(6, 8))


def test_rows_that_are_not_touched_stay_and_count_for_themselves() -> None:
    adam = RowAdam(learning_rate=optax.constant_schedule(0.1))
    before = small_state()
    gradient = jnp.ones((3, 2, 3))
    state = {**before, "ids": jnp.array([4, 1, 6], jnp.int32)}  # 6 is beyond the table
    state = adam.apply_rows(adam.apply_rows(state, gradient, jnp.asarray(0)), gradient, jnp.asarray(1))
    state = adam.apply_rows({**state, "ids": jnp.array([4, 6, 6], jnp.int32)}, gradient, jnp.asarray(2))
    assert state["count"].tolist() == [0, 2, 0, 0, 3, 0]
    for name in ("table", "mu", "nu"):
        changed = (np.asarray(state[name]) != np.asarray(before[name])).any(axis=(1, 2))
        assert changed.tolist() == [False, True, False, False, True, False], name
    # A constant gradient: every update is one full learning rate, whatever the row missed.
    np.testing.assert_allclose(before["table"][4] - state["table"][4], 0.3, atol=1e-5)
    np.testing.assert_allclose(before["table"][1] - state["table"][1], 0.2, atol=1e-5)


def test_ids_beyond_the_table_give_its_last_row() -> None:
    state = small_state()
    rows = prompts(tokens=2, width=3).take(state, jnp.array([2, 0, 6]))["rows"]
    np.testing.assert_array_equal(rows, state["table"][jnp.array([2, 0, 5])])


def test_a_mesh_that_does_not_divide_the_width_is_refused() -> None:
    assert set(prompts(width=7).shardings) == {"table", "mu", "nu", "rows", "count", "ids"}
    wide: Any = SimpleNamespace(shape={"data": 1, "fsdp": 4, "sequence": 1, "tensor": 1})
    with pytest.raises(MeshError, match="width 30 is not divisible by mesh axis fsdp=4"):
        _ = prompts(width=30, mesh=wide).shardings


def exchanged(program: str) -> list[list[int]]:
    """The shape of every array that devices exchange in a compiled program."""
    return [
        [int(size) for size in shape.split(",") if size]
        for types in _COLLECTIVE.findall(program)
        for shape in re.findall(r"\w+\[([\d,]*)\]", types)
    ]


def one_step(mesh: Any) -> dict[str, Any]:
    """Two microbatches and an update; the exchanged arrays of each program, and the touched rows after it."""
    config = small_config()
    method = replace(
        prompts(USERS, tokens=TOKENS, width=config.hidden_size, mesh=mesh),
        places=ROWS,
        optimizer=RowAdam(learning_rate=optax.constant_schedule(1e-2)),
    )
    step, state, frozen = build(
        config, tuning="lora", params=initial_params(config), mesh=mesh, method=method
    )
    trees = with_prefixes(random_trees(8), [np.zeros(TOKENS, np.int32)] * 8)
    of_users = np.array([7, 7, 0, 9_999, 10_000, 3, 0, 7])
    chosen = method.rows_of_step(of_users, np.arange(len(of_users)), step=0)
    trees = [named_tree(tree, slot, TOKENS) for tree, slot in zip(trees, chosen.slots, strict=True)]
    batches = [
        step.place(batch_of(some, streams=4), extras_of(some, streams=4)) for some in (trees[:4], trees[4:])
    ]
    before = np.asarray(state[USER]["table"][0])
    states = step.state_shardings[USER]
    take: Any = jax.jit(method.take, in_shardings=(states, replicated(mesh)), out_shardings=states)
    ids = jnp.asarray(chosen.ids)
    programs = {
        "take": take.lower(state[USER], ids),
        "gradients": step.gradients.lower(state, frozen, *batches[0]),
        "update": step.update.lower(state, step.gradients(state, frozen, *batches[0])),
    }
    shapes = {name: exchanged(lowered.compile().as_text()) for name, lowered in programs.items()}
    for number in range(2):
        state[USER] = take(state[USER], ids)
        sums = step.add(*(step.gradients(state, frozen, *placed) for placed in batches))
        state, metrics = step.update(state, sums)
        assert float(metrics["finite"]) == 1.0, number
    table = np.asarray(state[USER]["table"])
    compiled: tuple[Any, ...] = (step.gradients, step.update, take)
    return {
        "exchanged": shapes,
        "moved": np.flatnonzero(np.abs(table - before).max(axis=(1, 2)) > 0).tolist(),
        "rows": table[np.unique(of_users)].tolist(),
        "compiles": [function._cache_size() for function in compiled],
        "local": list(state[USER]["table"].addressable_shards[0].data.shape),
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return one_step(make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize("mesh", sweep(("data=4", "fsdp=4"), few=(0,)))
def test_devices_exchange_the_rows_of_a_step_and_never_the_table(
    alone: dict[str, Any], mesh: str, tmp_path: Path
) -> None:
    """10,000 users: no collective of any program has an array of their number; the gradient has M rows.

    Under fsdp the table is split by width: there the activations that the rows went into are exchanged.
    """
    command = [sys.executable, "-m", "tests.personal.test_embedding", tmp_path / "step.json", mesh]
    environment = plain_environment(devices=4) | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    on_four = json.loads((tmp_path / "step.json").read_text())
    for name, shapes in on_four["exchanged"].items():
        assert max((max(shape, default=0) for shape in shapes), default=0) < USERS, name
    assert on_four["exchanged"]["take"] == []
    if mesh == "data=4":
        assert [ROWS, TOKENS, 32] in on_four["exchanged"]["gradients"]
    # The step is the step of one device.
    assert on_four["moved"] == alone["moved"] == [0, 3, 7, 9_999, 10_000]
    np.testing.assert_allclose(on_four["rows"], alone["rows"], atol=1e-5)
    assert on_four["compiles"] == [1, 1, 1]
    assert on_four["local"] == [USERS + 1, TOKENS, 8 if mesh == "fsdp=4" else 32]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(one_step(make_mesh(sys.argv[2]))))
