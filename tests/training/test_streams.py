"""Training over packed streams: the losses and gradients of padded batches, few programs, and steps of whole users."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.data.comparison import Comparison
from prb_jax.models.attention.choice import STREAM_ATTENTION
from prb_jax.personal.method import Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.sharding import make_mesh
from prb_jax.training import microbatches
from prb_jax.training.config import default_config
from prb_jax.training.data import Examples
from prb_jax.training.microbatches import Microbatches, add_gradients, plan_microbatches
from prb_jax.training.objective import USER, WEIGHTS
from prb_jax.training.order import Order, UserOrder
from prb_jax.training.settings import BatchSettings
from prb_jax.training.step import sums_of
from prb_jax.training.train import train
from prb_jax.trees.packing import StreamOptions, StreamShape
from prb_jax.trees.stream_shapes import choose_step_shapes, pack_step
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree, build_tree
from tests.plain_process import plain_environment
from tests.training.small_batches import build_training, initial_params, small_config
from tests.training.tiny import curve, rows, stopped_at, write_model, write_rows

CONFIG = small_config()
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def compiled_fast():
    """Without the optimisations that take most of the time of a compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def data(users: int = 3, each: int = 4) -> tuple[list[Comparison], list[Tree]]:
    """Comparisons of two or three responses, of people with profiles, in no order."""
    rng = np.random.default_rng(0)
    comparisons, trees = [], []
    for user in range(users):
        profile = rng.integers(10, 64, 70).tolist()
        for number in range(each):
            count = 2 + number % 2
            prompt = [*profile, *rng.integers(10, 64, 9).tolist()]
            ends = [[k, *rng.integers(10, 64, rng.integers(3, 11)).tolist()] for k in range(count)]
            trees.append(build_tree([prompt + end for end in ends]))
            comparisons.append(
                Comparison(
                    id=f"{user}-{number}", question="?", responses=list("abc"[:count]), user_id=f"u{user}",
                    labels=[float(k) for k in range(count)], margin=0.1 * number,
                )
            )  # fmt: skip
    order = rng.permutation(len(trees))
    return [comparisons[place] for place in order], [trees[place] for place in order]


def examples(method: SoftPrompts) -> Examples:
    comparisons, trees = data()
    weights = np.random.default_rng(1).uniform(0.5, 2, len(trees)).astype(np.float32)
    return Examples(comparisons, method.encode(trees, comparisons), weights, method.rows(comparisons))


def planned(of: Examples, *, streams: bool, prompt_tokens: int) -> Microbatches:
    count = len(of.comparisons)
    return plan_microbatches(
        of,
        Order(count, count, seed=0),
        config=CONFIG,
        mesh=make_mesh(devices=jax.devices()[:1]),
        streams=STREAM_ATTENTION if streams else None,
        batch=BatchSettings(comparisons=count, tokens=256),
        steps=10,
        prompt_tokens=prompt_tokens,
    )


@pytest.mark.parametrize("tuning", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_step_over_streams_is_that_of_padded_batches(tuning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With soft prompts, of which some comparisons of a user have another's; in several microbatches. Of streams, one,
    two or three are computed at a time, with the same bits and no program more."""
    method = SoftPrompts(
        table=Users(("u0", "u1", "u2")), tokens=3, width=32, places=12, generic_share=0.4, seed=0,
        optimizer=RowAdam(learning_rate=lambda step: 0.1), mesh=make_mesh(devices=jax.devices()[:1]),
    )  # fmt: skip
    params = initial_params(CONFIG)
    training, first, frozen = build_training(CONFIG, tuning=tuning, params=params, method=method)
    found = examples(method)
    members = np.arange(len(found.comparisons))
    step_rows = method.rows_of_step(found.rows, members, step=0)
    assert len(np.unique(step_rows.slots)) == 4
    sums, metrics = [], []
    for streams in (False, True):
        state = jax.tree.map(jnp.copy, first)
        table = np.random.default_rng(2).normal(size=(4, 3, 32)).astype(np.float32)
        state[USER]["table"] = jax.device_put(table, method.shardings["table"])
        state = training.take(state, step_rows.ids)
        batches = planned(found, streams=streams, prompt_tokens=3).of_step(members, step_rows.slots)
        assert len(batches) > 1
        assert all(isinstance(each.batch, StreamBatch) == streams for each in batches)
        if streams:  # a profile is computed once, and again for those with the generic prompt
            alone = sum(tree.tokens for tree in found.trees)
            assert sum(each.tokens for each in batches) < 0.8 * alone
            found_sums = []
            for count in (1, 2, 3):
                monkeypatch.setattr(microbatches, "lanes", lambda mesh, held=None, n=count: n if held else 4)
                own = add_gradients(training.step, jax.tree.map(jnp.copy, state), frozen, batches)
                found_sums.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(sums_of(own))])
            assert found_sums[0] == found_sums[1] == found_sums[2]
            shapes = {each.batch.tokens.shape for each in batches}
            assert training.step.gradients._cache_size() == len(shapes)
            assert training.step.add._cache_size() == 1
            state = own
        else:
            monkeypatch.setattr(microbatches, "lanes", lambda mesh: 1)
            state = add_gradients(training.step, state, frozen, batches)
        sums.append(jax.tree.map(np.asarray, state["acc"]))
        metrics.append(training.step.update(state)[1])
    assert set(sums[0]) == {WEIGHTS, USER}
    assert np.linalg.norm(sums[0][USER]) > 0.1
    for ours, theirs in zip(jax.tree.leaves(sums[1]), jax.tree.leaves(sums[0]), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    for name, value in metrics[0].items():
        assert float(metrics[1][name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name


def test_a_run_has_one_or_two_shapes_and_the_streams_of_a_step_are_full() -> None:
    rng = np.random.default_rng(0)
    steps = [
        [
            build_tree(np.split(rng.integers(3, 60, 2 * size), 2))
            for size in np.clip(rng.lognormal(5, 0.45, 16), 20, 900).astype(int)
        ]
        for _ in range(6)
    ]
    for streams in (1, 2):
        options = StreamOptions(tokens=2048, streams=streams)
        (one,) = choose_step_shapes(steps, options, most_shapes=1, compile_cost=0, count=1000)
        both = choose_step_shapes(steps, options, most_shapes=4, compile_cost=0, count=1000)
        assert len(both) == 2
        assert choose_step_shapes(steps, options, most_shapes=4, compile_cost=1e9, count=9) == (one,)
        computed = needed = 0
        for trees in steps:
            found: list[int] = []
            for packed in pack_step(trees, both, options):
                assert {stream.shape for stream in packed} <= set(both)
                assert len(packed) <= streams
                computed += streams * packed[0].shape.tokens
                found += [member for stream in packed for member in stream.members]
            needed += sum(tree.tokens for tree in trees)
            assert sorted(found) == list(range(len(trees)))
        assert needed / computed > (0.85 if streams == 1 else 0.75)
    # A tree that is longer than all others gets a stream of its own.
    long = build_tree([rng.integers(3, 60, 3000), rng.integers(3, 60, 30)])
    shapes = [packed[0].shape for packed in pack_step([*steps[0], long], both, options)]
    assert [shape for shape in shapes if shape not in both] == [StreamShape(3072, both[-1].reads)]


def test_the_streams_of_a_step_are_as_full_as_each_other() -> None:
    rng = np.random.default_rng(0)
    trees = [build_tree(np.split(rng.integers(3, 60, size), 2)) for size in (700, 520, 460, 330)]
    options = StreamOptions(tokens=1280)
    (shape,) = choose_step_shapes([trees], options, most_shapes=1, compile_cost=0, count=10)
    members = [stream.members for packed in pack_step(trees, (shape,), options) for stream in packed]
    # First fit alone would put the two longest together, in a stream that is a fifth longer.
    assert sorted(map(sorted, members)) == [[0, 3], [1, 2]]
    assert shape.tokens < sum(tree.tokens for tree in trees[:2])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    found = rows(60, users=9)
    for row in found[:13]:
        row["user_id"] = "many"
    for row in found[13:16]:
        del row["user_id"]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", found)


def config(model, file, **changes: Any) -> Any:
    chosen: Any = default_config()
    chosen.model, chosen.data, chosen.steps = str(model), str(file), 6
    chosen.method, chosen.batch.comparisons = "profile_context", 8
    chosen.checkpoint.every, chosen.validation.every, chosen.validation.by = 2, 3, "id"
    chosen.optimizer.learning_rate, chosen.log.plot = 1e-3, False
    for name, value in changes.items():
        chosen[name] = value
    return chosen


@pytest.mark.slow
def test_runs_over_streams_and_over_padded_batches_are_alike(model, file, tmp_path):
    """And what is computed again changes nothing."""
    found = {}
    for name, changes in {
        "auto": {},
        "blockwise": {"attention": "blockwise"},
        "remat": {"remat": "full"},
    }.items():
        out = train(config(model, file, **changes), out=tmp_path / name, progress=False).out
        found[name] = (
            np.asarray(curve(out, "loss", "margin", "grad_norm")),
            np.asarray(curve(out, "validation_loss")),
        )
        (session,) = json.loads((out / "train.json").read_text())["sessions"]
        assert (session["attention"] == STREAM_ATTENTION) == (name != "blockwise")
    for name in ("blockwise", "remat"):
        for ours, theirs in zip(found["auto"], found[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_steps_of_whole_users_are_resumed_and_a_large_user_is_split(
    model, file, tmp_path, monkeypatch, capsys
):
    chosen = config(model, file, batch_by="user", tuning="head")
    whole = train(chosen, out=tmp_path / "whole", progress=False)
    with stopped_at(monkeypatch, 3):
        train(chosen, out=tmp_path / "stopped", progress=False)
    again = train(chosen, out=tmp_path / "stopped", progress=False)
    assert curve(again.out, "loss", "grad_norm", "epoch") == curve(whole.out, "loss", "grad_norm", "epoch")
    assert (
        "batch_by=user: split over several steps: 1 of the users, who have more than 8 comparisons"
        in capsys.readouterr().err
    )
    assert whole.summary["split_users"] == 1
    counted = sum(number for _, number in curve(whole.out, "comparisons"))
    assert whole.summary["pairs_seen"] == counted < 6 * 8
    with pytest.raises(prb.RunError, match="batch_by"):
        train(config(model, file, tuning="head"), out=tmp_path / "whole", progress=False)


def test_an_epoch_of_users_sees_every_comparison_once_and_users_whole() -> None:
    sizes = [3, 5, 1, 9, 4, 4, 2, 21]
    found = [
        Comparison(id=f"{user}-{k}", question="?", chosen="a", rejected="b", user_id=f"u{user}")
        for user, size in enumerate(sizes)
        for k in range(size)
    ]
    found += [replace(found[0], id=f"alone-{k}", user_id=None) for k in range(3)]
    order = UserOrder(found, per_step=8, seed=1)
    assert order.split == 2
    steps, number = [], 0
    while order.seen(number) < len(found):
        steps.append(order.step(number))
        number += 1
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(found)))
    assert order.epoch_of(number) == 1.0
    assert max(map(len, steps)) <= 8
    assert len(steps) <= 9  # 52 comparisons: few places stay free
    for user, size in enumerate(sizes):
        parts = [sum(found[place].user_id == f"u{user}" for place in step) for step in steps]
        assert sorted(part for part in parts if part) == {9: [4, 5], 21: [7, 7, 7]}.get(size, [size])
    late = UserOrder(found, per_step=8, seed=1)
    np.testing.assert_array_equal(late.step(3 * number), order.step(3 * number))
    second = [order.step(number + at) for at in range(number)]
    assert not all(np.array_equal(a, b) for a, b in zip(steps, second, strict=True))
    with pytest.raises(
        prb.DataError, match="batch_by=user: no comparison of the training data has a user_id"
    ):
        UserOrder(found[-3:], per_step=8, seed=1)


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh(tmp_path) -> None:
    """Streams over devices, heads and tokens split, and layers that are computed again: one program each. Also with the
    kernel for TPUs."""
    meshes = ["data=2,tensor=2", "fsdp=2,sequence=2", "fsdp=2,tensor=2/kernel"]
    command = [sys.executable, "-m", "tests.training.mesh_steps", str(tmp_path / "out.json"), "4", *meshes]
    environment = plain_environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    alone = found.pop("alone")
    for spec in meshes:
        one = found[spec]
        assert one["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        np.testing.assert_allclose(one["gradients"], alone["gradients"], atol=1e-5)
        assert one["programs"] == 1
        assert all(streams == 2 for streams, _ in one["streams"])
