"""One training step: sums of microbatches, what is trained, what is kept, how often it compiles."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import CheckpointError, PrbError
from prb_jax.models.decoder import Params
from prb_jax.models.lora_config import LoraConfig
from prb_jax.training.config import LossSettings, TrainSettings
from prb_jax.training.losses import Extras, comparison_loss
from prb_jax.training.microbatches import named_tree
from prb_jax.training.step import Sums, TrainStep
from prb_jax.training.trainer import USER, WEIGHTS
from prb_jax.training.weights import merge, split_params, trained_decoder
from tests.packed import batch_alone, read_trees
from tests.sweeps import sweep
from tests.training.small_batches import (
    LORA,
    batch_of,
    build,
    built,
    extras_of,
    fresh,
    initial_params,
    random_trees,
    small_config,
    soft_prompts,
    taken,
)

CONFIG = small_config()
OPTIONS: dict[str, Any] = {"config": CONFIG, "dtype": jnp.dtype("float32")}


def names(tree: Any) -> set[str]:
    return {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(tree)}


def loss_of(rewards: jax.Array, config: LossSettings, *, seed: int = 0) -> jax.Array:
    """Of rewards [B, K], with the margins and weights of `extras_of`."""
    rng = np.random.default_rng(seed)
    margin, weights = (
        jnp.asarray(rng.uniform(*ends, len(rewards)), jnp.float32) for ends in ((0, 0.5), (0.5, 2.0))
    )
    labels = jnp.broadcast_to(jnp.arange(rewards.shape[1], 0, -1, dtype=jnp.float32), rewards.shape)
    given = {"labels": labels, "mask": jnp.ones(rewards.shape, bool), "margin": margin, "weights": weights}
    return comparison_loss(rewards, **given, config=config).means()["loss"]


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def relative_difference(ours: jax.Array, theirs: jax.Array) -> float:
    return float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))


def summed(step: TrainStep, state: Any, frozen: Any, trees: Any, extras: Extras | None = None) -> Sums:
    """The sums of one batch of these trees."""
    return step.gradients(state, frozen, *step.place(batch_of(trees), extras or extras_of(trees)))


def updated(step: TrainStep, state: Any, frozen: Any, trees: Any, extras: Extras | None = None) -> Any:
    """The state after an update by one batch of these trees, and its metrics."""
    return step.update(state, summed(step, state, frozen, trees, extras))


@pytest.mark.parametrize("tuning", sweep(["head", "lora", "full"], few=(1,)))
def test_accumulated_microbatches_equal_one_big_batch(tuning: str) -> None:
    """Also where they have other shapes."""
    trees, step = random_trees(4), built(tuning)
    rng = np.random.default_rng(0)
    margin, weights = rng.uniform(0, 0.5, 4), rng.uniform(0.5, 2.0, 4)
    state, frozen = fresh(tuning)
    one = summed(step, state, frozen, trees, extras_of(trees, margin=margin, weights=weights))
    parts = []
    for members, tokens in ((slice(3), 384), (slice(3, 4), None)):
        extras = extras_of(trees[members], tokens=tokens, margin=margin[members], weights=weights[members])
        batch = batch_of(trees[members], tokens=tokens)
        parts.append(step.gradients(state, frozen, *step.place(batch, extras)))
    many = step.add(*parts)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(parts[0].gradient))  # added in place
    total = float(one.parts.weight_sum)
    sums = (jax.tree.leaves(each.gradient[WEIGHTS]) for each in (many, one))
    for ours, theirs in zip(*sums, strict=True):
        np.testing.assert_allclose(ours / total, theirs / total, atol=1e-6, rtol=1e-6)
    ours, theirs = (step.update(fresh(tuning)[0], each)[1] for each in (many, one))
    for name in theirs:
        assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5, abs=1e-6), name


def test_the_gradient_is_that_of_the_mean_loss_of_every_response_by_itself() -> None:
    """Against every conversation in a stream of its own, computed whole, the rewards put side by side."""
    trees = random_trees(4, responses=3)
    alone, params = batch_alone(trees), initial_params(CONFIG)
    config = LossSettings(label_smoothing=0.1, center_rewards_coefficient=0.01)
    step, state, frozen = build(CONFIG, params=params, loss=config)

    def mean_loss(params: Params) -> jax.Array:
        return loss_of(read_trees(params, alone, **OPTIONS)[..., 0], config)

    value, gradient = jax.jit(jax.value_and_grad(mean_loss))(params)
    sums = summed(step, state, frozen, trees)
    pairs = zip(jax.tree.leaves(sums.gradient[WEIGHTS]), jax.tree.leaves(gradient), strict=True)
    for ours, theirs in pairs:
        assert relative_difference(ours / sums.parts.weight_sum, theirs) < 1e-5
    _, metrics = step.update(state, sums)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("tuning", sweep(["head", "lora", "full"], few=(0, 1)))
def test_only_what_is_tuned_has_optimiser_state_changes_and_learns_the_batch(tuning: str) -> None:
    params, step = initial_params(CONFIG), built(tuning)
    state, frozen = fresh(tuning)
    trained = names(state[WEIGHTS]["params"])
    factors = {f"layers/{name}_lora_{part}" for name in LoraConfig.targets for part in "ab"}
    assert trained == {"head": {"score"}, "lora": {"score"} | factors, "full": names(params)}[tuning]
    assert names(frozen) == names(params) - trained
    # Two moments for each trainable number, and a counter or two.
    assert 0 <= nbytes(state[WEIGHTS]["opt"]) - 2 * nbytes(state[WEIGHTS]["params"]) < 64
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state[WEIGHTS]["params"]))

    before = jax.tree.map(np.asarray, (state[WEIGHTS]["params"], frozen))
    trees, losses = random_trees(4), []
    extras = extras_of(trees, margin=np.zeros(4))
    for number in range(15):
        state, metrics = updated(step, state, frozen, trees, extras)
        assert (int(state["step"]), float(metrics["finite"])) == (number + 1, 1.0)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < (0.6 if tuning == "head" else 0.1) * losses[0]
    moved = jax.tree.map(lambda old, new: bool((old != new).any()), before[0], state[WEIGHTS]["params"])
    assert all(jax.tree.leaves(moved))
    jax.tree.map(np.testing.assert_array_equal, before[1], frozen)


def test_one_compile_for_each_shape_and_one_update() -> None:
    step, state, frozen = build(CONFIG, tuning="lora")
    trees = random_trees(3)
    for turn in range(3):
        for tokens in (256, 384):
            extras = extras_of(trees, tokens=tokens, seed=turn)
            placed = step.place(batch_of(trees, tokens=tokens), extras)
            sums = step.gradients(state, frozen, *placed)
        state, _ = step.update(state, sums)
        assert step.gradients._cache_size() == 2
        assert step.update._cache_size() == 1
    # Frozen weights are an argument: others need no compile, and matter.
    other = jax.device_put(jax.tree.map(lambda leaf: 2 * leaf, frozen), step.frozen_shardings)
    placed = step.place(batch_of(trees, tokens=256), extras_of(trees, tokens=256))
    ours, theirs = (step.gradients(state, each, *placed) for each in (frozen, other))
    assert not np.allclose(ours.parts.reward_sum, theirs.parts.reward_sum)
    assert step.gradients._cache_size() == 2


def test_the_state_is_updated_in_place() -> None:
    step = built()
    state, frozen = fresh()
    sums = summed(step, state, frozen, random_trees(4))
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(sums.gradient[WEIGHTS])) > 0
    newer, _ = step.update(state, sums)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((newer, frozen)))
    same = jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, newer, step.state_shardings)
    assert all(jax.tree.leaves(same))
    # A state that comes back from a checkpoint is the same.
    jax.tree.map(np.testing.assert_array_equal, step.resume(step.kept(newer)), newer)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    step, trees = built("lora"), random_trees(4)
    state, frozen = fresh("lora")
    state, _ = updated(step, state, frozen, trees)
    kept = jax.tree.map(np.asarray, {name: state[name] for name in (WEIGHTS, "step")})
    bad = extras_of(trees, margin=np.array([np.nan, 0, 0, 0]))
    state, metrics = updated(step, state, frozen, trees, bad)
    assert float(metrics["finite"]) == 0.0
    assert np.isnan(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, kept, {name: state[name] for name in kept})
    state, metrics = updated(step, state, frozen, trees)
    assert float(metrics["finite"]) == 1.0


def test_bfloat16_compute_has_float32_masters_and_gradients() -> None:
    """Updates far below a bfloat16 rounding step are not lost."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial_params(CONFIG))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    trees, step = random_trees(4), built()
    first = step.init({WEIGHTS: wide, USER: wide["embed"]})
    expected = summed(step, first, {}, trees).gradient[WEIGHTS]
    step, state, frozen = build(CONFIG, params=narrow, dtype="bfloat16")
    sums = summed(step, state, frozen, trees)
    gradient = sums.gradient[WEIGHTS]
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == jnp.float32
        assert relative_difference(ours, theirs) < 0.05

    def is_finer(array: jax.Array) -> bool:
        return bool((array != array.astype(jnp.bfloat16).astype(jnp.float32)).any())

    assert is_finer(gradient["layers"]["q"])
    assert is_finer(step.update(state, sums)[0][WEIGHTS]["params"]["layers"]["q"])


@functools.cache
def deeper(tuning: str, remat: str = "none") -> tuple[int, int, list[np.ndarray], int]:
    """Of six layers over longer prefixes: the bytes that a step and scoring need, the sums of the step, and how many
    matrix products its program holds."""
    trees = random_trees(4, prefix=200)
    config = small_config(num_hidden_layers=6)
    step, state, frozen = build(config, tuning=tuning, remat=remat)
    arguments = (state, frozen, *step.place(batch_of(trees), extras_of(trees)))
    compiled = step.gradients.lower(*arguments).compile()
    scoring = 0
    if remat == "none":
        settings = TrainSettings(tuning=tuning, lora=LORA, remat="none")  # pyright: ignore[reportArgumentType]
        rewards = trained_decoder(settings, config, mesh=step.mesh).rewards
        scored = jax.jit(functools.partial(rewards, prompts=None, differentiated=False))
        program = scored.lower(step.inputs(state)[WEIGHTS], *arguments[1:3]).compile()
        scoring = program.memory_analysis().temp_size_in_bytes
    sums = jax.tree.map(np.asarray, compiled(*arguments).gradient[WEIGHTS])
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
    with pytest.raises(PrbError, match="remat: expected one of auto, none, dots, full, found 'some'"):
        build(CONFIG, remat="some")


def test_frozen_layers_keep_nothing_for_a_backward_pass() -> None:
    """Training the head alone needs the memory of scoring, not of training."""
    head, head_scoring, *_ = deeper("head")
    full, full_scoring, *_ = deeper("full")
    assert head < 1.1 * head_scoring
    assert full > 3 * full_scoring


def test_user_rows_are_trained_through_the_table() -> None:
    """Only this step's rows have a gradient; the table takes them; a step that is not finite leaves it."""
    method, params = soft_prompts("abcdef", places=2, generic_share=0.0, eps=1.0), initial_params(CONFIG)
    trainable, frozen = split_params(params, config=CONFIG, tuning="head", lora=LORA, seed=0)
    step, state, _ = build(CONFIG, tuning="head", params=params, method=method)
    table = np.random.default_rng(0).normal(size=(7, 3, 32)).astype(np.float32)
    state[USER]["table"] = jax.device_put(table, method.shardings["table"])
    plain, slots = random_trees(3), (0, 1, 1)
    trees = [named_tree(tree, slot, 3) for tree, slot in zip(plain, slots, strict=True)]
    state = taken(state, np.array([4, 2]), step=step, method=method)
    np.testing.assert_array_equal(state[USER]["rows"], table[[4, 2]])
    sums = summed(step, state, frozen, trees)
    assert sums.gradient[USER].shape == (2, 3, 32)

    def by_rows(rows: jax.Array) -> jax.Array:
        """The rows are further words, which stand in front of the conversations."""
        everything = merge(trainable, frozen)
        longer = {**everything, "embed": jnp.concatenate([everything["embed"], rows.reshape(-1, 32)])}
        words = [len(everything["embed"]) + 3 * slot + np.arange(3) for slot in slots]
        prompted = [
            replace(tree, prefix=np.concatenate([ids, tree.prefix[3:]]).astype(np.int32))
            for tree, ids in zip(plain, words, strict=True)
        ]
        logits = read_trees(longer, batch_alone(prompted), **OPTIONS)
        return loss_of(logits[..., 0], LossSettings(center_rewards_coefficient=0.01))

    gradient = jax.jit(jax.grad(by_rows))(jnp.asarray(table[[4, 2]]))
    state, metrics = step.update(state, sums)
    assert float(metrics["user_grad_norm"]) == pytest.approx(float(jnp.linalg.norm(gradient)), rel=1e-4)
    expected = table.copy()
    expected[[4, 2]] -= 0.1 * np.asarray(gradient / (jnp.abs(gradient) + 1.0))  # the first step of Adam
    np.testing.assert_allclose(state[USER]["table"], expected, atol=1e-6)

    bad = extras_of(trees, weights=np.array([np.inf, 1, 1]))
    before = np.asarray(state[USER]["table"])
    state, metrics = updated(step, state, frozen, trees, bad)
    assert float(metrics["finite"]) == 0.0
    np.testing.assert_array_equal(state[USER]["table"], before)
    np.testing.assert_array_equal(state[USER]["ids"], [4, 2])
    assert (step.gradients._cache_size(), step.update._cache_size()) == (1, 1)


def test_a_head_with_several_labels_cannot_be_trained() -> None:
    with pytest.raises(CheckpointError, match="score head with one label, found num_labels=2"):
        build(small_config(num_labels=2))


def test_other_parts_cannot_be_tuned() -> None:
    with pytest.raises(ValueError, match="tuning: expected one of head, lora, full, found 'all'"):
        split_params({}, config=CONFIG, tuning="all", lora=LORA, seed=0)  # pyright: ignore[reportArgumentType]
