"""Soft prompts of users in files, and in the scores of a loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import prb_jax as prb
from prb_jax.errors import CheckpointError, DataError
from prb_jax.personal.method import Users
from prb_jax.personal.prompts import SavedPrompts, load_prompts, save_prompts
from prb_jax.platform.meshes import make_mesh
from prb_jax.training.microbatches import named_tree
from tests.packed import batch_alone, read_trees
from tests.scoring.records import assert_close, record, write_model

USERS = Users(("ada", "ben"))
TOKENS, WIDTH = 3, 64


TABLE = np.random.default_rng(0).normal(size=(3, TOKENS, WIDTH)).astype(np.float32)


def of_users(*users: str | None) -> list[prb.Comparison]:
    """A comparison of each of these users."""
    rows = [record(place).to_row() | {"labels": [1.0, 0.0]} for place in range(len(users))]
    named = [row if user is None else row | {"user_id": user} for row, user in zip(rows, users, strict=True)]
    return [prb.Comparison.from_row(row, where="test") for row in named]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Any:
    """A tiny model with soft prompts for two users."""
    place = write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    save_prompts(place, USERS, TABLE)
    return prb.load(place)


def test_the_embedding_is_extended_by_the_table() -> None:
    here = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec("tensor", "fsdp"))
    words = jnp.arange(8.0, dtype=jnp.bfloat16).reshape(4, 2)
    rows = np.random.default_rng(0).normal(size=(3, 2, 2)).astype(np.float32)
    extended = SavedPrompts(Users(("ada", "bo")), rows).extend(words, sharding=here)
    assert (extended.shape, extended.dtype) == ((10, 2), jnp.bfloat16)
    np.testing.assert_array_equal(extended[:4], words)
    np.testing.assert_array_equal(extended[4:], jnp.asarray(rows.reshape(6, 2), jnp.bfloat16))


def test_files_round_trip(tmp_path: Path) -> None:
    assert load_prompts(tmp_path, width=WIDTH) is None
    users = Users(("ada", "Zoë"))
    save_prompts(tmp_path, users, TABLE)
    loaded = load_prompts(tmp_path, width=WIDTH)
    assert loaded is not None
    assert loaded.users == users
    np.testing.assert_array_equal(loaded.table, TABLE)
    with pytest.raises(ValueError, match="a table of 3 rows for 1 users and the generic one"):
        save_prompts(tmp_path, Users(("ada",)), TABLE)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """Each message names the file and what is wrong with it."""
    save_prompts(tmp_path, USERS, TABLE)
    names, tensors = tmp_path / "users.json", tmp_path / "users.safetensors"
    whole = names.read_text()

    def refused(match: str, width: int = WIDTH) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_prompts(tmp_path, width=width)

    refused(r"users\.safetensors: tensor 'soft_prompts': expected shape \[3, 3, 32\].*found \[3, 3, 64\]", 32)
    for text, match in (
        ('{"tokens": 3, "users": ["ada"]}', r"expected shape \[2, 3, 64\].*found \[3, 3, 64\]"),
        ('{"tokens": 3, "users": ["ada", "ada"]}', "users.json: field 'users': a user is named twice"),
        ('{"tokens": 3, "users": ["ada", 5]}', "users.json: field 'users': expected a list of user ids"),
        (
            '{"tokens": true, "users": ["ada", "ben"]}',
            "field 'tokens': expected a positive whole number, found True",
        ),
        ("[1", "users.json: not valid JSON"),
    ):
        names.write_text(text)
        refused(match)
    names.unlink()
    refused("has users.safetensors but no users.json")
    names.write_text(whole)
    tensors.write_bytes(tensors.read_bytes()[:40])
    refused("users.safetensors: cannot be read as safetensors")
    save_file({"other": TABLE}, tensors)
    refused(r"expected one tensor 'soft_prompts', found \['other'\]")
    save_file({"soft_prompts": TABLE.astype(np.float16)}, tensors)
    refused(r"expected float32 \[users \+ 1, tokens, width\], found float16 \[3, 3, 64\]")
    tensors.unlink()
    refused("has users.json but no users.safetensors")


def test_scores_are_those_of_the_users_soft_prompt(model) -> None:
    """As with the vectors put in by hand, for known users, unknown ones and none."""
    comparisons = of_users("ada", "ben", "zoe", None, "ada")
    trees = model.encode(comparisons)
    plain = {**model.params, "embed": model.params["embed"][: model.config.vocab_size]}
    rows = USERS.rows(comparisons)  # the same trees, with the numbers of their rows in front
    named = [named_tree(tree, row, TOKENS) for tree, row in zip(trees, rows, strict=True)]
    options: Any = {"config": model.config, "dtype": jnp.dtype("float32")}
    by_hand = read_trees(plain, batch_alone(named), soft_prompts=jnp.asarray(TABLE), **options)[..., 0]
    assert_close(model.score(comparisons), list(np.asarray(by_hand)))
    assert {"users.json", "users.safetensors"} <= set(model.identity()["files"])


def test_the_soft_prompt_takes_its_room_from_the_length_limit(model) -> None:
    comparison = of_users(None, None, None, "ada")[3]
    (tree,) = model.encode([comparison])
    longest = max(len(tree.sequence(k)) for k in range(2))
    (whole,) = model.encode([comparison], max_length=longest)
    assert not whole.truncation.any
    (cut,) = model.encode([comparison], max_length=longest - 1)
    assert cut.truncation.any
    assert max(len(cut.sequence(k)) for k in range(2)) <= longest - 1
    np.testing.assert_array_equal(cut.prefix[:TOKENS], tree.prefix[:TOKENS])
    with pytest.raises(DataError, match="max_length 3 leaves no room beside the 3 tokens of"):
        model.encode([comparison], max_length=3)


def test_the_evaluation_counts_unknown_users(model, tmp_path: Path) -> None:
    comparisons = of_users("ada", "zoe", "zoe", None, "yan")
    result = prb.evaluate(model, comparisons, out=tmp_path / "known", progress=False)
    assert result.summary["unknown_users"] == 2
    assert json.loads((tmp_path / "known" / "summary.json").read_text())["unknown_users"] == 2
    rows = [line.split(",") for line in (tmp_path / "known" / "users.csv").read_text().splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows] == [("ada", "yes"), ("zoe", "no"), ("yan", "no")]
    baseline = prb.evaluate("baseline:length", comparisons, out=tmp_path / "baseline", progress=False)
    assert "unknown_users" not in baseline.summary
