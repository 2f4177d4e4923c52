"""What is trained on of each token: against transformers, and the same in any streams."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.behaviour.rl.credit import credit
from prb_jax.behaviour.rl.learner import Learner
from prb_jax.behaviour.rl.rollouts import Rollouts
from prb_jax.behaviour.rl.settings import load_ppo_settings
from prb_jax.models.attention import cudnn, stream_kernel
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.decoder import decode_stream
from prb_jax.scoring.batching import stream_options
from prb_jax.training import microbatches, trainer
from prb_jax.training.data import Order
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.step import add_gradients
from prb_jax.trees.tree import Tree
from tests.behaviour.rl.tiny import settings, without_rollouts, write_tiny_policy
from tests.sweeps import sweep

TEMPERATURE = 0.7
STILL = {"rollout.temperature": TEMPERATURE, "optimizer.learning_rate": 0.0}
COLUMNS = 9


def tree(prefix: np.ndarray, *lengths: int, first: int = 9) -> Tree:
    responses = tuple(np.arange(first + k, first + k + n, dtype=np.int32) for k, n in enumerate(lengths))
    return Tree(prefix.astype(np.int32), responses, tuple(n - 1 for n in lengths))


LONG = np.arange(5, 85)
TREES = [
    tree(LONG, 5, 1),
    tree(np.array([7]), 2, 3),
    tree(LONG, 9, 4, first=60),
    Tree(np.arange(30, 60, dtype=np.int32), (np.arange(40, 46, dtype=np.int32),) * 2, (5, 5)),
]
"""Two of them share their prompt; one begins with a single token; the responses of one are equal."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("policy")
    return write_tiny_policy(folder, hidden_size=64, num_hidden_layers=2), folder


def started(folder: Path, trees: list[Tree], out: Path, **changes: Any) -> Learner:
    """A learner with the weights of the model, which has planned for the trees as one step."""
    given, keys = settings(folder) | {"batch.prompts": len(trees), "remat": "none"}, ["data", "reward"]
    if changes["algorithm"] in ("dpo", "sft"):
        given, keys = without_rollouts(given), ["data"]
    learner = Learner(load_ppo_settings(given | changes, given=keys))
    checkpoints = Checkpoints(out)
    learner.begin(checkpoints)
    checkpoints.close()
    learner.plan(trees, Order(len(trees), len(trees), seed=0))
    return learner


def theirs(model: Any, tree: Tree, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of one response, from a forward pass of its own without any padding."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(tree.sequence(k)[None].astype(np.int64))).logits[0].double()
    logprobs = torch.log_softmax(logits[len(tree.prefix) - 1 : -1] / TEMPERATURE, dim=-1).numpy()
    response = tree.responses[k]
    return logprobs[np.arange(len(response)), response], -(np.exp(logprobs) * logprobs).sum(-1)


@pytest.mark.parametrize(("tokens", "logits"), sweep([(None, None), (64, 5_000)], few=(1,)))
def test_tokens_are_those_of_transformers_at_the_temperature_of_the_draws(
    policy: tuple[Any, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: Any,
    logits: Any,
) -> None:
    """Points 1 (temperature), 2 (positions beside left padding), 3 (padding in the entropy), 7 (no shift)."""
    model, folder = policy
    if logits is not None:  # several runs of tokens instead of one
        monkeypatch.setattr("prb_jax.behaviour.rl.objective.LOGITS_AT_ONCE", logits)
    changes = {**STILL, "batch.tokens": tokens}
    learner = started(folder, TREES, tmp_path, algorithm="rloo", **changes)
    seen = learner.look(Rollouts(TREES, COLUMNS))
    assert seen.lengths.tolist() == [[5, 1], [2, 3], [9, 4], [6, 6]]
    entropies = []
    for row, one in enumerate(TREES):
        for k, response in enumerate(one.responses):
            expected, spread = theirs(model, one, k)
            np.testing.assert_allclose(seen.logprobs[row, k, : len(response)], expected, atol=1e-5)
            entropies.append(spread)
    np.testing.assert_array_equal(seen.logprobs, seen.reference)
    ((_, metrics, _),) = learner.updates(_with_scores(seen, learner), step=0)
    assert metrics["entropy"] == pytest.approx(np.concatenate(entropies).mean(), abs=1e-5)


@pytest.mark.parametrize(("few", "apart"), [(0, [True]), (4, [False])])
def test_a_stream_of_many_reads_is_computed_block_by_block(
    policy: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, apart: list[bool]
) -> None:
    """The last layer does not attend from each of the read places to the whole stream, and the numbers are the same."""
    model, folder = policy
    trees = [tree(np.arange(5, 25), 9, 9, 9, 9, 9, 9), tree(np.arange(25, 45), 9, 9, 9, 9, 9, 9, first=30)]
    kept: list[bool] = []

    def decode(*args: Any, reads_only: bool, **options: Any) -> jax.Array:
        kept.append(reads_only)
        return decode_stream(*args, reads_only=reads_only, **options)

    monkeypatch.setattr("prb_jax.behaviour.rl.objective.FEW_READS_OF_WALKS", few)
    monkeypatch.setattr("prb_jax.behaviour.rl.objective.decode_stream", decode)
    learner = started(folder, trees, tmp_path, algorithm="grpo", **STILL, **{"rollout.n": 6})
    seen = learner.look(Rollouts(trees, COLUMNS))
    ((_, metrics, logprobs),) = learner.updates(_with_scores(seen, learner), step=0)
    assert logprobs is not None
    assert (
        len(kept) == 2
    )  # of the reference, and of the policy in the update, which reads its log-probabilities
    assert sorted(set(kept)) == apart
    assert metrics["grad_norm"] > 0
    for row, one in enumerate(trees):
        for k in range(6):
            np.testing.assert_allclose(logprobs[row, k], theirs(model, one, k)[0], atol=1e-5)


def test_the_only_update_of_a_step_equals_the_first_of_two(policy: tuple[Any, Path], tmp_path: Path) -> None:
    """It reads the log-probabilities of the rollouts itself, so the look has only the reference to compute."""
    made, scores = [], np.random.default_rng(0).normal(size=(len(TREES), 2)).astype(np.float32)
    for epochs in (1, 2):
        rate = {"rollout.temperature": TEMPERATURE, "optimizer.learning_rate": 1e-3, "batch.tokens": 64}
        given = {**rate, "batch.epochs": epochs, "rollout.n": 2}
        learner = started(policy[1], TREES, tmp_path / str(epochs), algorithm="grpo", **given)
        batch = learner.look(Rollouts(TREES, COLUMNS, scores=scores))
        arrays = (scores, scores > 0, batch.lengths, batch.logprobs, batch.reference, batch.values)
        credited = credit(*map(jnp.asarray, arrays), jnp.float32(0.1), settings=learner.settings)
        first = next(learner.updates(replace(batch, credit=credited, kl=0.1), step=0))
        made.append((batch, first, jax.tree.map(np.asarray, learner.params())))
    (alone, only, changed), (seen, first, expected) = made
    assert not alone.logprobs.any()
    assert first.logprobs is None
    assert only.logprobs is not None
    np.testing.assert_allclose(alone.reference, seen.reference, atol=1e-6)
    np.testing.assert_allclose(only.logprobs, seen.logprobs, atol=1e-5)
    assert only.metrics.keys() == first.metrics.keys()
    for name, value in first.metrics.items():
        assert only.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for ours, theirs in zip(jax.tree.leaves(changed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            ours, theirs, atol=2e-4
        )  # a tenth of the rate: Adam divides by the gradient
    read = replace(seen, reference=seen.reference - 0.5 * seen.mask)
    numbers = read.kl_numbers()
    assert numbers["kl_per_token"] == pytest.approx(0.5, abs=1e-5)
    assert numbers["kl"] == pytest.approx(0.5 * read.lengths.mean(), rel=1e-5)


def _with_scores(batch: Rollouts, learner: Learner) -> Rollouts:
    """Random scores, and old numbers that are not those of now."""
    rng, shape = np.random.default_rng(0), batch.lengths.shape
    moved = [
        (x + 0.3 * rng.normal(size=x.shape)).astype(np.float32)
        for x in (batch.logprobs * batch.mask, batch.reference * batch.mask, batch.values)
    ]
    scores = rng.normal(size=shape).astype(np.float32)
    arrays = (scores, np.ones(shape, bool), batch.lengths, *moved)
    credited = credit(*map(jnp.asarray, arrays), jnp.float32(0.1), settings=learner.settings)
    logprobs, reference, values = moved
    seen = {"logprobs": logprobs, "reference": reference, "values": values}
    return replace(batch, **seen, scores=scores, credit=credited, kl=0.1)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    sweep(
        [
            ("ppo", {"value.trunk": "shared", "loss.entropy_coefficient": 0.1}),
            ("dpo", {}),
            ("ppo", {"value.trunk": "own", "tuning": "lora"}),
            ("grpo", {"loss.ratio": "sequence", "remat": "full"}),
            ("sft", {"tuning": "lora"}),
        ],
        few=(0,),
    ),
)
def test_losses_and_gradients_do_not_depend_on_the_streams(
    policy: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, changes: dict
) -> None:
    """Each tree alone, all in one stream, in several; by the kernel for TPUs and cuDNN, whose calls XLA runs here."""
    by_xla = functools.partial(stream_kernel.kernel_attention, interpret=True)
    monkeypatch.setattr(stream_kernel, "kernel_attention", by_xla)
    by_xla = functools.partial(cudnn.cudnn_stream_attention, implementation="xla")
    monkeypatch.setattr(cudnn, "cudnn_stream_attention", by_xla)
    kernels = {"kernel": StreamAttention("kernel", "steps"), "cudnn": StreamAttention("cudnn", "keys")}
    first = [Tree(one.prefix, one.responses[:1], one.read[:1]) for one in TREES]
    trees, made = first if algorithm == "sft" else TREES, []
    for layout in ("alone", "whole", "several", *kernels):
        tokens = {"alone": 64, "several": 64, "kernel": 128, "cudnn": 128}.get(layout)
        with monkeypatch.context() as patch:
            if layout in kernels:
                chosen = kernels[layout]
                patch.setattr(trainer, "choose_attention", lambda *_, chosen=chosen, **options: chosen)
            if layout == "alone":
                patch.setattr(
                    microbatches,
                    "stream_options",
                    lambda *model: replace(stream_options(*model), share=False),
                )
            given = {"batch.tokens": tokens, **changes}
            learner = started(policy[1], trees, tmp_path / layout, algorithm=algorithm, **given)
        batch = learner.look(Rollouts(trees, COLUMNS))
        if algorithm == "dpo":  # whose margins are zero before the first update, but for rounding
            noise = 0.3 * np.random.default_rng(0).normal(size=batch.reference.shape)
            batch = replace(batch, reference=batch.reference + noise.astype(np.float32))
        elif algorithm != "sft":
            batch = _with_scores(batch, learner)
        parts = learner.microbatches(batch, np.arange(len(trees)))
        assert (len(parts) > 1) or layout not in ("alone", "several")
        added = add_gradients(learner.program, learner.state, learner.frozen or {}, parts)
        numbers = learner.program.update(learner.state, added)[1]
        made.append((jax.tree.map(np.asarray, added.gradient), numbers, batch))
    (sums, metrics, seen), *others = made
    for ours, numbers, batch in others:
        for name in ("logprobs", "reference", "values"):
            np.testing.assert_allclose(getattr(batch, name), getattr(seen, name), atol=2e-5)
        for one, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(sums), strict=True):
            assert np.linalg.norm(one - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-7
        for name, value in metrics.items():
            assert float(numbers[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-5), name
