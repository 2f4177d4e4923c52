"""Training over packed streams by the kernel for TPUs, its steps run by XLA: as over padded batches, few programs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.data.comparison import Comparison
from prb_jax.models.attention import stream_splash
from prb_jax.models.attention.choice import SPLASH_STREAM_ATTENTION
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.personal.method import Users
from prb_jax.personal.soft_prompts import RowAdam, SoftPrompts
from prb_jax.sharding import make_mesh
from prb_jax.training import record, trainer
from prb_jax.training.config import default_config
from prb_jax.training.data import Examples
from prb_jax.training.microbatches import Microbatch, plan_microbatches
from prb_jax.training.objective import USER, WEIGHTS
from prb_jax.training.order import Order
from prb_jax.training.settings import BatchSettings
from prb_jax.training.train import train
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.kernel_tables import KernelTable
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree, build_tree
from tests.training.small_batches import build_training, initial_params, small_config
from tests.training.tiny import curve, rows, stopped_at, write_model, write_rows


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch):
    by_xla = functools.partial(stream_splash.splash_stream_attention, interpret=True)
    monkeypatch.setattr(stream_splash, "splash_stream_attention", by_xla)
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def uneven(count: int, *, seed: int = 0, longest: int = 100) -> tuple[list[Comparison], list[Tree]]:
    """Comparisons of two or three responses of uneven lengths."""
    rng = np.random.default_rng(seed)
    comparisons, trees = [], []
    for number in range(count):
        shared = rng.integers(10, 64, rng.integers(5, longest)).tolist()
        responses = 2 + number % 2
        trees.append(
            build_tree(
                [[*shared, k, *rng.integers(10, 64, rng.integers(2, 40)).tolist()] for k in range(responses)]
            )
        )
        comparisons.append(
            Comparison(
                id=str(number), question="?", responses=list("abc"[:responses]), user_id=f"u{number % 3}",
                labels=[float(k) for k in range(responses)], margin=0.1 * number,
            )
        )  # fmt: skip
    return comparisons, trees


def planned(
    config: DecoderConfig, found: Examples, *, streams: str | None, prompt_tokens: int = 0, steps: int = 1
) -> Any:
    count = len(found.comparisons)
    return plan_microbatches(
        found,
        Order(count, count // steps, seed=0),
        config=config,
        mesh=make_mesh(devices=jax.devices()[:1]),
        streams=streams,
        batch=BatchSettings(comparisons=count // steps, tokens=512),
        steps=10,
        prompt_tokens=prompt_tokens,
    )


WINDOWED: dict[str, Any] = {
    "architectures": ["Gemma2ForSequenceClassification"], "model_type": "gemma2", "sliding_window": 20,
    "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tuning", "remat", "changes"),
    [
        ("lora", "dots", {}),
        ("full", "none", WINDOWED),
        pytest.param("full", "full", {}, marks=pytest.mark.slow),
        pytest.param("full", "none", {"num_hidden_layers": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_padded_batches(tuning: str, remat: str, changes: dict[str, Any]) -> None:
    """With soft prompts, sliding windows and soft-caps; in several microbatches of one shape, and one program."""
    config = small_config(**changes)
    method = SoftPrompts(
        table=Users(("u0", "u1", "u2")), tokens=3, width=32, places=12, generic_share=0.4, seed=0,
        optimizer=RowAdam(learning_rate=lambda step: 0.1), mesh=make_mesh(devices=jax.devices()[:1]),
    )  # fmt: skip
    training, first, frozen = build_training(
        config, tuning=tuning, params=initial_params(config), method=method, remat=remat
    )
    comparisons, trees = uneven(12)
    weights = np.random.default_rng(1).uniform(0.5, 2, len(trees)).astype(np.float32)
    found = Examples(comparisons, method.encode(trees, comparisons), weights, method.rows(comparisons))
    members = np.arange(len(trees))
    step_rows = method.rows_of_step(found.rows, members, step=0)
    sums, metrics, programs = [], [], []
    for streams in (None, SPLASH_STREAM_ATTENTION):
        state = jax.tree.map(lambda leaf: leaf.copy(), first)
        table = np.random.default_rng(2).normal(size=(4, 3, 32)).astype(np.float32)
        state[USER]["table"] = jax.device_put(table, method.shardings["table"])
        state = training.take(state, step_rows.ids)
        batches = planned(config, found, streams=streams, prompt_tokens=3).of_step(members, step_rows.slots)
        assert len(batches) > 1
        assert sum(each.tokens for each in batches) == sum(tree.tokens for tree in found.trees)
        for each in batches:
            assert isinstance(each.batch, TreeBatch if streams is None else StreamBatch)
            state = training.step.accumulate(state, frozen, *training.step.place(each.batch, each.extras))
        accumulate: Any = training.step.accumulate
        programs.append(accumulate._cache_size())
        sums.append(jax.tree.map(np.asarray, state["acc"]))
        metrics.append(training.step.update(state)[1])
    assert programs[1] == programs[0] + 1
    assert set(sums[0]) == {WEIGHTS, USER}
    assert np.linalg.norm(sums[0][USER]) > 0.1
    for ours, theirs in zip(jax.tree.leaves(sums[1]), jax.tree.leaves(sums[0]), strict=True):
        assert np.isfinite(ours).all()
        assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)
    assert float(metrics[1]["loss"]) == pytest.approx(float(metrics[0]["loss"]), rel=1e-5)


def test_a_run_has_one_shape_and_what_does_not_fit_is_padded() -> None:
    """A tree that is longer than the streams, and one of more responses than they have places."""
    config = small_config()
    comparisons, trees = uneven(48, longest=60)
    usual = Examples(comparisons, trees, np.ones(len(trees), np.float32), np.zeros(len(trees), np.int32))
    run = planned(config, usual, streams=SPLASH_STREAM_ATTENTION, steps=4)
    rng = np.random.default_rng(0)
    trees[4] = build_tree([[k, *rng.integers(10, 64, 400)] for k in range(2)])
    trees[7] = build_tree([[9, k, 3] for k in range(2 * run.shapes[-1].reads)])
    count = len(trees[7].responses)
    comparisons[7] = replace(comparisons[7], responses=["a"] * count, labels=[float(k) for k in range(count)])
    found: list[Microbatch] = []
    for step in range(4):
        members = np.arange(12 * step, 12 * step + 12)
        batches = run.of_step(members, np.zeros(12, np.int32))
        assert sum(each.tokens for each in batches) == sum(trees[member].tokens for member in members)
        found += batches
    padded = [each for each in found if isinstance(each.batch, TreeBatch)]
    assert sorted(int((each.extras.weights > 0).sum()) for each in padded) == [1, 1]
    streams = [each.batch for each in found if isinstance(each.batch, StreamBatch)]
    assert sum(int((each.extras.weights > 0).sum()) for each in found) == 48
    assert len(run.shapes) == 1
    assert {each.tokens.shape for each in streams} == {(1, run.shapes[0].tokens)}
    assert len({jax.tree.structure(each) for each in streams}) == 1
    assert all(isinstance(each.blocks, KernelTable) for each in streams)
    assert len({each.blocks.keys.shape for each in streams if each.blocks is not None}) == 1


@pytest.mark.slow
def test_a_run_is_that_of_padded_batches_and_is_resumed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record names what attended; a run that was stopped has the curve of one that was not."""
    model = write_model(tmp_path / "tiny")
    file = write_rows(tmp_path / "pairs.jsonl", rows(40, users=5))

    def run(name: str) -> Path:
        chosen: Any = default_config()
        chosen.model, chosen.data, chosen.steps, chosen.batch.comparisons = str(model), str(file), 4, 8
        chosen.attention = "blockwise" if name == "padded" else "auto"
        chosen.checkpoint.every, chosen.validation.every, chosen.log.plot = 1, 2, False
        return train(chosen, out=tmp_path / name, progress=False).out

    padded = run("padded")
    for module in (trainer, record):
        monkeypatch.setattr(module, "trained_stream_attention", lambda *_: SPLASH_STREAM_ATTENTION)
    whole = run("whole")
    with stopped_at(monkeypatch, 2):
        run("stopped")
    again = run("stopped")
    (session,) = json.loads((whole / "train.json").read_text())["sessions"]
    assert session["attention"] == SPLASH_STREAM_ATTENTION
    names = ("loss", "margin", "grad_norm")
    assert curve(again, *names) == curve(whole, *names)
    for ours, theirs in zip(curve(whole, *names), curve(padded, *names), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
