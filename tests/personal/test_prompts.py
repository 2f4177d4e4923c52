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
from prb_jax.personal.prompts import UserPrompts, extend_embedding, load_prompts, save_prompts
from prb_jax.readouts.score_tree import score_tree
from prb_jax.sharding import make_mesh
from prb_jax.trees.tree import build_tree
from tests.scoring.records import assert_close, record, write_model

USERS = Users(("ada", "ben"))
TOKENS, WIDTH = 3, 64


def table(seed: int = 0, *, users: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(users + 1, TOKENS, WIDTH)).astype(np.float32)


def of_user(number: int, user: str | None) -> prb.Comparison:
    row = record(number).to_row() | {"labels": [1.0, 0.0]}
    row.pop("user_id", None)
    return prb.Comparison.from_row(row if user is None else row | {"user_id": user}, where="test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model with soft prompts for two users."""
    place = write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    save_prompts(place, USERS, table())
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return prb.load(folder)


def test_trees_begin_with_the_ids_of_their_user() -> None:
    prompts = UserPrompts(USERS, tokens=TOKENS, first_id=100)
    trees = [build_tree([[7, 8, 1], [7, 8, 2, 3]]) for _ in range(4)]
    found = prompts.encode(trees, [of_user(i, user) for i, user in enumerate(("ben", "ada", None, "zoe"))])
    starts = [tree.prefix[0] for tree in found]
    assert starts == [106, 103, 100, 100]
    assert [tree.prefix.tolist() for tree in found] == [[k, k + 1, k + 2, 7, 8] for k in starts]
    assert found[0].prefix.dtype == np.int32
    assert [r.tolist() for r in found[0].responses] == [[1], [2, 3]]
    assert found[0].read == trees[0].read


def test_the_embedding_is_extended_by_the_table() -> None:
    here = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec("tensor", "fsdp"))
    words = jnp.arange(8.0, dtype=jnp.bfloat16).reshape(4, 2)
    rows = np.random.default_rng(0).normal(size=(3, 2, 2)).astype(np.float32)
    found = extend_embedding(words, rows, sharding=here)
    assert (found.shape, found.dtype) == ((10, 2), jnp.bfloat16)
    np.testing.assert_array_equal(found[:4], words)
    np.testing.assert_array_equal(found[4:], jnp.asarray(rows.reshape(6, 2), jnp.bfloat16))


def test_files_round_trip(tmp_path: Path) -> None:
    assert load_prompts(tmp_path, width=WIDTH) is None
    users = Users(("ada", "Zoë"))
    save_prompts(tmp_path, users, table())
    found = load_prompts(tmp_path, width=WIDTH)
    assert found is not None
    assert found.users == users
    np.testing.assert_array_equal(found.table, table())
    with pytest.raises(ValueError, match="a table of 3 rows for 1 users and the generic one"):
        save_prompts(tmp_path, Users(("ada",)), table())


def test_broken_files_are_refused(tmp_path: Path) -> None:
    """Each message names the file and what is wrong with it."""
    save_prompts(tmp_path, USERS, table())
    names, tensors = tmp_path / "users.json", tmp_path / "users.safetensors"
    whole = names.read_text()

    def refused(match: str, width: int = WIDTH) -> None:
        with pytest.raises(CheckpointError, match=match):
            load_prompts(tmp_path, width=width)

    refused(r"users\.safetensors: tensor 'soft_prompts': expected shape \[3, 3, 32\].*found \[3, 3, 64\]", 32)
    names.write_text('{"tokens": 3, "users": ["ada"]}')
    refused(r"expected shape \[2, 3, 64\].*found \[3, 3, 64\]")
    names.write_text('{"tokens": 3, "users": ["ada", "ada"]}')
    refused("users.json: field 'users': a user is named twice")
    names.write_text('{"tokens": 3, "users": ["ada", 5]}')
    refused("users.json: field 'users': expected a list of user ids")
    names.write_text('{"tokens": true, "users": ["ada", "ben"]}')
    refused("users.json: field 'tokens': expected a positive whole number, found True")
    names.write_text("[1")
    refused("users.json: not valid JSON")
    names.unlink()
    refused("has users.safetensors but no users.json")
    names.write_text(whole)
    tensors.write_bytes(tensors.read_bytes()[:40])
    refused("users.safetensors: cannot be read as safetensors")
    save_file({"other": table()}, tensors)
    refused(r"expected one tensor 'soft_prompts', found \['other'\]")
    save_file({"soft_prompts": table().astype(np.float16)}, tensors)
    refused(r"expected float32 \[users \+ 1, tokens, width\], found float16 \[3, 3, 64\]")
    tensors.unlink()
    refused("has users.json but no users.safetensors")


def test_scores_are_those_of_the_users_soft_prompt(model) -> None:
    """As with the vectors put in by hand, for known users, unknown ones and none."""
    comparisons = [of_user(i, user) for i, user in enumerate(("ada", "ben", "zoe", None, "ada"))]
    rows = USERS.rows(comparisons)
    trees = model.encode(comparisons)
    plain = {**model.params, "embed": model.params["embed"][: model.config.vocab_size]}
    front = np.zeros(TOKENS, np.int32)  # the same trees, with ids in front that have no influence
    blank = [build_tree([[*front, *tree.sequence(k)[TOKENS:]] for k in range(2)]) for tree in trees]
    options: Any = {"config": model.config, "dtype": jnp.dtype("float32")}
    prompts = jnp.asarray(table()[rows])
    by_hand = score_tree(plain, model.batch(blank), soft_prompt=prompts, **options)[..., 0]
    assert_close(model.score(comparisons), list(np.asarray(by_hand)))


def test_an_unknown_user_is_the_generic_one_and_is_counted(model) -> None:
    asked = ("ada", "ben", "zoe", None)
    ada, ben, unknown, nobody = model.score([of_user(5, user) for user in asked])
    np.testing.assert_array_equal(unknown, nobody)
    assert min(np.abs(ada - ben).max(), np.abs(ada - nobody).max(), np.abs(ben - nobody).max()) > 1e-2
    users = [of_user(i, user) for i, user in enumerate((*asked, "zoe", "yan"))]
    assert model.reader.unknown_users(users) == {"zoe", "yan"}
    assert model.reader.unknown_users([of_user(0, "ada")]) == set()


def test_the_soft_prompt_takes_its_room_from_the_length_limit(model) -> None:
    comparison = of_user(3, "ada")
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
    comparisons = [of_user(i, user) for i, user in enumerate(("ada", "zoe", "zoe", None, "yan"))]
    found = prb.evaluate(model, comparisons, out=tmp_path / "known", progress=False)
    assert found.summary["unknown_users"] == 2
    assert json.loads((tmp_path / "known" / "summary.json").read_text())["unknown_users"] == 2
    rows = [line.split(",") for line in (tmp_path / "known" / "users.csv").read_text().splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows] == [("ada", "yes"), ("zoe", "no"), ("yan", "no")]
    baseline = prb.evaluate("baseline:length", comparisons, out=tmp_path / "baseline", progress=False)
    assert "unknown_users" not in baseline.summary


def test_other_soft_prompts_are_another_model(folder: Path, model, tmp_path: Path) -> None:
    files = model.identity()["files"]
    assert {"users.json", "users.safetensors"} <= set(files)
