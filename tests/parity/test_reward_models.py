"""Every row of the registry: found by its files, and its scores against torch in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.config.decoder import STANDARD, DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import Linear
from prb_jax.models.readouts.open_model import resolve_model
from prb_jax.models.readouts.registry import ROWS
from prb_jax.trees.streams import StreamBatch, StreamOptions
from prb_jax.trees.tree import build_tree
from tests.packed import packed_batch, read_trees
from tests.parity.reward_models import CASES, TOGETHER, RowCase, sequences, steps, write_case

TOLERANCE = 1e-5


def batch_of(conversations: list[list[list[int]]]) -> StreamBatch:
    """Of one shape, so that rows share a program."""
    trees = [build_tree(three) for three in conversations]
    return packed_batch(trees, options=StreamOptions(tokens=256, block=256))


@functools.cache
def program(config: DecoderConfig) -> Callable[[Params, StreamBatch], jax.Array]:
    return jax.jit(lambda p, b: read_trees(p, b, config=config, dtype=jnp.dtype("float32")))


def scores(folder: Path, config: DecoderConfig, conversations: list[list[list[int]]]) -> np.ndarray:
    params, report = load_params(folder, config)
    assert not set(report.ignored_keys) & set(report.used_keys)
    # What tensors are called makes no difference to the program: rows share it.
    head = Linear(bias=config.head.bias) if isinstance(config.head, Linear) else config.head
    same = replace(config, head=head, layout=STANDARD, architectures=(), ignored_keys=())
    rewards = program(same)(params, batch_of(conversations))
    assert rewards.dtype == jnp.float32
    assert rewards.shape[-1] == 1
    return np.asarray(rewards)[..., 0]


@pytest.mark.parametrize("case", CASES, ids=[f"{case.row}-{case.body}-{n}" for n, case in enumerate(CASES)])
def test_scores_of_a_row_equal_those_of_torch(case: RowCase, tmp_path: Path) -> None:
    folder, reference = write_case(case, tmp_path)
    asked = case.row if case.row.startswith("vocabulary:") else None
    resolved = resolve_model(folder, name=str(folder), readout=asked)
    assert resolved.row.name == case.row
    conversations = [sequences(case, seed=seed) for seed in (1, 2)]
    expected = [[reference(ids) for ids in three] for three in conversations]
    np.testing.assert_allclose(
        scores(folder, resolved.config, conversations), expected, atol=TOLERANCE, rtol=0
    )
    assert np.ptp(expected) > 1e-3


def test_each_way_to_put_steps_together(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.row == "qwen2-prm")
    conversations = [sequences(case, seed=seed) for seed in (1, 2)]
    rewards = {}
    for together in TOGETHER:
        one = replace(case, score=steps(together)[1], folder=together)
        folder, reference = write_case(one, tmp_path, seed=5)
        resolved = resolve_model(folder, readout=f"qwen2-prm:{together}")
        assert (resolved.row.name, resolved.readout) == ("qwen2-prm", f"qwen2-prm:{together}")
        rewards[together] = scores(folder, resolved.config, conversations)
        expected = [[reference(ids) for ids in three] for three in conversations]
        np.testing.assert_allclose(rewards[together], expected, atol=TOLERANCE, rtol=0)
    assert all(
        np.abs(rewards[one] - rewards[other]).max() > 10 * TOLERANCE
        for one, other in itertools.combinations(TOGETHER, 2)
    )


def test_every_row_has_a_case() -> None:
    # Rows on an encoder are compared with transformers in tests/scoring/test_pair_model.py.
    of_encoders = {"deberta-pair", "modernbert-pair"}
    assert {case.row for case in CASES} - {"vocabulary:17,4"} == set(ROWS) - of_encoders
