"""Training over packed streams, by XLA, by the kernel for TPUs and by cuDNN, whose steps and calls XLA runs here: the
losses and gradients of padded batches, few programs, and steps of whole users."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.data.comparison import Comparison
from prb_jax.models.attention import cudnn, stream_kernel
from prb_jax.models.attention.choice import (
    CUDNN_STREAM_ATTENTION,
    KERNEL_STREAM_ATTENTION,
    STREAM_ATTENTION,
)
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.personal.method import Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.sharding import make_mesh
from prb_jax.training import record, trainer
from prb_jax.training import step as training_step
from prb_jax.training.config import BatchSettings
from prb_jax.training.data import Examples, Order
from prb_jax.training.microbatches import STEPS_SIMULATED, Layout, labelled, plan_layout
from prb_jax.training.objective import USER, WEIGHTS
from prb_jax.training.step import Microbatch, add_gradients, sums_of
from prb_jax.training.train import train
from prb_jax.trees.kernel_tables import StepTable
from prb_jax.trees.packing import StreamOptions, StreamShape
from prb_jax.trees.stream_shapes import choose_step_shapes, pack_step
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree, build_tree
from tests.plain_process import plain_environment
from tests.sweeps import sweep
from tests.training.small_batches import WINDOWED, build, small_config
from tests.training.tiny import config, curve, rows, stopped_at, write_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def compiled_fast():
    """Without the optimisations that take most of the time of a compile."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    by_xla = functools.partial(stream_kernel.kernel_attention, interpret=True)
    monkeypatch.setattr(stream_kernel, "kernel_attention", by_xla)
    by_xla = functools.partial(cudnn.cudnn_stream_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)


def comparison(number: int, responses: int, user: str) -> Comparison:
    return Comparison(
        id=str(number), question="?", responses=list("abc"[:responses]), user_id=user,
        labels=[float(k) for k in range(responses)], margin=0.1 * number,
    )  # fmt: skip


def of_users(users: int = 3, each: int = 4) -> tuple[list[Comparison], list[Tree]]:
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
            comparisons.append(comparison(number, count, f"u{user}"))
    order = rng.permutation(len(trees))
    return [comparisons[place] for place in order], [trees[place] for place in order]


def uneven(count: int, longest: int = 100) -> tuple[list[Comparison], list[Tree]]:
    """Comparisons of two or three responses of uneven lengths."""
    rng = np.random.default_rng(0)
    comparisons, trees = [], []
    for number in range(count):
        shared, responses = rng.integers(10, 64, rng.integers(5, longest)).tolist(), 2 + number % 2
        ends = [[k, *rng.integers(10, 64, rng.integers(2, 40)).tolist()] for k in range(responses)]
        trees.append(build_tree([shared + end for end in ends]))
        comparisons.append(comparison(number, responses, f"u{number % 3}"))
    return comparisons, trees


def planned(
    examples: Examples,
    model: DecoderConfig,
    *,
    streams: str | None,
    tokens: int,
    steps: int = 1,
) -> Layout:
    per_step = len(examples) // steps
    order = Order(len(examples), per_step, seed=0)
    return plan_layout(
        examples.trees,
        [order.step(step) for step in range(STEPS_SIMULATED)],
        per_step=per_step,
        steps=10,
        config=model,
        mesh=make_mesh(devices=jax.devices()[:1]),
        streams=streams,
        batch=BatchSettings(comparisons=per_step, tokens=tokens),
    )


@pytest.mark.parametrize(
    ("streams", "tuning", "remat", "changes"),
    sweep(
        [
            (STREAM_ATTENTION, "full", "none", {}),
            (KERNEL_STREAM_ATTENTION, "lora", "dots", {}),
            (STREAM_ATTENTION, "lora", "none", {}),
            (KERNEL_STREAM_ATTENTION, "full", "none", WINDOWED),
            (KERNEL_STREAM_ATTENTION, "full", "full", {}),
            (KERNEL_STREAM_ATTENTION, "full", "none", {"num_hidden_layers": 1}),
            (CUDNN_STREAM_ATTENTION, "full", "full", {}),
            (CUDNN_STREAM_ATTENTION, "lora", "dots", {"sliding_window": 20, "use_sliding_window": True}),
        ],
        few=(0, 6),
    ),
)
def test_a_step_over_streams_is_that_of_padded_batches(
    streams: str, tuning: str, remat: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With soft prompts, of which some comparisons of a user have another's; sliding windows and soft-caps; in several
    microbatches. On CPUs one, two or three are computed at a time, with the same bits and no program more."""
    kernel, model = streams != STREAM_ATTENTION, small_config(**changes)
    method = SoftPrompts(
        table=Users(("u0", "u1", "u2")), tokens=3, width=32, places=12, generic_share=0.4, seed=0,
        optimizer=RowAdam(learning_rate=lambda step: 0.1), mesh=make_mesh(devices=jax.devices()[:1]),
    )  # fmt: skip
    step, first, frozen = build(model, tuning=tuning, method=method, remat=remat)
    comparisons, trees = uneven(12) if kernel else of_users()
    weights = np.random.default_rng(1).uniform(0.5, 2, len(trees)).astype(np.float32)
    examples = Examples(
        comparisons,
        comparisons,
        trees=method.encode(trees, comparisons),
        weights=weights,
        rows=method.rows(comparisons),
    )
    members = np.arange(len(trees))
    step_rows = method.rows_of_step(examples.rows, members, step=0)
    table = np.random.default_rng(2).normal(size=(4, 3, 32)).astype(np.float32)
    alone = sum(tree.tokens for tree in examples.trees)

    def added(batches: Sequence[Microbatch], count: int | None = None) -> Any:
        """One after the other, or so many at a time."""
        of_count = lambda mesh, held=None: 1 if count is None else count if held else 4  # noqa: E731
        monkeypatch.setattr(training_step, "lanes", of_count)
        return add_gradients(step, jax.tree.map(jnp.copy, state), frozen, batches)

    sums, metrics, programs = [], [], []
    for attention in (None, streams):
        state = jax.tree.map(jnp.copy, first)
        state[USER]["table"] = jax.device_put(table, method.shardings["table"])
        state = step.take(state, step_rows.ids)
        layout = planned(examples, model, streams=attention, tokens=512 if kernel else 256)
        batches = labelled(layout, examples, members, step_rows.slots, prompt_tokens=3)
        assert len(batches) > 1
        assert all(isinstance(part.batch, StreamBatch) == (attention is not None) for part in batches)
        computed = sum(part.tokens for part in batches)
        if (
            attention == STREAM_ATTENTION
        ):  # a profile is computed once, and again for those with the generic prompt
            assert len(np.unique(step_rows.slots)) == 4
            assert computed < 0.8 * alone
            done = [added(batches, count) for count in (1, 2, 3)]
            bits = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(sums_of(one))] for one in done]
            assert bits[0] == bits[1] == bits[2]
            assert step.gradients._cache_size() == len({part.batch.tokens.shape for part in batches})
            assert step.add._cache_size() == 1
        else:
            assert computed == alone
            done = [added(batches)]
        programs.append(step.accumulate._cache_size())
        sums.append(jax.tree.map(np.asarray, done[-1]["acc"]))
        metrics.append(step.update(done[-1])[1])
    assert programs[1] == programs[0] + kernel
    assert set(sums[0]) == {WEIGHTS, USER}
    assert np.linalg.norm(sums[0][USER]) > 0.1
    tolerance = 1e-4 if streams == KERNEL_STREAM_ATTENTION else 1e-5
    for ours, theirs in zip(jax.tree.leaves(sums[1]), jax.tree.leaves(sums[0]), strict=True):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)
    for name, value in metrics[0].items():
        assert float(metrics[1][name]) == pytest.approx(float(value), rel=tolerance, abs=tolerance), name


def test_a_run_by_the_kernel_has_one_shape_and_what_does_not_fit_has_a_stream_of_its_own() -> None:
    """A tree that is longer than the streams, and one of more responses than they have places."""
    comparisons, trees = uneven(48, longest=60)
    usual = Examples(comparisons, comparisons, trees=trees)
    layout = planned(usual, small_config(), streams=KERNEL_STREAM_ATTENTION, tokens=512, steps=4)
    (shape,) = layout.shapes
    rng = np.random.default_rng(0)
    trees[4] = build_tree([[k, *rng.integers(10, 64, 400)] for k in range(2)])
    trees[7] = build_tree([[9, k, 3] for k in range(2 * shape.reads)])
    count = len(trees[7].responses)
    comparisons[7] = replace(comparisons[7], responses=["a"] * count, labels=[float(k) for k in range(count)])
    found: list[Microbatch] = []
    for step in range(4):
        members = np.arange(12 * step, 12 * step + 12)
        batches = labelled(layout, usual, members, np.zeros(12, np.int32))
        assert sum(part.tokens for part in batches) == sum(trees[member].tokens for member in members)
        found += batches
    assert sum(int((part.extras.weights > 0).sum()) for part in found) == 48
    streams = [part.batch for part in found]
    assert all(isinstance(batch, StreamBatch) and isinstance(batch.blocks, StepTable) for batch in streams)
    shapes = Counter(tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)) for batch in streams)
    assert sorted(shapes.values()) == [1, 1, len(streams) - 2]


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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = rows(60, users=9)
    for row in found[:13]:
        row["user_id"] = "many"
    for row in found[13:16]:
        del row["user_id"]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", found)


@pytest.mark.slow
def test_runs_over_streams_and_over_padded_batches_are_alike_and_are_resumed(
    model: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed again changes nothing. The record names what attended."""
    names = ("loss", "margin", "grad_norm")

    def run(name: str, **changes: Any) -> tuple[Any, ...]:
        given = {"steps": 6, "validation__every": 3, "validation__by": "id", "method": "profile_context"}
        wanted = config(model, file, **given, **changes)
        out = train(wanted, out=tmp_path / name, progress=False).out
        attention = json.loads((out / "train.json").read_text())["sessions"][-1]["attention"]
        return np.asarray(curve(out, *names)), np.asarray(curve(out, "validation_loss")), attention

    padded, streams, again = run("padded", attention="blockwise"), run("streams"), run("again", remat="full")
    for module in (trainer, record):
        monkeypatch.setattr(module, "trained_stream_attention", lambda *_, **__: KERNEL_STREAM_ATTENTION)
    kernel = run("kernel")
    with stopped_at(monkeypatch, 2):
        run("stopped")
    for ours, theirs in zip(run("stopped"), kernel, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for found, tolerance in ((streams, 1e-5), (again, 1e-5), (kernel, 1e-4)):
        for ours, theirs in zip(found[:2], padded[:2], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-5)
    assert [found[2] for found in (streams, again, kernel)] == [
        STREAM_ATTENTION, STREAM_ATTENTION, KERNEL_STREAM_ATTENTION
    ]  # fmt: skip
    assert padded[2] not in (STREAM_ATTENTION, KERNEL_STREAM_ATTENTION)


def test_steps_of_whole_users_are_resumed_and_a_large_user_is_split(
    model, file, tmp_path, monkeypatch, capsys
):
    given = {"steps": 6, "validation__every": 3, "validation__by": "id", "method": "profile_context"}
    chosen = config(model, file, **given, batch_by="user", tuning="head")
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
        train(config(model, file, **given, tuning="head"), out=tmp_path / "whole", progress=False)


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh(tmp_path) -> None:
    """Streams over devices, heads and tokens split, and layers that are computed again: one program each. Also with the
    kernel for TPUs and with cuDNN."""
    meshes = ["data=2,tensor=2", "fsdp=2,sequence=2", "fsdp=2,tensor=2/kernel", "fsdp=2,tensor=2/cudnn"]
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
