"""The pure jitted scorer that other programs build on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.scoring.batching import stream_scores
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.shapes import fixed_shapes
from tests.scoring.records import TOLERANCE, assert_close, record


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


@pytest.mark.parametrize("count", [40, pytest.param(700, marks=pytest.mark.slow)])
def test_one_compile_for_each_bucket(folder: Path, count: int) -> None:
    """In one window, and in several: 700 comparisons are more than the first holds."""
    model = prb.load(folder)
    comparisons = [record(number, 16 if number % 7 == 0 else 2, longest=8) for number in range(count)]
    shapes: set[tuple[tuple[int, ...], ...]] = set()

    def scores() -> list[np.ndarray]:
        rows: dict[int, np.ndarray] = {}
        encode, options = functools.partial(model.encode, profile_posts=0), model.shape_options(4096)
        for batch in stream_scores(comparisons, encode=encode, dispatch=dispatch, options=options):
            rows |= zip(batch.indices, batch.scores, strict=True)
        return [rows[index] for index in range(count)]

    def dispatch(batch: TreeBatch) -> jax.Array:
        shapes.add((batch.prefix.shape, batch.responses.shape))
        return model.score_fn(model.params, model.place(batch))

    compiled: Any = model.score_fn
    first = scores()
    buckets = {(prefix[1:], responses[1:]) for prefix, responses in shapes}
    assert compiled._cache_size() == len(shapes) == len(buckets)
    assert 2 <= len(buckets) <= model.shape_options().max_buckets
    for row, other in zip(first, scores(), strict=True):
        np.testing.assert_array_equal(row, other)
    # Streams are another program, and a single one whatever the data.
    assert_close(first, model.score(comparisons, profile_posts=0, batch_tokens=4096))
    assert compiled._cache_size() == len(buckets)
    of_streams: Any = model.stream_fn
    assert of_streams is None or of_streams._cache_size() == 1


def test_a_server_compiles_its_shapes_before_the_first_request(folder: Path) -> None:
    """No data is needed for them, and no request of up to these lengths compiles anything more."""
    model = prb.load(folder)
    options = model.shape_options(512)
    fixed = fixed_shapes([48, 64], [2, 4], [48], options=options)
    for bucket, rows in fixed.rows.items():
        model.score_fn(model.params, model.place(make_batch([], bucket, batch=rows)))
    compiled: Any = model.score_fn
    assert compiled._cache_size() == len(fixed.rows) == 4

    comparisons = [record(number, 2 + number % 3, longest=8) for number in range(9)]
    trees = model.encode(comparisons, profile_posts=0)
    rows: dict[int, np.ndarray] = {}
    for request in (range(1), range(1, 9)):
        for dealt in fixed.batches([trees[number].shape for number in request], request):
            batch = make_batch([trees[number] for number in dealt.members], dealt.bucket, batch=dealt.rows)
            scores = model.score_fn(model.params, model.place(batch))
            for row, number in zip(np.asarray(scores), dealt.members, strict=False):
                rows[number] = row[: len(trees[number].responses)]
    assert compiled._cache_size() == len(fixed.rows)
    assert_close([rows[number] for number in range(9)], model.score(comparisons, profile_posts=0))
