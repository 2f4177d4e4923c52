"""`prb bench train`: how fast a model is trained on this machine, beside the usual way of training.

A step is a forward and a backward pass over all pairs of the workload and one update by AdamW of all
weights, of adapters or of the head: float32 weights that are trained and moments, activations and weights
that are not trained in the dtype that is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.bench.rivals.trl import TrlTrainer
from prb_jax.bench.scorer import bench_source, load_for_bench, padded_tokens
from prb_jax.bench.table import shown
from prb_jax.bench.workload import OPTIMIZER, STEPS, TimedStep, Workload, count_pairs, synthetic_workload
from prb_jax.data.comparison import Comparison
from prb_jax.models.attention.choice import trained_stream_attention
from prb_jax.models.decoder import Params
from prb_jax.models.flops import measured_peak
from prb_jax.models.lora import LoraConfig
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.training import PASSES, Tuning
from prb_jax.training.data import Examples
from prb_jax.training.groups import split_params
from prb_jax.training.microbatches import add_gradients, plan_microbatches
from prb_jax.training.objective import USER, WEIGHTS, RewardObjective, make_reward_step
from prb_jax.training.order import Order
from prb_jax.training.settings import BatchSettings, LossSettings
from prb_jax.training.step import TrainState


@dataclass(frozen=True)
class TrainingResult:
    """One workload in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios."""

    workload: str = field(metadata=shown("workload", "{r.tuning}, {r.pairs} pairs, {v}"))
    dtype: str = field(metadata=shown("dtype"))
    pairs: int
    tuning: str
    pairs_per_second: float = field(metadata=shown("pairs/s", "{v:.3f}", "of whole steps"))
    tokens_per_second: float = field(
        metadata=shown("tokens/s", "{v:,.0f}", "real tokens; what is computed once counts once")
    )
    padding_waste: float = field(metadata=shown("padding", "{v:.0%}", "of the computed tokens"))
    compiles: int = field(metadata=shown("compiles", meaning="programs of a step"))
    compile_seconds: float = field(metadata=shown("compile s", "{v:.1f}", "of the first step beyond another"))
    peak_share: float = field(
        metadata=shown(
            "of matmul peak",
            "{v:.0%} of {r.peak_gflops:,.0f} GFLOP/s",
            "FLOPs without padding, over time, over the measured peak",
        )
    )
    peak_gflops: float
    loss: float = field(metadata=shown("loss", "{v:.4f}", "of the first step"))
    against_pairs_per_second: float | None = field(default=None, metadata=shown("{rival} pairs/s", "{v:.3f}"))
    speedup: float | None = field(default=None, metadata=shown("speed-up", "{v:.2f}x"))
    against_padding_waste: float | None = field(default=None, metadata=shown("its padding", "{v:.0%}"))
    loss_difference: float | None = field(
        default=None, metadata=shown("loss difference", "{v:.1e}", "both ways start from the same weights")
    )
    attention: str | None = None
    questions_per_user: int = 1


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
        pairs = len(workload.trees)
        chosen = Comparison(id="pair", question="?", chosen="a", rejected="b")
        nobody = np.zeros(pairs, np.int32)
        examples = Examples([chosen] * pairs, workload.trees, np.ones(pairs, np.float32), nobody)
        order = Order(pairs, pairs, seed=0)
        self.streams = trained_stream_attention(model.mesh, jnp.dtype(model.dtype), attention)
        planned = plan_microbatches(
            examples,
            order,
            config=model.decoder,
            mesh=model.mesh,
            streams=self.streams,
            batch=BatchSettings(comparisons=pairs, tokens=batch_tokens),
            steps=STEPS,
            remat=remat,
        )
        self.microbatches = planned.of_step(order.step(0), nobody)
        self.flops = PASSES[tuning] * sum(microbatch.flops for microbatch in self.microbatches)
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
        self._step = make_reward_step(
            objective, optimizer=OPTIMIZER, lengths=(STEPS,), trainable=trainable, frozen=frozen
        )
        self._frozen: Params = frozen
        self._state: TrainState = self._step.init({WEIGHTS: trainable, USER: model.params["embed"]})

    @property
    def compiles(self) -> int:
        """Programs compiled so far."""
        step = self._step
        programs = (step.accumulate, step.gradients, step.add, step.update)
        return sum(cast(Any, program)._cache_size() for program in programs)

    def run(self) -> TimedStep:
        """One step."""
        start = time.perf_counter()
        self._state = add_gradients(self._step, self._state, self._frozen, self.microbatches)
        self._state, metrics = self._step.update(self._state)
        jax.block_until_ready(self._state)
        return TimedStep(
            time.perf_counter() - start,
            float(metrics["loss"]),
            sum(padded_tokens(microbatch.batch) for microbatch in self.microbatches),
            sum(microbatch.tokens for microbatch in self.microbatches),
        )


def bench_training(
    model: str,
    *,
    pairs: int | None,
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
    questions_per_user: Sequence[int] = (1,),
) -> Iterator[TrainingResult]:
    """Times steps of ours and, where asked for, of TRL, in turn.

    The arguments are the options of `prb bench train`, whose help explains them.

    Yields:
      A result for each of `questions_per_user`.

    Raises:
      RunError: fewer pairs than one user has questions.
    """
    counts = [count_pairs(pairs, usual=8, questions_per_user=questions) for questions in questions_per_user]
    loaded = load_for_bench(bench_source(model), mesh=mesh, dtype=dtype, attention=attention)
    for questions, count in zip(questions_per_user, counts, strict=True):
        workload = synthetic_workload(
            count,
            responses=2,
            questions_per_user=questions,
            prefix_tokens=prefix_tokens,
            response_tokens=response_tokens,
            vocab_size=loaded.decoder.vocab_size,
            longest=loaded.decoder.max_position_embeddings,
        )
        ours = TreeTrainer(
            loaded, workload, tuning=tuning, batch_tokens=batch_tokens, remat=remat, attention=attention
        )
        # Each workload starts from the same weights on both sides.
        rival = None
        if against:
            rival = TrlTrainer(loaded.decoder, loaded.params, dtype=loaded.dtype, pairs=against_pairs)
        yield _bench(loaded, workload, ours, rival, tuning=tuning, rounds=rounds)


def _bench(
    model: RewardModel,
    workload: Workload,
    ours: TreeTrainer,
    rival: TrlTrainer | None,
    *,
    tuning: Tuning,
    rounds: int,
) -> TrainingResult:
    first = ours.run()
    pairs = len(workload.trees)
    compiles, peak = ours.compiles, measured_peak(model.dtype)
    their_first = rival.run(workload.trees) if rival else None
    steps, their_steps = [], []
    for _ in range(rounds):
        steps.append(ours.run())
        if rival:
            their_steps.append(rival.run(workload.trees))
    seconds = statistics.median(step.seconds for step in steps)
    result: dict[str, Any] = {
        "workload": workload.name,
        "dtype": model.dtype,
        "attention": ours.streams or model.attention,
        "pairs": pairs,
        "tuning": tuning,
        "pairs_per_second": pairs / seconds,
        "tokens_per_second": first.tokens / seconds,
        "padding_waste": 1 - first.tokens / first.padded_tokens,
        "compiles": compiles,
        "compile_seconds": max(0.0, first.seconds - seconds),
        "peak_share": ours.flops / seconds / peak / model.mesh.size,
        "peak_gflops": peak / 1e9,
        "loss": first.loss,
        "questions_per_user": workload.questions_per_user,
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


def line(result: TrainingResult) -> str:
    """Return one line for the terminal."""
    text = f"{result.dtype}, {result.workload}: {result.pairs_per_second:.3f} pairs/s in training"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of TRL"
    return text
