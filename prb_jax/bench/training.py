"""`prb bench train`: how fast a model is trained on this machine, beside the usual way of training.

A step is a forward and a backward pass over all pairs of the workload and one update by AdamW of all
weights, of adapters or of the head: float32 weights that are trained and moments, activations and weights
that are not trained in the dtype that is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group

from prb_jax.bench.rivals.trl_training import TrlTrainer
from prb_jax.bench.scorer import bench_source, load_for_bench
from prb_jax.bench.table import Column, rates_table
from prb_jax.bench.timed_step import OPTIMIZER, STEPS, TimedStep
from prb_jax.bench.workload import Workload, synthetic_workload
from prb_jax.data.comparison import Comparison
from prb_jax.models.decoder import Params
from prb_jax.models.flops import measured_peak
from prb_jax.models.lora import LoraConfig
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.training import Tuning
from prb_jax.training.data import Examples, Order, shapes_of_steps
from prb_jax.training.groups import split_params
from prb_jax.training.objective import USER, WEIGHTS, RewardObjective, make_reward_training
from prb_jax.training.settings import LossSettings
from prb_jax.training.step import TrainState
from prb_jax.training.utilisation import training_flops

_MAX_BUCKETS = 4


@dataclass(frozen=True)
class TrainingResult:
    """One workload in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios.

    Attributes:
      workload, dtype, pairs: what a step trains on.
      tuning: what it trains.
      pairs_per_second, tokens_per_second: of whole steps (real tokens, the prefix counted once).
      padding_waste: share of the computed tokens that is padding.
      compiles, compile_seconds: programs of a step, and the time of the first step beyond that of another.
      peak_share: FLOPs without padding, over time, over the measured matmul peak.
      peak_gflops: that peak.
      against_pairs_per_second, speedup, against_padding_waste: the padded way, and how many times faster
        trees are.
      attention: the implementation of attention.
      loss, loss_difference: of the first step, and between the two ways, which start from the same
        weights.
    """

    workload: str
    dtype: str
    pairs: int
    tuning: str
    pairs_per_second: float
    tokens_per_second: float
    padding_waste: float
    compiles: int
    compile_seconds: float
    peak_share: float
    peak_gflops: float
    loss: float
    against_pairs_per_second: float | None = None
    speedup: float | None = None
    against_padding_waste: float | None = None
    loss_difference: float | None = None
    attention: str | None = None


class TreeTrainer:
    """Our side: the step of `prb train` over a fixed set of pairs."""

    def __init__(
        self,
        model: RewardModel,
        workload: Workload,
        *,
        tuning: Tuning,
        batch_tokens: int | None,
        remat: str,
        attention: str = "auto",
    ) -> None:
        options = model.shape_options(batch_tokens)
        pairs = len(workload.trees)
        order = Order(pairs, pairs, seed=0)
        # As in training: a backward pass holds the activations of all layers.
        tokens = options.tokens_per_batch if batch_tokens else options.tokens_per_batch // 2
        options = replace(options, tokens_per_batch=tokens, max_buckets=_MAX_BUCKETS)
        shapes = shapes_of_steps(workload.trees, order, steps=STEPS, options=options)
        self.trees = workload.trees
        self.microbatches = shapes.deal([tree.shape for tree in workload.trees], range(pairs))
        lora = LoraConfig()
        trainable, frozen = split_params(model.params, tuning=tuning, lora=lora)
        objective = RewardObjective(
            config=model.decoder,
            mesh=model.mesh,
            dtype=jnp.dtype(model.dtype),
            loss=LossSettings(),
            lora_scale=lora.scale if tuning == "lora" else 1.0,
            remat=remat,
            attention=attention,
        )
        self._step = make_reward_training(
            objective, optimizer=OPTIMIZER, lengths=(STEPS,), trainable=trainable, frozen=frozen
        ).step
        self._frozen: Params = frozen
        self._state: TrainState = self._step.init({WEIGHTS: trainable, USER: model.params["embed"]})
        chosen = Comparison(id="pair", question="?", chosen="a", rejected="b")
        nobody = np.zeros(pairs, np.int32)
        self._examples = Examples([chosen] * pairs, workload.trees, np.ones(pairs, np.float32), nobody)
        self._slots = dict.fromkeys(range(pairs), 0)

    @property
    def compiles(self) -> int:
        """Programs compiled so far."""
        return sum(cast(Any, each)._cache_size() for each in (self._step.accumulate, self._step.update))

    def run(self) -> TimedStep:
        """One step."""
        start = time.perf_counter()
        for microbatch in self.microbatches:
            placed = self._step.place(*self._examples.batch(microbatch, slots=self._slots))
            self._state = self._step.accumulate(self._state, self._frozen, *placed)
        self._state, metrics = self._step.update(self._state)
        jax.block_until_ready(self._state)
        return TimedStep(
            time.perf_counter() - start,
            float(metrics["loss"]),
            sum(each.rows * each.bucket.tokens for each in self.microbatches),
            sum(tree.tokens for tree in self.trees),
        )


def bench_training(
    model: str,
    *,
    pairs: int,
    tuning: Tuning,
    prefix_tokens: int,
    response_tokens: int,
    rounds: int,
    batch_tokens: int | None,
    remat: str,
    against: str | None,
    against_pairs: int | None,
    mesh: str | None,
    dtype: str | None,
    attention: str,
) -> TrainingResult:
    """Times steps of ours and, where asked for, of TRL, in turn.

    Args:
      model: see :func:`prb_jax.bench.scorer.bench_source`; both sides start from its weights.
      pairs: of a step.
      tuning: what is trained: "head", "lora" (of rank 16 on every matrix) or "full".
      prefix_tokens, response_tokens: mean lengths.
      rounds: steps of each side after the first.
      batch_tokens: padded tokens of a microbatch of ours.
      remat: see :func:`prb_jax.models.decoder_layer.rematerialised`.
      against: "trl" or None.
      against_pairs: pairs of a microbatch of theirs.
      mesh, dtype, attention: as in :func:`prb_jax.scoring.load.load`.
    """
    loaded = load_for_bench(bench_source(model), mesh=mesh, dtype=dtype, attention=attention)
    workload = synthetic_workload(
        pairs,
        responses=2,
        prefix_tokens=prefix_tokens,
        response_tokens=response_tokens,
        vocab_size=loaded.decoder.vocab_size,
        longest=loaded.decoder.max_position_embeddings,
    )
    rival = _rival(loaded, against_pairs) if against else None
    ours = TreeTrainer(
        loaded, workload, tuning=tuning, batch_tokens=batch_tokens, remat=remat, attention=attention
    )
    first = ours.run()
    compiles, peak = ours.compiles, measured_peak(loaded.dtype)
    their_first = rival.run(workload.trees) if rival else None
    steps, their_steps = [], []
    for _ in range(rounds):
        steps.append(ours.run())
        if rival:
            their_steps.append(rival.run(workload.trees))
    seconds = statistics.median(step.seconds for step in steps)
    result: dict[str, Any] = {
        "workload": workload.name,
        "dtype": loaded.dtype,
        "attention": loaded.attention,
        "pairs": pairs,
        "tuning": tuning,
        "pairs_per_second": pairs / seconds,
        "tokens_per_second": first.tokens / seconds,
        "padding_waste": 1 - first.tokens / first.padded_tokens,
        "compiles": compiles,
        "compile_seconds": max(0.0, first.seconds - seconds),
        "peak_share": training_flops(workload.trees, loaded.decoder, tuning)
        / seconds
        / peak
        / loaded.mesh.size,
        "peak_gflops": peak / 1e9,
        "loss": first.loss,
    }
    if their_first is not None:
        ratios = [theirs.seconds / step.seconds for step, theirs in zip(steps, their_steps, strict=True)]
        result |= {
            "against_pairs_per_second": pairs / statistics.median(step.seconds for step in their_steps),
            "speedup": statistics.median(ratios),
            "against_padding_waste": 1 - their_first.tokens / their_first.padded_tokens,
            "loss_difference": abs(first.loss - their_first.loss),
        }
    return TrainingResult(**result)


def _rival(model: RewardModel, against_pairs: int | None) -> TrlTrainer:
    return TrlTrainer(model.decoder, model.params, dtype=model.dtype, pairs=against_pairs)


def line(result: TrainingResult) -> str:
    """Return one line for the terminal."""
    text = f"{result.dtype}, {result.workload}: {result.pairs_per_second:.3f} pairs/s in training"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of TRL"
    return text


def table(results: Sequence[TrainingResult], *, rival_name: str | None) -> Group:
    """Return all results as a table."""
    return rates_table(
        results,
        title="training",
        workload=lambda r: f"{r.tuning}, {r.pairs} pairs, {r.workload}",
        rate=Column("pairs/s", lambda r: f"{r.pairs_per_second:.3f}"),
        more=[Column("loss", lambda r: f"{r.loss:.4f}")],
        rival_name=rival_name,
        difference=Column("loss difference", lambda r: f"{r.loss_difference:.1e}"),
    )
