"""Log-probabilities, entropies and values of tokens against transformers, whatever the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.rl.forward import Actor, token_logprobs, token_states
from prb_jax.rl.learner import make_learner
from prb_jax.rl.numbers import masked_mean
from prb_jax.rl.rollouts import lengths_of
from prb_jax.rl.settings import load_ppo_settings
from prb_jax.trees.batches import make_batch
from prb_jax.trees.shapes import Bucket
from prb_jax.trees.tree import Tree
from tests.rl.tiny import settings, write_tiny_policy

TEMPERATURE = 0.7
LONG = tuple(np.arange(k, k + n, dtype=np.int32) for k, n in ((9, 5), (50, 1)))
SHORT = tuple(np.full(n, n + 3, np.int32) for n in (2, 3))
TREES = [Tree(np.arange(5, 25, dtype=np.int32), LONG, (4, 0)), Tree(np.array([7], np.int32), SHORT, (1, 2))]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("policy")
    return write_tiny_policy(folder, hidden_size=64, num_hidden_layers=2), folder


def theirs(model: Any, tree: Tree, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of one response, from a forward pass of its own without any padding."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(tree.sequence(k)[None].astype(np.int64))).logits[0].double()
    logprobs = torch.log_softmax(logits[len(tree.prefix) - 1 : -1] / TEMPERATURE, dim=-1).numpy()
    response = tree.responses[k]
    return logprobs[np.arange(len(response)), response], -(np.exp(logprobs) * logprobs).sum(-1)


def test_tokens_are_those_of_transformers_at_the_temperature_of_the_draws(
    policy: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points 1 (temperature), 2 (positions beside left padding), 3 (padding in the entropy), 7 (no shift)."""
    model, folder = policy
    given = settings(folder) | {"algorithm": "rloo", "rollout.temperature": TEMPERATURE}
    learner = make_learner(load_ppo_settings(given, reward_given=True, data_given=True))
    params, actor = learner._load(), learner.actor

    def found(bucket: Bucket, rows: int) -> tuple[np.ndarray, np.ndarray]:
        batch = make_batch(TREES, bucket, batch=rows)

        @jax.jit
        def run(params: Any) -> Any:
            states = token_states(actor, params, batch)
            return token_logprobs(actor, params, states[:, :, :-1], jnp.asarray(batch.responses))

        return tuple(map(np.asarray, run(params)))  # pyright: ignore[reportReturnType]

    narrow = found(Bucket(32, 2, 16), 2)
    monkeypatch.setattr("prb_jax.rl.forward.LOGITS_AT_ONCE", 5_000)  # three runs of tokens instead of one
    wide = found(Bucket(64, 2, 16), 3)
    mask = (np.arange(16) < lengths_of(TREES)[:, :, None]).astype(np.float32)
    for logprobs, entropies in (narrow, wide):
        for row, tree in enumerate(TREES):
            for k, response in enumerate(tree.responses):
                expected, spread = theirs(model, tree, k)
                np.testing.assert_allclose(logprobs[row, k, : len(response)], expected, atol=1e-5)
                np.testing.assert_allclose(entropies[row, k, : len(response)], spread, atol=1e-5)
        mean = float(masked_mean(jnp.asarray(entropies[:2]), jnp.asarray(mask)))
        alone = np.concatenate([theirs(model, tree, k)[1] for tree in TREES for k in range(2)])
        assert mean == pytest.approx(alone.mean(), abs=1e-5)
        assert mean > 0
    assert lengths_of(TREES).tolist() == [[5, 1], [2, 3]]
    assert isinstance(actor, Actor)
