"""LongRoPE beyond its original length, against transformers: a conversation of more tokens has other angles from its
first token on, also in a stream with shorter ones, of which it may share the beginning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.models.checkpoints.hf_map import file_tensors, flatten
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.config.decoder import load_config
from prb_jax.trees.packing import pack_together, sort_trees
from prb_jax.trees.streams import StreamOptions
from prb_jax.trees.tree import Tree, build_tree
from tests.packed import packed_batch, read_trees
from tests.parity.oracle import transformers_gradients, transformers_scores
from tests.tiny_models import _LONGROPE, write_tiny_model
from tests.training.tiny import comparisons, write_model

SWITCH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {**_LONGROPE, "original_max_position_embeddings": SWITCH}
    path = tmp_path_factory.mktemp("phi3")
    return write_tiny_model(
        path,
        "phi3-longrope",
        rope=rope,
        original_max_position_embeddings=SWITCH,
        max_position_embeddings=1024,
    )


def trees() -> list[Tree]:
    """One profile for all: conversations below the limit, at it and above it, in one tree and in several."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(3, 250, count).tolist()

    profile = ids(50)
    made = []
    for question, lengths in (
        (0, (SWITCH - 50, SWITCH - 49, 5, 60)),  # two are short and two are long
        (4, (3, 10)),
        (4, (100, 130)),
        (0, (70, 90)),
        (0, (6, 9)),
        (3, (12, 11, 9, 40)),
    ):
        shared = [*profile, *ids(question)]
        made.append(build_tree([[*shared, 3 + k, *ids(count - 1)] for k, count in enumerate(lengths)]))
    return [
        *made,
        build_tree([[*ids(20), 1], [*ids(80), 2]]),
        build_tree([ids(SWITCH)]),
        build_tree([ids(SWITCH + 1)]),
    ]


def conversations(tree: Tree) -> list[np.ndarray]:
    return [tree.sequence(k) for k in range(len(tree.responses))]


def test_scores_equal_transformers_on_both_sides_of_the_limit(folder: Path) -> None:
    config, made = load_config(folder), trees()
    assert (config.rope_switch, config.max_position_embeddings) == (SWITCH, 1024)
    params = load_params(folder, config).params
    read = jax.jit(partial(read_trees, config=config, dtype=jnp.dtype("float32")))
    both = packed_batch(made, rope_switch=SWITCH), packed_batch(made)
    ours, without = (np.asarray(read(params, batch))[..., 0] for batch in both)
    for row, tree in enumerate(made):
        expected = transformers_scores(folder, conversations(tree))[:, 0]
        np.testing.assert_allclose(ours[row, : len(expected)], expected, atol=1e-5, rtol=0)
        long = np.asarray([len(one) > SWITCH for one in conversations(tree)])
        assert (np.abs(without[row, : len(expected)] - expected)[long] > 1e-3).all()


def test_gradients_equal_transformers(folder: Path) -> None:
    config, tree = load_config(folder), trees()[0]
    params, batch = load_params(folder, config).params, packed_batch([tree], rope_switch=SWITCH)
    factors = np.asarray([1.0, -0.5, 0.7, -1.2], np.float32)

    def total(params: Any) -> jax.Array:
        scores = read_trees(params, batch, config=config, dtype=jnp.dtype("float32"), differentiated=True)
        return (scores[0, :, 0] * factors).sum()

    gradients = flatten(jax.device_get(jax.jit(jax.grad(total))(params)))
    ours = dict(file_tensors(gradients, config))
    theirs = transformers_gradients(folder, conversations(tree), factors)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) < 1e-5 * np.linalg.norm(gradient), name


def test_beginnings_are_shared_on_each_side_alone() -> None:
    """The beginning of a tree with conversations on both sides is computed twice."""
    made, options = trees(), StreamOptions(2048, rope_switch=SWITCH)
    (stream,) = pack_together(made, options)[:1]
    ordered = sort_trees(made, options)
    long = [[len(one) > SWITCH for one in conversations(made[index])] for index in ordered.order]
    for place, shared in enumerate(ordered.shared):
        if shared:
            assert {*long[place], *long[place - 1]} in ({False}, {True})
    mixed = [index for index, tree in enumerate(made) if len(tree.groups(SWITCH)) == 2]
    assert mixed == [0, 5, 6]
    assert [len(made[index].prefix) for index in mixed] == [50, 53, 0]
    # Below and above the limit two trees each begin with the profile.
    assert stream.tokens == sum(tree.tokens for tree in made) + 50 + 53 - 50 - 50
    plain = pack_together(made, StreamOptions(2048))[0].tokens
    assert plain < stream.tokens


def test_a_reward_model_scores_texts_on_both_sides_of_the_limit(tmp_path: Path) -> None:
    """In streams, and as rows of tokens."""
    import json

    pytest.importorskip("torch")
    base = write_model(tmp_path / "base", architectures=["Phi3ForSequenceClassification"], model_type="phi3")
    pairs = comparisons(6, seed=5)
    sequences = [one for tree in prb.load(base).encode(pairs) for one in conversations(tree)]
    lengths = sorted(len(one) for one in sequences)
    middle = lengths[len(lengths) // 2]
    assert lengths[0] <= middle < lengths[-1]
    raw = json.loads((base / "config.json").read_text())
    pairs_of_a_head = raw["hidden_size"] // raw["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * pairs_of_a_head, "long_factor": [4.0] * pairs_of_a_head}
    raw["rope_scaling"] = {"type": "longrope", **factors}
    (base / "config.json").write_text(json.dumps(raw | {"original_max_position_embeddings": middle}))
    rm = prb.load(base)
    expected = transformers_scores(base, sequences)[:, 0]
    np.testing.assert_allclose(np.concatenate(rm.score(pairs)), expected, atol=1e-5, rtol=0)
    rows = np.zeros((len(sequences), lengths[-1]), np.int32)
    for row, one in zip(rows, sequences, strict=True):
        row[: len(one)] = one
    alone = rm.module.score_tokens(rows, np.asarray([len(one) for one in sequences]))
    np.testing.assert_allclose(alone, expected, atol=1e-5, rtol=0)
