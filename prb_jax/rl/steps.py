"""The steps of `prb ppo`: rollouts, scores, advantages and updates, or updates from labelled responses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, listed, quote
from prb_jax.rl.credit import credit
from prb_jax.rl.learner import Learner
from prb_jax.rl.numbers import adapted_coefficient, token_weights
from prb_jax.rl.objective import Pairs, Targets, Texts
from prb_jax.rl.rewards import Reward
from prb_jax.rl.rollouts import Sampler, StepBatch, TokenStats, rollout_rows
from prb_jax.rl.watch import Watch
from prb_jax.runs.progress import Speed
from prb_jax.training.logs import StepFile
from prb_jax.training.order import Order, permutation
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.shapes import PaddedBatch, Shapes
from prb_jax.trees.tree import Tree


@dataclass(eq=False, kw_only=True)
class PolicySteps:
    """Makes the steps of a run; its only state is that of the learner and the coefficient of the KL.

    Attributes:
      learner: the policy.
      comparisons: the data.
      labelled: their trees, for dpo and sft.
      sampler, reward: of all other algorithms.
      order: which prompts each step sees.
      shapes: of microbatches.
      columns: R, tokens of a response with padding.
      speed: what is counted for each second.
      watch: measures rollouts beside the reward.
      kept: the rows of rollouts to be read; None in all processes but the first.
      coefficient: of the KL.
    """

    learner: Learner
    comparisons: Sequence[Comparison]
    labelled: Sequence[Tree] | None
    sampler: Sampler | None
    reward: Reward | None
    order: Order
    shapes: Shapes
    columns: int
    speed: Speed
    watch: Watch
    kept: StepFile | None
    coefficient: float

    def make(self, step: int) -> dict[str, float]:
        """Make a step, counted from 0, and return its row of metrics."""
        members = self.order.step(step).tolist()
        labelled = self.sampler is None
        row = self._from_labels(step, members) if labelled else self._from_rollouts(step, members)
        return {"step": step + 1, "epoch": self.order.epoch_of(step + 1), **row}

    def _from_labels(self, step: int, members: Sequence[int]) -> dict[str, float]:
        assert self.labelled is not None
        start = time.perf_counter()
        batch = StepBatch([self.labelled[member] for member in members], self.columns)
        if self.learner.settings.algorithm == "dpo":
            batch = replace(batch, stats=self._read(batch))
        updates = self._update(step, batch, members)
        tokens = sum(tree.tokens for tree in batch.trees)
        return {
            **updates,
            "tokens": tokens,
            "update_seconds": time.perf_counter() - start,
            **self._count(tokens),
        }

    def _from_rollouts(self, step: int, members: Sequence[int]) -> dict[str, float]:
        assert self.sampler is not None
        assert self.reward is not None
        settings, number = self.learner.settings, step + 1
        asked = [self.comparisons[member] for member in members]
        times = [time.perf_counter()]
        batch = self.sampler.draw(
            self.learner.params(), members, seed=settings.seed, step=step, columns=self.columns
        )
        times.append(time.perf_counter())
        scored = self.reward.score(asked, batch.texts, step=number)
        times.append(time.perf_counter())
        stats = self._read(batch)
        step_credit = credit(
            jnp.asarray(scored.values),
            jnp.asarray(batch.ended),
            jnp.asarray(batch.lengths),
            jnp.asarray(stats.logprobs),
            jnp.asarray(stats.reference),
            jnp.asarray(stats.values),
            jnp.float32(self.coefficient),
            settings=settings,
        )
        kl = 0.0 if settings.kl_in_reward else self.coefficient
        batch = replace(batch, scores=scored.values, stats=stats, credit=step_credit, kl=kl)
        updates = self._update(step, batch, members)
        times.append(time.perf_counter())
        if self.kept is not None and (number == 1 or number % settings.rollouts_every == 0):
            self.kept.write(rollout_rows(number, asked[: settings.rollout.keep], batch))
        numbers = {name: float(np.asarray(value)) for name, value in step_credit.numbers.items()}
        tokens = int(batch.mask.sum())
        row = {
            **updates,
            **numbers,
            "kl_coefficient": self.coefficient,
            "empty": scored.empty,
            "failed": scored.failed,
            "sampler_difference": float(np.abs((stats.logprobs - batch.sampled) * batch.mask).max()),
            "tokens": tokens,
            "rollout_seconds": times[1] - times[0],
            "reward_seconds": times[2] - times[1],
            "update_seconds": times[3] - times[2],
            **self._count(tokens),
        }
        row |= self.watch.measure(number, asked, batch.texts, scores=batch.scores, kl=row["kl"])
        if settings.kl.target is not None:
            self.coefficient = adapted_coefficient(
                self.coefficient,
                kl=row["kl"],
                target=settings.kl.target,
                horizon=settings.kl.horizon,
                samples=len(members) * settings.rollout.n,
            )
        return row

    def _count(self, tokens: int) -> dict[str, float]:
        self.speed.count(steps=1, tokens=tokens)
        return {f"{name}_per_second": self.speed.rate(name) for name in ("steps", "tokens")}

    def _read(self, batch: StepBatch) -> TokenStats:
        """What the models say of all tokens of a step, from as many microbatches as it needs."""
        count, responses, columns = batch.mask.shape
        logprobs, reference = np.zeros((2, count, responses, columns), np.float32)
        values = np.zeros((count, responses, columns + 1), np.float32)
        for padded, trees in self._microbatches(batch, range(count)):
            part = self.learner.look(trees)
            rows, length = list(padded.members), padded.bucket.response_length
            for whole, array, width in (
                (logprobs, part.logprobs, length),
                (reference, part.reference, length),
                (values, part.values, length + 1),
            ):
                whole[rows, :, :width] = array[: len(rows), :responses]
        return TokenStats(logprobs * batch.mask, reference * batch.mask, values)

    def _microbatches(self, batch: StepBatch, rows: Iterable[int]) -> Iterable[tuple[PaddedBatch, TreeBatch]]:
        """These rows of a step in microbatches of the shapes of the run."""
        members = list(rows)
        for padded in self.shapes.batches([batch.trees[row].shape for row in members], members):
            trees = [batch.trees[row] for row in padded.members]
            yield padded, make_batch(trees, padded.bucket, batch=padded.rows)

    def _update(self, step: int, batch: StepBatch, members: Sequence[int]) -> dict[str, float]:
        """Make the updates of a step; the means of their numbers."""
        settings, count = self.learner.settings, len(batch.trees)
        epochs, size = settings.batch.epochs, settings.batch.minibatch or count
        updates: list[dict[str, float]] = []
        for epoch in range(epochs):
            # One epoch over everything needs no order; others have one that depends on (seed, step, epoch) alone.
            order = permutation(count, settings.seed, (step + 1) * epochs + epoch)
            for start in range(0, count, size):
                rows = np.sort(order[start : start + size])
                arrays = self._targets(batch, rows)
                metrics = self.learner.update(
                    [
                        (trees, _cut(arrays, np.searchsorted(rows, padded.members), padded))
                        for padded, trees in self._microbatches(batch, rows.tolist())
                    ]
                )
                if not metrics.pop("finite") or not all(map(math.isfinite, metrics.values())):
                    ids = [self.comparisons[members[row]].id for row in rows]
                    raise _not_finite(step + 1, metrics, ids)
                updates.append(metrics)
        means = {name: float(np.mean([metrics[name] for metrics in updates])) for name in updates[0]}
        return {**means, "learning_rate": updates[-1]["learning_rate"]}

    def _targets(self, batch: StepBatch, rows: np.ndarray) -> Targets | Pairs | Texts:
        """What the loss of a whole minibatch needs, so that its weights are made for all of it."""
        settings, mask, stats = self.learner.settings, batch.mask[rows], batch.stats
        if settings.algorithm == "sft":
            return Texts(weights=mask / mask.sum())
        assert stats is not None
        if settings.algorithm == "dpo":
            weights = np.full(len(rows), 1.0 / len(rows), np.float32)
            return Pairs(mask=mask, reference=stats.reference[rows], weights=weights)
        assert batch.credit is not None
        value_mask = np.asarray(batch.credit.value_mask)[rows]
        mode, longest = settings.loss.aggregation, settings.rollout.max_new_tokens
        return Targets(
            weights=np.asarray(token_weights(jnp.asarray(mask), mode, longest=longest)),
            counts=mask / mask.sum(),
            old=stats.logprobs[rows],
            reference=stats.reference[rows],
            advantages=np.asarray(batch.credit.advantages)[rows],
            kl=np.full(len(rows), batch.kl, np.float32),
            value_weights=value_mask / value_mask.sum(),
            values=stats.values[rows],
            returns=np.asarray(batch.credit.returns)[rows],
        )


def _cut(whole: Any, rows: np.ndarray, padded: PaddedBatch) -> Any:
    """The arrays of some rows, cut to the columns of a microbatch; rows that only fill it up are 0."""
    arrays = {}
    for name, array in vars(whole).items():
        part = array[rows]
        if part.ndim == 3:
            extra = 1 if name in ("value_weights", "values", "returns") else 0
            part = part[:, :, : padded.bucket.response_length + extra]
            part = np.pad(part, ((0, 0), (0, padded.bucket.responses - part.shape[1]), (0, 0)))
        missing = [(0, padded.rows - len(rows)), *[(0, 0)] * (part.ndim - 1)]
        arrays[name] = np.pad(part, missing).astype(np.float32)
    return type(whole)(**arrays)


def _not_finite(step: int, metrics: Mapping[str, float], ids: Sequence[str]) -> RunError:
    prompts = listed([quote(name) for name in ids], most=64)
    return RunError(
        f"step {step}: the loss or its gradient is not finite (loss {metrics['loss']}, gradient norm "
        f"{metrics['grad_norm']}); this update was not made; its prompts: {prompts}. A lower "
        "optimizer.learning_rate or dtype=float32 may help"
    )
