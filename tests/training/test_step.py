"""One training step: sums of microbatches, what is trained, what is kept, how often it compiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError, PrbError
from prb_jax.personal.method import Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.readouts.score_tree import score_tree
from prb_jax.sharding import make_mesh
from prb_jax.training.config import LossSettings
from prb_jax.training.losses import comparison_loss
from prb_jax.training.objective import USER, WEIGHTS
from prb_jax.training.step import sums_of
from prb_jax.training.weights import merge, split_params
from prb_jax.trees.shapes import Bucket
from prb_jax.trees.tree import build_tree
from tests.sweeps import sweep
from tests.training.small_batches import (
    batch_of,
    build,
    built,
    extras_of,
    fresh,
    initial_params,
    random_trees,
    rows_of,
    small_config,
)

CONFIG = small_config()


def names(tree: Any) -> set[str]:
    return {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(tree)}


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def relative_difference(ours: jax.Array, theirs: jax.Array) -> float:
    return float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))


@pytest.mark.parametrize("tuning", sweep(["head", "lora", "full"], few=(1,)))
def test_accumulated_microbatches_equal_one_big_batch(tuning: str) -> None:
    """Also where they have other shapes, and where rows only fill up the batch."""
    trees = random_trees(4)
    extras = extras_of(trees)
    step = built(tuning)
    (one, frozen), (many, _) = fresh(tuning), fresh(tuning)
    one = step.accumulate(one, frozen, *step.place(batch_of(trees), extras))
    batch = batch_of(trees[:3], bucket=Bucket(32, 2, 16))
    many = step.accumulate(many, frozen, *step.place(batch, rows_of(extras, slice(3))))
    last = dataclasses.replace(
        extras_of(trees[3:], rows=4),
        margin=np.full(4, extras.margin[3]),
        weights=np.full(4, extras.weights[3]),
    )
    many = step.accumulate(many, frozen, *step.place(batch_of(trees[3:], rows=4), last))
    total = float(one["parts"].weight_sum)
    for ours, theirs in zip(
        jax.tree.leaves(many["acc"][WEIGHTS]), jax.tree.leaves(one["acc"][WEIGHTS]), strict=True
    ):
        np.testing.assert_allclose(ours / total, theirs / total, atol=1e-6, rtol=1e-6)
    (many, ours), (one, theirs) = step.update(many), step.update(one)
    for name in theirs:
        assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5, abs=1e-6), name


def test_the_gradient_is_that_of_the_mean_loss_of_every_response_by_itself() -> None:
    """Against every response as a tree of its own, computed whole, the rewards put side by side."""
    trees = random_trees(4, responses=3)
    alone = batch_of([build_tree([tree.sequence(k)]) for tree in trees for k in range(3)])
    extras, params = extras_of(trees), initial_params(CONFIG)
    config = LossSettings(label_smoothing=0.1, center_rewards_coefficient=0.01)
    step, state, frozen = build(CONFIG, params=params, loss=config)

    def mean_loss(params):
        logits = score_tree(params, alone, config=CONFIG, dtype=jnp.dtype("float32"))
        return comparison_loss(
            logits[..., 0].reshape(4, 3), labels=extras.labels, mask=jnp.asarray(extras.mask),
            margin=jnp.asarray(extras.margin), weights=jnp.asarray(extras.weights), config=config,
        ).means()["loss"]  # fmt: skip

    value, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    state = step.accumulate(state, frozen, *step.place(batch_of(trees), extras))
    total = state["parts"].weight_sum
    for ours, theirs in zip(jax.tree.leaves(state["acc"][WEIGHTS]), jax.tree.leaves(gradient), strict=True):
        assert relative_difference(ours / total, theirs) < 1e-5
    _, metrics = step.update(state)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("tuning", ["head", "lora", "full"])
def test_only_what_is_tuned_changes_and_has_optimiser_state(tuning: str) -> None:
    params = initial_params(CONFIG)
    step = built(tuning)
    state, frozen = fresh(tuning)
    trained = names(state[WEIGHTS]["params"])
    factors = {
        f"layers/{name}_lora_{part}" for name in ("q", "k", "v", "o", "gate", "up", "down") for part in "ab"
    }
    expected = {"head": {"score"}, "lora": {"score"} | factors, "full": names(params)}[tuning]
    assert trained == expected
    assert names(frozen) == names(params) - trained
    # Two moments for each trainable number, and a counter or two.
    assert 0 <= nbytes(state[WEIGHTS]["opt"]) - 2 * nbytes(state[WEIGHTS]["params"]) < 64
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state[WEIGHTS]["params"]))

    before = jax.tree.map(np.asarray, {"trainable": state[WEIGHTS]["params"], "frozen": frozen})
    trees = random_trees(4)
    for _ in range(2):
        state = step.accumulate(state, frozen, *step.place(batch_of(trees), extras_of(trees)))
        state, metrics = step.update(state)
    assert int(state["step"]) == 2
    assert float(metrics["finite"]) == 1.0
    for old, new in zip(
        jax.tree.leaves(before["trainable"]), jax.tree.leaves(state[WEIGHTS]["params"]), strict=True
    ):
        assert (old != np.asarray(new)).any()
    for old, new in zip(jax.tree.leaves(before["frozen"]), jax.tree.leaves(frozen), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("tuning", ["head", "lora", "full"])
def test_a_few_steps_learn_the_batch(tuning: str) -> None:
    trees = random_trees(4)
    step = built(tuning)
    state, frozen = fresh(tuning)
    placed = step.place(
        batch_of(trees), dataclasses.replace(extras_of(trees), margin=np.zeros(4, np.float32))
    )
    losses = []
    for _ in range(15):
        state, metrics = step.update(step.accumulate(state, frozen, *placed))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < (0.6 if tuning == "head" else 0.1) * losses[0]


def test_one_compile_for_each_shape_and_one_update() -> None:
    step, state, frozen = build(CONFIG, tuning="lora")
    shapes = [Bucket(24, 2, 12), Bucket(32, 2, 12)]
    trees = random_trees(3)
    for turn in range(3):
        for bucket in shapes:
            state = step.accumulate(
                state, frozen, *step.place(batch_of(trees, bucket=bucket), extras_of(trees, seed=turn))
            )
        state, _ = step.update(state)
        assert step.accumulate._cache_size() == 2
        assert step.update._cache_size() == 1
    # Frozen weights are an argument: others need no compile, and matter.
    other = jax.device_put(jax.tree.map(lambda leaf: 2 * leaf, frozen), step.frozen_shardings)
    placed = step.place(batch_of(trees, bucket=shapes[0]), extras_of(trees))
    assert not np.allclose(step.rewards(state, frozen, *placed), step.rewards(state, other, *placed))
    assert step.rewards._cache_size() == 1
    step.accumulate(state, other, *placed)
    assert step.accumulate._cache_size() == 2


def test_the_state_is_updated_in_place_and_its_sums_are_cleared() -> None:
    step = built()
    state, frozen = fresh()
    trees = random_trees(4)
    new = step.accumulate(state, frozen, *step.place(batch_of(trees), extras_of(trees)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(new["acc"][WEIGHTS])) > 0
    newer, _ = step.update(new)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(new))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((newer, frozen)))
    same = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, newer, step.state_shardings)
    assert all(jax.tree.leaves(same))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(newer["acc"][WEIGHTS]))
    # And those of a state that comes back from a checkpoint are the same.
    resumed = step.resume(step.kept(newer))
    jax.tree.map(np.testing.assert_array_equal, sums_of(resumed), sums_of(newer))
    assert (float(resumed["parts"].count), float(resumed["parts"].reward_min)) == (0, np.inf)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    step = built("lora")
    state, frozen = fresh("lora")
    trees = random_trees(4)
    extras = extras_of(trees)
    state, _ = step.update(step.accumulate(state, frozen, *step.place(batch_of(trees), extras)))
    kept = jax.tree.map(np.asarray, {name: state[name] for name in (WEIGHTS, "step")})
    bad = dataclasses.replace(extras, margin=np.array([np.nan, 0, 0, 0], np.float32))
    state, metrics = step.update(step.accumulate(state, frozen, *step.place(batch_of(trees), bad)))
    assert float(metrics["finite"]) == 0.0
    assert np.isnan(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, kept, {name: state[name] for name in kept})
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(state["acc"][WEIGHTS]))
    state, metrics = step.update(step.accumulate(state, frozen, *step.place(batch_of(trees), extras)))
    assert float(metrics["finite"]) == 1.0


def test_bfloat16_compute_has_float32_masters_and_gradients() -> None:
    """Updates far below a bfloat16 rounding step are not lost."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial_params(CONFIG))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    trees = random_trees(4)
    states = {}
    step, state, frozen = built(), built().init({WEIGHTS: wide, USER: wide["embed"]}), {}
    states["float32"] = step.accumulate(state, frozen, *step.place(batch_of(trees), extras_of(trees)))
    step, state, frozen = build(CONFIG, params=narrow, dtype="bfloat16")
    states["bfloat16"] = step.accumulate(state, frozen, *step.place(batch_of(trees), extras_of(trees)))
    for wide, narrow in zip(
        jax.tree.leaves(states["float32"]["acc"][WEIGHTS]),
        jax.tree.leaves(states["bfloat16"]["acc"][WEIGHTS]),
        strict=True,
    ):
        assert narrow.dtype == jnp.float32
        assert relative_difference(narrow, wide) < 0.05
    gradient = np.asarray(states["bfloat16"]["acc"][WEIGHTS]["layers"]["q"])
    assert (gradient != gradient.astype(jnp.bfloat16).astype(np.float32)).any()
    state, _ = step.update(states["bfloat16"])
    weight = np.asarray(state[WEIGHTS]["params"]["layers"]["q"])
    assert (weight != weight.astype(jnp.bfloat16).astype(np.float32)).any()


@functools.cache
def deeper(tuning: str, remat: str = "none") -> tuple[int, int, list[np.ndarray], int]:
    """Of six layers over longer prefixes: the bytes that a step and scoring need, the sums of the step, and how many
    matrix products its program holds."""
    trees = random_trees(4, prefix=200)
    step, state, frozen = build(small_config(num_hidden_layers=6), tuning=tuning, remat=remat)
    arguments = (state, frozen, *step.place(batch_of(trees), extras_of(trees)))
    compiled = step.accumulate.lower(*arguments).compile()
    scoring = 0
    if remat == "none":
        scoring = step.rewards.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    sums = jax.tree.map(np.asarray, compiled(*arguments)["acc"][WEIGHTS])
    products = compiled.as_text().count(" dot(")
    return compiled.memory_analysis().temp_size_in_bytes, scoring, jax.tree.leaves(sums), products


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_rematerialisation_changes_memory_and_not_values(tuning: str) -> None:
    memory, gradients, products = {}, {}, {}
    for remat in ("none", "dots", "full"):
        memory[remat], _, gradients[remat], products[remat] = deeper(tuning, remat)
    assert memory["full"] < memory["dots"] < memory["none"]
    assert products["full"] > products["dots"] == products["none"]  # no product is computed twice
    for remat in ("dots", "full"):
        for ours, theirs in zip(gradients[remat], gradients["none"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(jnp.abs(theirs).max()), rtol=0)
    with pytest.raises(PrbError, match="remat: expected one of none, dots, full, found 'some'"):
        build(CONFIG, remat="some")


def test_frozen_layers_keep_nothing_for_a_backward_pass() -> None:
    """Training the head alone needs the memory of scoring, not of training."""
    head, head_scoring, *_ = deeper("head")
    full, full_scoring, *_ = deeper("full")
    assert head < 1.1 * head_scoring
    assert full > 3 * full_scoring


def test_user_rows_are_trained_through_the_table() -> None:
    """Only this step's rows have a gradient; the table takes them; a step that is not finite leaves it."""
    tokens, width, rate = 3, CONFIG.hidden_size, 0.1
    mesh = make_mesh(devices=jax.devices()[:1])
    method = SoftPrompts(
        table=Users(tuple("abcdef")),
        tokens=tokens,
        width=width,
        places=2,
        generic_share=0.0,
        seed=0,
        optimizer=RowAdam(learning_rate=lambda step: rate, eps=1.0),
        mesh=mesh,
    )
    params = initial_params(CONFIG)
    trainable, frozen = split_params(params, tuning="head")
    step, state, _ = build(CONFIG, tuning="head", params=params, mesh=mesh, method=method)
    drawn = np.random.default_rng(0).normal(size=(7, tokens, width)).astype(np.float32)
    state[USER]["table"] = jax.device_put(drawn, method.shardings["table"])
    table = np.asarray(drawn)
    trees = random_trees(3)
    extras = dataclasses.replace(extras_of(trees), users=np.array([0, 1, 1], np.int32))
    placed = step.place(batch_of(trees), extras)
    state = step.take(state, np.array([4, 2], np.int32))
    np.testing.assert_array_equal(state[USER]["rows"], table[[4, 2]])
    state = step.accumulate(state, frozen, *placed)
    assert state["acc"][USER].shape == (2, tokens, width)

    def by_rows(rows: jax.Array) -> jax.Array:
        logits = score_tree(
            merge(trainable, frozen), batch_of(trees), config=CONFIG, dtype=jnp.dtype("float32"),
            soft_prompt=rows[jnp.array([0, 1, 1])],
        )  # fmt: skip
        return comparison_loss(
            logits[..., 0], labels=extras.labels, mask=jnp.asarray(extras.mask), margin=jnp.asarray(extras.margin),
            weights=jnp.asarray(extras.weights), config=LossSettings(center_rewards_coefficient=0.01),
        ).means()["loss"]  # fmt: skip

    gradient = jax.jit(jax.grad(by_rows))(jnp.asarray(table[[4, 2]]))
    state, metrics = step.update(state)
    assert float(metrics["user_grad_norm"]) == pytest.approx(float(jnp.linalg.norm(gradient)), rel=1e-4)
    expected = table.copy()
    expected[[4, 2]] -= rate * np.asarray(gradient / (jnp.abs(gradient) + 1.0))  # the first step of Adam
    np.testing.assert_allclose(state[USER]["table"], expected, atol=1e-6)

    bad = dataclasses.replace(extras, weights=np.array([np.inf, 1, 1], np.float32))
    before = np.asarray(state[USER]["table"])
    state, metrics = step.update(step.accumulate(state, frozen, *step.place(batch_of(trees), bad)))
    assert float(metrics["finite"]) == 0.0
    np.testing.assert_array_equal(state[USER]["table"], before)
    np.testing.assert_array_equal(state[USER]["ids"], [4, 2])
    assert (step.accumulate._cache_size(), step.update._cache_size()) == (1, 1)


def test_a_head_with_several_labels_cannot_be_trained() -> None:
    with pytest.raises(
        CheckpointError, match="training needs a score head with one label, found num_labels=2"
    ):
        build(small_config(num_labels=2))


def test_parts_come_together_again() -> None:
    params = initial_params(CONFIG)
    for tuning in ("head", "full"):
        trainable, frozen = split_params(params, tuning=tuning)
        again = merge(trainable, frozen)
        assert jax.tree.structure(again) == jax.tree.structure(params)
        assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    trainable, frozen = split_params(params, tuning="lora", seed=1)
    assert names(merge(trainable, frozen)) == names(trainable) | names(frozen)
    with pytest.raises(ValueError, match="tuning: expected one of head, lora, full, found 'all'"):
        split_params(params, tuning="all")  # pyright: ignore[reportArgumentType]
