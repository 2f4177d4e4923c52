"""`prb bench train`: how fast a model is trained on this machine, compared with TRL.

A step is a forward and a backward pass over all pairs of the workload and one AdamW update of all
weights, of adapters or of the head. Trained weights and moments are float32; activations and frozen weights
have the timed dtype.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

from prb_jax.measure.bench.figures import Figures, in_turn, median_ratio
from prb_jax.measure.bench.models import bench_source, load_for_bench
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.rivals.trl import TrlTrainer
from prb_jax.measure.bench.workload import OPTIMIZER, STEPS, TimedStep, Workload, count_pairs, workload_for
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.flops import measured_peak
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.training import step_flops
from prb_jax.training.config import BatchSettings, TrainSettings
from prb_jax.training.data import Examples, Order
from prb_jax.training.microbatches import STEPS_SIMULATED, labelled, plan_layout
from prb_jax.training.step import add_gradients
from prb_jax.training.train import make_reward_step
from prb_jax.training.weights import trained_decoder


class TreeTrainer:
    """Our side: the training step of `prb train` over a fixed set of pairs."""

    def __init__(self, model: RewardModel, workload: Workload, options: BenchOptions) -> None:
        pairs, dtype = len(workload.trees), jnp.dtype(model.dtype)
        chosen = Comparison(id="pair", question="?", chosen="a", rejected="b")
        examples = Examples(same := Held([chosen] * pairs), same, trees=Held(workload.trees))
        order = Order(pairs, pairs, seed=0)
        settings = TrainSettings(
            dtype=model.dtype,  # pyright: ignore[reportArgumentType] - checked by the settings
            tuning=options.tuning,
            batch=BatchSettings(comparisons=pairs, tokens=options.batch_tokens),
            remat=options.remat,  # pyright: ignore[reportArgumentType]
            attention=options.attention,  # pyright: ignore[reportArgumentType]
            optimizer=OPTIMIZER,
        )
        self.attention = choose_attention(
            model.mesh, dtype, options.attention, config=model.decoder, trained=True
        )
        trained = trained_decoder(settings, model.decoder, mesh=model.mesh)
        layout = plan_layout(
            examples.trees,
            [order.step(step) for step in range(STEPS_SIMULATED)],
            per_step=pairs,
            steps=STEPS,
            config=model.decoder,
            mesh=model.mesh,
            attention=self.attention,
            batch=settings.batch,
            memory=trained.memory,
        )
        self.microbatches = labelled(layout, examples, order.step(0), examples.rows)
        self.flops = sum(
            step_flops(part.flops, part.mixing_flops, tuning=options.tuning) for part in self.microbatches
        )
        self._step = make_reward_step(settings, trained, mesh=model.mesh, lengths=(STEPS,))
        self._state, self._frozen = self._step.begin(model.params)

    @property
    def compiles(self) -> int:
        """Number of programs compiled so far."""
        step = self._step
        programs = (step.gradients, step.add, step.update)
        return sum(cast(Any, program)._cache_size() for program in programs)

    def run(self) -> TimedStep:
        """Run one step."""
        start = time.perf_counter()
        sums = add_gradients(self._step, self._state, self._frozen, self.microbatches)
        self._state, metrics = self._step.update(self._state, sums)
        jax.block_until_ready(self._state)
        return TimedStep(
            time.perf_counter() - start,
            float(metrics["loss"]),
            sum(microbatch.batch.tokens.size for microbatch in self.microbatches),
            sum(microbatch.tokens for microbatch in self.microbatches),
        )


def bench_training(options: BenchOptions) -> Iterator[Figures]:
    """Time steps of ours and, on request, of TRL, alternating.

    Yields:
      One result per entry of `questions_per_user`.

    Raises:
      RunError: there are fewer pairs than one user has questions.
    """
    counts = {
        questions: count_pairs(options.pairs, usual=8, questions_per_user=questions)
        for questions in options.questions_per_user
    }
    model = load_for_bench(bench_source(options.model), options)
    for questions, count in counts.items():
        workload = workload_for(model.decoder, options, count, questions_per_user=questions)
        yield _bench(model, workload, options)


def _bench(model: RewardModel, workload: Workload, options: BenchOptions) -> Figures:
    ours, trees, rival = TreeTrainer(model, workload, options), workload.trees, None
    if options.against:  # both sides start from the same weights
        rival = TrlTrainer(model.decoder, model.params, dtype=model.dtype, pairs=options.against_pairs)
    peak = measured_peak(model.dtype)
    runs, first = [ours.run], ours.run()
    # Compiling keeps the streams of the first step apart, so only the second one takes all the memory of a step.
    ours.run()
    pairs, compiles = len(trees), ours.compiles
    their_first = None
    if rival is not None:
        their_first = rival.run(trees)
        runs.append(lambda: rival.run(trees))
    ours_seconds, *their = ([step.seconds for step in steps] for steps in in_turn(options.rounds, *runs))
    seconds, beside = statistics.median(ours_seconds), statistics.median(their[0]) if their else None
    speed = median_ratio(their[0], ours_seconds) if their else None
    padding = difference = None
    if their_first is not None:
        padding = 1 - their_first.tokens / their_first.padded_tokens
        difference = abs(first.loss - their_first.loss)
    figures = Figures()
    add = figures.add
    add("workload", workload.name, "workload", f"{options.tuning}, {pairs} pairs, {{}}")
    add("dtype", model.dtype, "dtype")
    add("pairs", pairs)
    add("tuning", options.tuning)
    add("pairs_per_second", pairs / seconds, "pairs/s", "{:.3f}")
    add("tokens_per_second", first.tokens / seconds, "tokens/s", "{:,.0f}")  # shared tokens count once
    add("padding_waste", 1 - first.tokens / first.padded_tokens, "padding", "{:.0%}")
    add("compiles", compiles, "compiles")
    add("compile_seconds", max(0.0, first.seconds - seconds), "compile s", "{:.1f}")
    share = ours.flops / seconds / peak / model.mesh.size  # without padding
    add("peak_share", share, "of matmul peak", f"{{:.0%}} of {peak / 1e9:,.0f} GFLOP/s")
    add("peak_gflops", peak / 1e9)
    add("loss", first.loss, "loss", "{:.4f}")
    head = f"{options.against} pairs/s"
    add("against_pairs_per_second", None if beside is None else pairs / beside, head, "{:.3f}")
    add("speedup", speed, "speed-up", "{:.2f}x")
    add("against_padding_waste", padding, "its padding", "{:.0%}")
    add("loss_difference", difference, "loss difference", "{:.1e}")
    add("attention", ours.attention.name)
    add("questions_per_user", workload.questions_per_user)
    figures.line = f"{model.dtype}, {workload.name}: {pairs / seconds:.3f} pairs/s in training"
    figures.line += "" if speed is None else f", {speed:.2f}x of TRL"
    return figures
