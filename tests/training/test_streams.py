"""Training over packed streams, by XLA, by the kernel for TPUs and by cuDNN, whose steps and calls XLA runs here: the
losses and gradients of conversations alone, few programs, and steps of whole users."""

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
from prb_jax.models import decoder
from prb_jax.models.attention import cudnn, stream_kernel
from prb_jax.models.attention import streams as stream_program
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.platform.meshes import make_mesh
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held
from prb_jax.training import record as training_record
from prb_jax.training import step as training_step
from prb_jax.training import trainer
from prb_jax.training.config import BatchSettings
from prb_jax.training.data import Examples, Order
from prb_jax.training.microbatches import STEPS_SIMULATED, Layout, labelled, plan_layout
from prb_jax.training.step import Microbatch, add_gradients
from prb_jax.training.train import train
from prb_jax.training.trainer import USER, WEIGHTS
from prb_jax.trees.kernel_tables import StepTable
from prb_jax.trees.packing import READS_STEP
from prb_jax.trees.step_shapes import choose_step_shapes, pack_step
from prb_jax.trees.streams import StreamBatch, StreamOptions, StreamShape
from prb_jax.trees.tree import Tree, build_tree
from tests.plain_process import plain_environment
from tests.sweeps import sweep
from tests.training.small_batches import WINDOWED, build, small_config, soft_prompts, taken
from tests.training.tiny import config, curve, record, rows, stopped_at, write_rows
from tests.trees.rankings import pairs_of_rankings

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


def of_users(count: int, *, profile: int, longest: int = 10) -> tuple[list[Comparison], Held[Tree]]:
    """Comparisons of two or three responses of uneven lengths; each begins with the profile of one of three users."""
    rng = np.random.default_rng(0)
    profiles = [rng.integers(10, 64, profile).tolist() for _ in range(3)]
    comparisons, trees = [], Held[Tree]()
    for number in range(count):
        user, responses = number % 3, 2 + number % 2
        prompt = [*profiles[user], *rng.integers(10, 64, rng.integers(5, longest)).tolist()]
        ends = [[k, *rng.integers(10, 64, rng.integers(2, 40)).tolist()] for k in range(responses)]
        trees.append(build_tree([prompt + end for end in ends]))
        labels, texts = [float(k) for k in range(responses)], list("abc"[:responses])
        facts = {"id": str(number), "user_id": f"u{user}", "margin": 0.1 * number}
        comparisons.append(Comparison(question="?", responses=texts, labels=labels, **facts))
    return comparisons, trees


BLOCKS, KERNEL, CUDNN = (
    StreamAttention("by XLA", "blocks", one_length=False), StreamAttention("kernel", "steps"),
    StreamAttention("cuDNN", "keys")
)  # fmt: skip


def planned(
    examples: Examples, model: DecoderConfig, *, attention: StreamAttention, tokens: int, steps: int
) -> Layout:
    per_step = len(examples) // steps
    order = Order(len(examples), per_step, seed=0)
    together = [order.step(step) for step in range(STEPS_SIMULATED)]
    batch, mesh = BatchSettings(comparisons=per_step, tokens=tokens), make_mesh(devices=jax.devices()[:1])
    options = {"config": model, "mesh": mesh, "attention": attention, "batch": batch}
    return plan_layout(examples.trees, together, per_step=per_step, steps=10, **options)


def conversations_alone(layout: Layout) -> Layout:
    """The same, with every comparison in streams of its own, and nothing shared."""
    shape = StreamShape(layout.shapes[-1].tokens, READS_STEP)
    options = replace(layout.streams, share=False, kernel=False, keys=None, block=128, program_cost=None)
    return replace(layout, streams=options, shapes=(shape,))


@pytest.mark.parametrize(
    ("attention", "tuning", "remat", "changes"),
    sweep(
        [
            (BLOCKS, "full", "none", {}),
            (KERNEL, "lora", "dots", {}),
            (BLOCKS, "lora", "none", {}),
            (KERNEL, "full", "none", WINDOWED),
            (KERNEL, "full", "full", {}),
            (KERNEL, "full", "none", {"num_hidden_layers": 1}),
            (CUDNN, "full", "full", {}),
            (CUDNN, "lora", "dots", {"sliding_window": 20, "use_sliding_window": True}),
            (replace(BLOCKS, name="many blocks"), "full", "dots", WINDOWED),
        ],
        few=(0, 6, 8),
    ),
)
def test_a_step_over_streams_is_that_of_comparisons_alone(
    attention: StreamAttention,
    tuning: str,
    remat: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With soft prompts, of which some comparisons of a user have another's; sliding windows and soft-caps; in several
    microbatches. On CPUs one, two or three are computed at a time, with the same bits and no program more."""
    on_cpu, model = attention is BLOCKS, small_config(**changes)
    method = soft_prompts(("u0", "u1", "u2"), places=12, generic_share=0.4)
    step, first, frozen = build(model, tuning=tuning, method=method, remat=remat)
    comparisons, trees = of_users(12, profile=70) if on_cpu else of_users(12, profile=0, longest=100)
    weights = np.random.default_rng(1).uniform(0.5, 2, len(trees)).astype(np.float32)
    trees, users = method.encode(trees, comparisons), method.rows(comparisons)
    examples = Examples(comparisons, comparisons, trees=Held(trees), weights=weights, rows=users)
    members = np.arange(len(trees))
    step_rows = method.rows_of_step(examples.rows, members, step=0)
    table = np.random.default_rng(2).normal(size=(4, 3, 32)).astype(np.float32)
    alone = sum(tree.tokens for tree in trees)

    def added(batches: Sequence[Microbatch], count: int | None = None) -> Any:
        """One after the other, or so many at a time."""
        of_count = lambda mesh, held=None: 1 if count is None else count if held else 4  # noqa: E731
        monkeypatch.setattr(training_step, "lanes", of_count)
        return add_gradients(step, state, frozen, batches)

    whole = planned(examples, model, attention=attention, tokens=256 if on_cpu else 512, steps=1)
    sums, metrics = [], []
    for layout in (conversations_alone(whole), whole):
        state = jax.tree.map(jnp.copy, first)
        state[USER]["table"] = jax.device_put(table, method.shardings["table"])
        state = taken(state, step_rows.ids, step=step, method=method)
        if attention.name == "many blocks" and layout is whole:
            for module in (stream_program, decoder):
                monkeypatch.setattr(module, "walks", lambda batch, mesh: False)
        if layout is not whole:
            one_each = [np.asarray([member]) for member in members]
            batches = [
                part
                for one in one_each
                for part in labelled(layout, examples, one, step_rows.slots[one], prompt_tokens=3)
            ]
            assert sum(part.tokens for part in batches) == alone
        else:
            batches = labelled(layout, examples, members, step_rows.slots, prompt_tokens=3)
            assert len(batches) > 1
        done = [added(batches)]
        if layout is whole and on_cpu:
            # A profile is computed once, and again for those with the generic prompt.
            assert len(np.unique(step_rows.slots)) == 4
            assert sum(part.tokens for part in batches) < 0.8 * alone
            done = [added(batches, count) for count in (1, 2, 3)]
            bits = [[np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one)] for one in done]
            assert bits[0] == bits[1] == bits[2]
            assert step.gradients._cache_size() == len({part.batch.tokens.shape for part in batches})
            assert step.add._cache_size() == 1
        sums.append(jax.tree.map(np.asarray, done[-1].gradient))
        metrics.append(step.update(state, done[-1])[1])
    assert set(sums[0]) == {WEIGHTS, USER}
    assert np.linalg.norm(sums[0][USER]) > 0.1
    tolerance = 1e-4 if attention.table == "steps" else 1e-5
    for ours, theirs in zip(jax.tree.leaves(sums[1]), jax.tree.leaves(sums[0]), strict=True):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)
    for name, value in metrics[0].items():
        assert float(metrics[1][name]) == pytest.approx(float(value), rel=tolerance, abs=tolerance), name


def test_a_response_of_many_comparisons_is_computed_once_and_its_gradients_are_summed() -> None:
    trees, tokens = pairs_of_rankings()
    facts = [{"labels": [1.0, 0.0], "margin": 0.1 * number} for number in range(len(trees))]
    comparisons = [
        Comparison(id=str(number), question="?", responses=["a", "b"], **of_one)
        for number, of_one in enumerate(facts)
    ]
    weights = np.random.default_rng(1).uniform(0.5, 2, len(trees)).astype(np.float32)
    examples = Examples(comparisons, comparisons, trees=Held(trees), weights=weights)
    step, state, frozen = build(small_config())
    whole = planned(examples, small_config(), attention=BLOCKS, tokens=512, steps=1)
    members, slots = np.arange(len(trees)), np.zeros(len(trees), np.int32)
    together = labelled(whole, examples, members, slots)
    assert sum(part.tokens for part in together) == tokens
    alone = conversations_alone(whole)
    apart = [part for one in members for part in labelled(alone, examples, members[[one]], slots[[one]])]
    assert sum(part.tokens for part in apart) == sum(tree.tokens for tree in trees) > 3 * tokens
    sums = [add_gradients(step, state, frozen, batches) for batches in (together, apart)]
    for ours, theirs in zip(*(jax.tree.leaves(one.gradient) for one in sums), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs) + 1e-9
    (_, ours), (_, theirs) = (step.update(jax.tree.map(jnp.copy, state), one) for one in sums)
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-6)


def test_a_run_by_the_kernel_has_one_shape_and_what_does_not_fit_has_a_stream_of_its_own() -> None:
    """A tree that is longer than the streams, and one of more responses than they have places."""
    comparisons, trees = of_users(48, profile=0, longest=60)
    usual = Examples(comparisons, comparisons, trees=trees)
    layout = planned(usual, small_config(), attention=KERNEL, tokens=512, steps=4)
    (shape,) = layout.shapes
    rng = np.random.default_rng(0)
    trees[4] = build_tree([[k, *rng.integers(10, 64, 400)] for k in range(2)])
    trees[7] = build_tree([[9, k, 3] for k in range(2 * shape.reads)])
    count = len(trees[7].responses)
    comparisons[7] = replace(comparisons[7], responses=["a"] * count, labels=[float(k) for k in range(count)])
    parts: list[Microbatch] = []
    for step in range(4):
        members = np.arange(12 * step, 12 * step + 12)
        batches = labelled(layout, usual, members, np.zeros(12, np.int32))
        assert sum(part.tokens for part in batches) == sum(trees[member].tokens for member in members)
        parts += batches
    assert sum(int((part.extras.weights > 0).sum()) for part in parts) == 48
    streams = [part.batch for part in parts]
    assert all(isinstance(batch, StreamBatch) and isinstance(batch.blocks, StepTable) for batch in streams)
    shapes = Counter(tuple(np.shape(leaf) for leaf in jax.tree.leaves(batch)) for batch in streams)
    assert sorted(shapes.values()) == [1, 1, len(streams) - 2]


def test_a_run_has_one_or_two_shapes_and_the_streams_of_a_step_are_full() -> None:
    rng = np.random.default_rng(0)

    def tree() -> Tree:
        size = int(np.clip(rng.lognormal(5, 0.45), 20, 900))
        return build_tree(np.split(rng.integers(3, 60, 2 * size), 2))

    steps = [[tree() for _ in range(16)] for _ in range(6)]
    for streams in (1, 2):
        options = StreamOptions(tokens=2048, streams=streams)
        (one,) = choose_step_shapes(steps, options, most_shapes=1, compile_cost=0, count=1000)
        both = choose_step_shapes(steps, options, most_shapes=4, compile_cost=0, count=1000)
        assert len(both) == 2
        assert choose_step_shapes(steps, options, most_shapes=4, compile_cost=1e9, count=9) == (one,)
        computed = needed = 0
        for trees in steps:
            members: list[int] = []
            for packed in pack_step(trees, both, options):
                assert {stream.shape for stream in packed} <= set(both)
                assert len(packed) <= streams
                computed += streams * packed[0].shape.tokens
                members += [member for stream in packed for member in stream.members]
            needed += sum(tree.tokens for tree in trees)
            assert sorted(members) == list(range(len(trees)))
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
    pairs = rows(60, users=9)
    for number in range(16):
        pairs[number]["user_id"] = "many" if number < 13 else None
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", pairs)


GIVEN = {"steps": 6, "validation__every": 3, "validation__by": "id", "method": "profile_context"}


@pytest.mark.slow
def test_runs_by_the_kernel_and_by_xla_are_alike_and_are_resumed(
    model: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed again changes nothing. Validation goes through the same attention; the record names it."""

    def run(name: str, **changes: Any) -> tuple[Any, ...]:
        out = train(config(model, file, **GIVEN, **changes), out=tmp_path / name, progress=False).out
        steps = np.asarray(curve(out, "loss", "margin", "grad_norm"))
        attention = record(out)["sessions"][-1]["attention"]
        return steps, np.asarray(curve(out, "validation_loss")), attention

    by_xla, again = run("streams"), run("again", remat="full")
    for module in (trainer, training_record):
        monkeypatch.setattr(module, "choose_attention", lambda *_, **__: KERNEL)
    kernel = run("kernel")
    with stopped_at(monkeypatch, 2):
        run("stopped")
    for ours, theirs in zip(run("stopped"), kernel, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (by_xla[2], kernel[2]) == ("block-wise XLA over packed streams", "kernel")
    for numbers, tolerance in ((again, 1e-5), (kernel, 1e-4)):
        for ours, theirs in zip(numbers[:2], by_xla[:2], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-5)


def test_steps_of_whole_users_are_resumed_and_a_large_user_is_split(
    model, file, tmp_path, monkeypatch, capsys
):
    chosen = config(model, file, **GIVEN, batch_by="user", tuning="head")
    whole = train(chosen, out=tmp_path / "whole", progress=False)
    with stopped_at(monkeypatch, 3):
        train(chosen, out=tmp_path / "stopped", progress=False)
    again = train(chosen, out=tmp_path / "stopped", progress=False)
    assert curve(again.out, "loss", "grad_norm", "epoch") == curve(whole.out, "loss", "grad_norm", "epoch")
    said = capsys.readouterr().err
    assert "batch_by=user: split over several steps: 1 of the users, who have more than 8 comparisons" in said
    assert whole.summary["split_users"] == 1
    counted = sum(number for _, number in curve(whole.out, "comparisons"))
    assert whole.summary["pairs_seen"] == counted < 6 * 8
    with pytest.raises(prb.RunError, match="batch_by"):
        train(config(model, file, **GIVEN, tuning="head"), out=tmp_path / "whole", progress=False)


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh(tmp_path) -> None:
    """Streams over devices, heads and tokens split, and layers that are computed again: one program each. Also with the
    kernel for TPUs and with cuDNN."""
    meshes = [
        "data=2,tensor=2",
        *(f"fsdp=2,{axis}=2{by}" for axis in ("tensor", "sequence") for by in ("", "/kernel", "/cudnn")),
    ]
    command = [sys.executable, "-m", "tests.training.mesh_steps", str(tmp_path / "out.json"), "4", *meshes]
    environment = plain_environment()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "out.json").read_text())
    alone = steps.pop("alone")
    assert steps.keys() == set(meshes)
    for step in steps.values():
        assert step["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        np.testing.assert_allclose(step["gradients"], alone["gradients"], atol=1e-5)
        assert step["programs"] == 1
        assert all(count == 2 for count, _ in step["streams"])
