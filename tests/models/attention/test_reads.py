"""Attention from the read positions alone, against the whole layer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.attention.reads import attend_from_reads, take_places
from prb_jax.models.decoder import decode_tree
from prb_jax.models.random_params import init_params
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.batches import Bucket, make_batch
from prb_jax.trees.tree import build_tree
from tests.models.attention.dense import reference_attention
from tests.models.compiled import jit
from tests.models.test_decoder import family_config
from tests.sweeps import sweep

BUCKET = Bucket(12, 3, 7)
LENGTHS = jnp.asarray([12, 5, 0])
INSIDE = np.asarray([[6, 0, 3], [1, 5, 2], [0, 0, 0]])
PLACES = jnp.asarray(12 + 7 * np.arange(3) + INSIDE, jnp.int32)


@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equals_the_oracle_at_these_places(window: int | None, softcap: float | None) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, BUCKET.tokens, n, 8)), jnp.float32) for n in (4, 2, 2))
    options = {"bucket": BUCKET, "prefix_lengths": LENGTHS, "window": window, "softcap": softcap}
    whole = reference_attention(q, k, v, **options)
    expected = take_places(whole.reshape(3, BUCKET.tokens, 32), PLACES)
    queries = take_places(q.reshape(3, BUCKET.tokens, 32), PLACES).reshape(3, 3, 4, 8)
    out = attend_from_reads(queries, k, v, places=PLACES, **options)
    np.testing.assert_allclose(out.reshape(3, 3, 32), expected, atol=2e-6)
    narrow = attend_from_reads(*(x.astype(jnp.bfloat16) for x in (queries, k, v)), places=PLACES, **options)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32).reshape(3, 3, 32), expected, atol=0.05)


@pytest.mark.parametrize("family", sweep(["qwen3", "gemma2", "mistral"], few=(1,)))
def test_a_model_of_one_layer_gives_the_scores_and_gradients_of_the_whole_layer(
    family: str, tmp_path
) -> None:
    """Gemma 2 brings windows, soft caps and post-norms; the oracle computes all places."""
    config = family_config(family, tmp_path, num_hidden_layers=1)
    params = init_params(config, seed=1)
    trees = [build_tree([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11, 12]]), build_tree([[3], [4, 5]])]
    batch = make_batch(trees, Bucket(6, 2, 4), batch=3)

    def loss(params, **options):
        scores = score_tree(params, batch, config=config, dtype=jnp.float32, **options)[:2, :, 0]
        return jnp.sum(scores * jnp.asarray([[1.0, -1.0], [0.5, 2.0]])), scores

    (_, scores_at_reads), gradient = jit(jax.value_and_grad(loss, has_aux=True))(params)
    run = jit(jax.value_and_grad(functools.partial(loss, attention=reference_attention), has_aux=True))
    (_, expected), oracle = run(params)
    np.testing.assert_allclose(scores_at_reads, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, oracle)
    for remat in ("dots", "full"):
        again = jit(jax.grad(lambda p, remat=remat: loss(p, remat=remat)[0]))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), again, gradient)


def test_with_more_layers_the_places_are_taken_from_the_whole(tmp_path) -> None:
    config = family_config("qwen3", tmp_path, num_hidden_layers=2)
    params = init_params(config)
    batch = make_batch([build_tree([[5, 6, 7, 8], [5, 6, 9]])], Bucket(4, 2, 4), batch=1)
    places = jnp.asarray([[5, 8]], jnp.int32)
    run = jit(functools.partial(decode_tree, config=config, dtype=jnp.float32))
    np.testing.assert_allclose(
        run(params, batch, places=places), take_places(run(params, batch), places), rtol=1e-6
    )
