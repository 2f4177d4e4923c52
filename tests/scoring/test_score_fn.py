"""The pure jitted scorer that other programs build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import prb_jax as prb
from tests.scoring.records import TOLERANCE, assert_close, record
from tests.sweeps import sweep


def test_on_a_batch_of_trees(model, mixed, scores) -> None:
    batch = model.batch(model.encode(mixed))
    rewards = model.score_fn(model.params, batch)
    assert (rewards.shape, rewards.dtype) == ((12, 4), jnp.float32)
    assert_close([np.asarray(row[: len(s)]) for row, s in zip(rewards, scores)], scores)
    with pytest.raises(ValueError, match="at least one tree, found none"):
        model.batch([])


def test_inside_another_jit(model, mixed, scores) -> None:
    """As a best-of-n loss would: the margin between the first response and the second."""

    @jax.jit
    def margins(params, batch):
        rewards = model.score_fn(params, batch)
        return rewards[:, 0] - rewards[:, 1]

    gaps = margins(model.params, model.batch(model.encode(mixed)))
    np.testing.assert_allclose(gaps, [row[0] - row[1] for row in scores], atol=2 * TOLERANCE)


def test_derivatives(model, mixed) -> None:
    batch = model.batch(model.encode(mixed[:2]))
    gradients = jax.grad(lambda params: model.score_fn(params, batch)[0, 0])(model.params)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_it_depends_on_its_arguments_alone(model, mixed) -> None:
    batch = model.batch(model.encode(mixed[:2]))
    first = model.score_fn(model.params, batch)
    doubled = model.params | {"score": 2 * model.params["score"]}
    np.testing.assert_array_equal(model.score_fn(doubled, batch), 2 * first)
    np.testing.assert_array_equal(model.score_fn(model.params, batch), first)


def test_vectorised_over_weights_and_over_batches(model, mixed) -> None:
    """Of several heads at once, and of batches of one shape side by side."""
    batches = [
        model.batch(model.encode([one, other])) for one, other in zip(mixed[:2], mixed[2:4], strict=True)
    ]
    heads = jnp.stack([model.params["score"], 2 * model.params["score"]])
    first = model.score_fn(model.params, batches[0])
    several = jax.vmap(lambda score: model.score_fn(model.params | {"score": score}, batches[0]))(heads)
    np.testing.assert_allclose(several, [first, 2 * first], atol=TOLERANCE)
    if any(np.shape(a) != np.shape(b) for a, b in zip(*map(jax.tree.leaves, batches), strict=True)):
        pytest.skip("these batches have other shapes")
    together = jax.tree.map(lambda *parts: jnp.stack(parts), *batches)
    side_by_side = jax.vmap(lambda batch: model.score_fn(model.params, batch))(together)
    for rewards, batch in zip(side_by_side, batches, strict=True):
        np.testing.assert_allclose(rewards, model.score_fn(model.params, batch), atol=TOLERANCE)


@pytest.mark.parametrize("kind", sweep([AxisType.Auto, AxisType.Explicit], few=(1,)))
def test_in_a_program_on_a_mesh_of_the_callers(model, mixed, scores, kind: AxisType) -> None:
    """As a trainer with axes of its own calls it, inside its jitted step and under its mesh."""
    mine = jax.make_mesh((len(jax.devices()),), ("batch",), axis_types=(kind,))
    batch = model.batch(model.encode(mixed))

    @jax.jit
    def margins(params, batch):
        rewards = model.score_fn(params, batch)
        return rewards[:, 0] - rewards[:, 1]

    with jax.set_mesh(mine):
        gaps = margins(model.params, batch)
        gradient = jax.grad(lambda params: margins(params, batch)[0])(model.params)
    np.testing.assert_allclose(gaps, [row[0] - row[1] for row in scores], atol=2 * TOLERANCE)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("count", [40, pytest.param(700, marks=pytest.mark.slow)])
def test_one_compile_whatever_the_data(folder: Path, count: int) -> None:
    """In one window, and in several: 700 comparisons are more than the first holds."""
    model = prb.load(folder)
    comparisons = [record(number, 16 if number % 7 == 0 else 2, longest=8) for number in range(count)]
    first = model.score(comparisons, profile_posts=0, batch_tokens=4096)
    compiled: Any = model.score_fn
    assert compiled._cache_size() == 1
    for row, other in zip(first, model.score(comparisons, profile_posts=0, batch_tokens=4096), strict=True):
        np.testing.assert_array_equal(row, other)
    assert compiled._cache_size() == 1


def test_a_batch_of_any_trees_has_a_place_for_each_response(model) -> None:
    """Trees of one and of many responses, and more than one stream holds."""
    comparisons = [record(number, 1 + 5 * (number % 3), longest=40) for number in range(20)]
    trees = model.encode(comparisons)
    batch = model.batch(trees)
    assert batch.places.shape == (20, 11)
    rewards = np.asarray(model.score_fn(model.params, batch))
    for row, tree, expected in zip(rewards, trees, model.score(comparisons), strict=True):
        np.testing.assert_allclose(row[: len(tree.responses)], expected, atol=TOLERANCE)
