"""The last layer at the read places alone, against all of it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models import decoder
from prb_jax.models.attention.streams import take_places
from prb_jax.models.decoder import decode_stream
from prb_jax.models.model import bind, init_params
from prb_jax.trees.tree import build_tree
from tests.models.attention.test_streams import dense
from tests.models.compiled import jit
from tests.models.test_decoder import family_config
from tests.packed import packed_batch, read_trees
from tests.sweeps import sweep


@pytest.mark.parametrize("family", sweep(["qwen3", "gemma2", "mistral"], few=(1,)))
def test_a_model_of_one_layer_gives_the_scores_and_gradients_of_the_whole_layer(
    family: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 brings windows, soft caps and post-norms; the oracle computes all places, under a mask written down
    whole."""
    config = family_config(family, tmp_path, num_hidden_layers=1)
    params = init_params(config, seed=1)
    trees = [build_tree([[5, 6, 7, 8, 9], [5, 6, 7, 10, 11, 12]]), build_tree([[3], [4, 5]])]
    batch = packed_batch(trees, window=config.sliding_window)

    def loss(params, **options):
        scores = read_trees(params, batch, config=config, dtype=jnp.float32, **options)[..., 0]
        return jnp.sum(scores * jnp.asarray([[1.0, -1.0], [0.5, 2.0]])), scores

    (_, scores_at_reads), gradient = jit(jax.value_and_grad(loss, has_aux=True))(params)
    for remat in ("dots", "full"):
        again = jit(jax.grad(lambda p, remat=remat: loss(p, remat=remat)[0]))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), again, gradient)

    def whole(
        q: Any, k: Any, v: Any, *, mesh: Any, window: int | None = None, softcap: Any = None, **_: Any
    ) -> Any:
        return dense(q, k, v, batch, window, softcap)

    def at_places(q: Any, k: Any, v: Any, *, mesh: Any, **options: Any) -> Any:
        """All places computed, from queries that stand at the read places, and those places taken."""
        rows, reads = jnp.arange(1)[:, None], jnp.asarray(batch.reads)
        everywhere = jnp.zeros((1, k.shape[1], *q.shape[2:]), q.dtype).at[rows, reads].set(q)
        return whole(everywhere, k, v, mesh=mesh, **options)[rows, reads]

    monkeypatch.setattr(decoder, "stream_attention", whole)
    monkeypatch.setattr(decoder, "attend_from_stream_reads", at_places)
    (_, expected), oracle = jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(scores_at_reads, expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradient, oracle)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_states_of_the_read_places_are_those_of_the_whole(layers: int, tmp_path) -> None:
    config = family_config("qwen3", tmp_path, num_hidden_layers=layers)
    params, batch = init_params(config), packed_batch([build_tree([[5, 6, 7, 8], [5, 6, 9]])])
    run = functools.partial(decode_stream, dtype=jnp.float32)
    decoder = bind(config, params)
    some, whole = (jit(functools.partial(run, reads_only=only))(decoder, batch) for only in (True, False))
    np.testing.assert_allclose(some, take_places(whole, jnp.asarray(batch.reads)), rtol=1e-5, atol=1e-6)
