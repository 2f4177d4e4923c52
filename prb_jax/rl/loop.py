"""Step after step: rollouts, scores, advantages, updates; numbers and texts on the disk, checkpoints in between."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, listed, quote
from prb_jax.processes.sharing import on_first_process
from prb_jax.rl.board import RolloutBoard
from prb_jax.rl.credit import Credit, credit
from prb_jax.rl.learner import Learner, Looked
from prb_jax.rl.numbers import adapted_coefficient, token_weights
from prb_jax.rl.objective import Pairs, Targets, Texts
from prb_jax.rl.rewards import Reward, Scores
from prb_jax.rl.rollouts import Rollouts, Sampler, lengths_of, mask_of
from prb_jax.rl.step_rows import StepRows, rollout_rows
from prb_jax.rl.watch import Watch
from prb_jax.runs.progress import Display
from prb_jax.training.interruption import Interruption
from prb_jax.training.logs import MetricsLog
from prb_jax.training.order import Order, permutation
from prb_jax.training.saved_states import Checkpoints
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.shapes import DealtBatch, Shapes
from prb_jax.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """All that the updates of one step are made from, for the whole step; rows are its prompts.

    Attributes:
      trees: [B] prompts and their responses.
      mask: float32 [B, K, R].
      looked: what was known before the first update; None of preferred responses, which need nothing more.
      credit: of rollouts; None of labelled data.
      kl: coefficient of the KL in the loss; 0 where it is in the reward.
    """

    trees: Sequence[Tree]
    mask: np.ndarray
    looked: Looked | None
    credit: Credit | None
    kl: float


class Loop:
    """Steps until the end, or until a signal.

    Args:
      learner: the policy.
      comparisons: the data.
      labelled: their trees, for dpo and sft.
      sampler, reward: of all other algorithms.
      order: which prompts each step sees.
      shapes: of microbatches.
      columns: R, tokens of a response with padding.
      checkpoints, log, board, display, kept, watch, interruption: of this start of the run; of several processes
        all but the first have no log and no kept rows.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        comparisons: Sequence[Comparison],
        labelled: Sequence[Tree] | None,
        sampler: Sampler | None,
        reward: Reward | None,
        order: Order,
        shapes: Shapes,
        columns: int,
        checkpoints: Checkpoints,
        log: MetricsLog | None,
        board: RolloutBoard,
        display: Display,
        kept: StepRows | None,
        watch: Watch,
        interruption: Interruption,
    ) -> None:
        self.learner, self.settings = learner, learner.settings
        self.comparisons, self.labelled = comparisons, labelled
        self.sampler, self.reward = sampler, reward
        self.order, self.shapes, self.columns = order, shapes, columns
        self.checkpoints, self.log, self.board, self.display = checkpoints, log, board, display
        self.kept, self.watch, self.interruption = kept, watch, interruption
        self.step = 0
        self.coefficient = self.settings.kl.coefficient
        self.reason: str | None = None

    def run(self, done: int, facts: Mapping[str, Any]) -> str | None:
        """Go from step ``done`` to the end, or to where the watch ends the run; the name of the signal that stopped it
        before that, if one did."""
        self.step = done
        self.coefficient = float(facts.get("kl_coefficient", self.coefficient))
        self.reason = self._reason_to_stop()
        while not self.ended():
            row = self._step()
            self.step += 1
            if self.log is not None:
                self.log.write({"step": self.step, "epoch": self.order.epoch_of(self.step), **row})
            self.reason = self._reason_to_stop()
            self.board.take(self.step, row)
            self.display.update()
            last, stop = self.ended(), self.interruption.reached(self.step)
            if last or stop or self.step % self.settings.checkpoint_every == 0:
                with self.board.speed.pause():
                    self._save()
            if stop and not last:
                self.checkpoints.wait()
                return stop
        return None

    def ended(self) -> bool:
        """Tell whether there is nothing more to do."""
        return self.step == self.settings.steps or self.reason is not None

    def _reason_to_stop(self) -> str | None:
        """Why the watch ends the run here; None where it does not. A collective."""
        watch = self.watch
        if not watch.may_stop:
            return None
        return on_first_process(lambda: watch.reason_to_stop([] if self.log is None else self.log.rows))

    def _save(self) -> None:
        for each in (self.kept, self.watch, self.log):
            if each is not None:
                each.sync()
        facts = {"time": time.time(), "kl_coefficient": self.coefficient, "seed": self.settings.seed}
        self.learner.save(self.checkpoints, self.step, facts)

    def _step(self) -> dict[str, float]:
        members = self.order.step(self.step).tolist()
        return (
            self._learn_from_labelled(members) if self.sampler is None else self._learn_from_rollouts(members)
        )

    def _learn_from_labelled(self, members: Sequence[int]) -> dict[str, float]:
        assert self.labelled is not None
        trees = [self.labelled[member] for member in members]
        start = time.perf_counter()
        looked = self._look(trees) if self.settings.algorithm == "dpo" else None
        lesson = Lesson(trees=trees, mask=mask_of(trees, self.columns), looked=looked, credit=None, kl=0.0)
        updates = self._update(lesson, members)
        tokens = sum(tree.tokens for tree in trees)
        self.board.speed.count(steps=1, tokens=tokens)
        return {**updates, "tokens": tokens, "update_seconds": time.perf_counter() - start, **self._speeds()}

    def _learn_from_rollouts(self, members: Sequence[int]) -> dict[str, float]:
        assert self.sampler is not None
        times = [time.perf_counter()]
        settings, number = self.settings, self.step + 1
        rollouts = self.sampler.draw(
            self.learner.params(), members, seed=settings.seed, step=self.step, columns=self.columns
        )
        times.append(time.perf_counter())
        scores = self._score(rollouts, members)
        times.append(time.perf_counter())
        looked = self._look(rollouts.trees)
        found = credit(
            jnp.asarray(scores.values),
            jnp.asarray(rollouts.ended),
            jnp.asarray(rollouts.lengths),
            jnp.asarray(looked.logprobs),
            jnp.asarray(looked.reference),
            jnp.asarray(looked.values),
            jnp.float32(self.coefficient),
            settings=settings,
        )
        mask = mask_of(rollouts.trees, self.columns)
        lesson = Lesson(
            trees=rollouts.trees,
            mask=mask,
            looked=looked,
            credit=found,
            kl=0.0 if settings.kl_in_reward else self.coefficient,
        )
        updates = self._update(lesson, members)
        times.append(time.perf_counter())
        if self.kept is not None and (number == 1 or number % settings.rollouts_every == 0):
            named = [self.comparisons[member] for member in members[: settings.rollout.keep]]
            self.kept.write(rollout_rows(number, named, rollouts, scores.values, looked))
        numbers = {name: float(np.asarray(value)) for name, value in found.numbers.items()}
        tokens = int(mask.sum())
        self.board.speed.count(steps=1, tokens=tokens)
        row = {
            **updates,
            **numbers,
            "kl_coefficient": self.coefficient,
            "empty": scores.empty,
            "failed": scores.failed,
            "sampler_difference": float(np.abs((looked.logprobs - rollouts.sampled) * mask).max()),
            "tokens": tokens,
            "rollout_seconds": times[1] - times[0],
            "reward_seconds": times[2] - times[1],
            "update_seconds": times[3] - times[2],
            **self._speeds(),
        }
        asked = [self.comparisons[member] for member in members]
        row |= self.watch.measure(number, asked, rollouts.texts, scores=scores.values, kl=row["kl"])
        if settings.kl.target is not None:
            self.coefficient = adapted_coefficient(
                self.coefficient,
                kl=row["kl"],
                target=settings.kl.target,
                horizon=settings.kl.horizon,
                samples=len(members) * settings.rollout.n,
            )
        return row

    def _speeds(self) -> dict[str, float]:
        return {f"{name}_per_second": self.board.speed.rate(name) for name in ("steps", "tokens")}

    def _score(self, rollouts: Rollouts, members: Sequence[int]) -> Scores:
        assert self.reward is not None
        asked = [self.comparisons[member] for member in members]
        return self.reward.score(asked, rollouts.texts, step=self.step + 1)

    def _look(self, trees: Sequence[Tree]) -> Looked:
        """What is known of all trees of a step, [B, K, R], from as many microbatches as it needs."""
        count, responses = len(trees), len(trees[0].responses)
        shape = (count, responses, self.columns)
        logprobs, reference = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        values = np.zeros((count, responses, self.columns + 1), np.float32)
        for dealt in self._deal(trees, range(count)):
            found = self.learner.look(_batch(trees, dealt))
            own, real = list(dealt.members), len(dealt.members)
            length = dealt.bucket.response_length
            logprobs[own, :, :length] = found.logprobs[:real, :responses]
            reference[own, :, :length] = found.reference[:real, :responses]
            values[own, :, : length + 1] = found.values[:real, :responses]
        mask = mask_of(trees, self.columns)
        return Looked(logprobs * mask, reference * mask, values)

    def _deal(self, trees: Sequence[Tree], rows: Sequence[int]) -> list[DealtBatch]:
        return self.shapes.deal([trees[row].shape for row in rows], list(rows))

    def _update(self, lesson: Lesson, members: Sequence[int]) -> dict[str, float]:
        """Make the updates of a step; the means of their numbers."""
        count, epochs = len(lesson.trees), self.settings.batch.epochs
        size = self.settings.batch.minibatch or count
        found: list[dict[str, float]] = []
        for epoch in range(epochs):
            # One epoch over everything needs no order; others have one that depends on (seed, step, epoch) alone.
            order = permutation(count, self.settings.seed, (self.step + 1) * epochs + epoch)
            for start in range(0, count, size):
                rows = np.sort(order[start : start + size]).tolist()
                found.append(self._minibatch(lesson, rows, members))
        means = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
        return {**means, "learning_rate": found[-1]["learning_rate"]}

    def _minibatch(self, lesson: Lesson, rows: Sequence[int], members: Sequence[int]) -> dict[str, float]:
        kinds = {"dpo": self._pairs, "sft": self._texts}
        make = kinds.get(self.settings.algorithm, self._targets)
        whole = make(lesson, rows)
        place = {row: number for number, row in enumerate(rows)}
        batches = []
        for dealt in self._deal(lesson.trees, rows):
            own = [place[member] for member in dealt.members]
            batches.append((_batch(lesson.trees, dealt), _cut(whole, own, dealt)))
        metrics = self.learner.update(batches)
        if not metrics.pop("finite") or not all(map(math.isfinite, metrics.values())):
            ids = [quote(self.comparisons[members[row]].id) for row in rows]
            raise RunError(
                f"step {self.step + 1}: the loss or its gradient is not finite (loss {metrics['loss']}, gradient norm "
                f"{metrics['grad_norm']}); this update was not made; its prompts: {listed(ids, most=64)}. A lower "
                "optimizer.learning_rate or dtype=float32 may help"
            )
        return metrics

    def _targets(self, lesson: Lesson, rows: Sequence[int]) -> Targets:
        """Of a whole minibatch, so that its weights are."""
        assert lesson.credit is not None
        assert lesson.looked is not None
        loss, own = self.settings.loss, list(rows)
        mask = lesson.mask[own]
        value_mask = np.asarray(lesson.credit.value_mask)[own]
        longest = self.settings.rollout.max_new_tokens
        return Targets(
            weights=np.asarray(token_weights(jnp.asarray(mask), loss.aggregation, longest=longest)),
            counts=mask / mask.sum(),
            old=lesson.looked.logprobs[own],
            reference=lesson.looked.reference[own],
            advantages=np.asarray(lesson.credit.advantages)[own],
            kl=np.full(len(own), lesson.kl, np.float32),
            value_weights=value_mask / value_mask.sum(),
            values=lesson.looked.values[own],
            returns=np.asarray(lesson.credit.returns)[own],
        )

    def _texts(self, lesson: Lesson, rows: Sequence[int]) -> Texts:
        mask = lesson.mask[list(rows)]
        return Texts(weights=mask / mask.sum())

    def _pairs(self, lesson: Lesson, rows: Sequence[int]) -> Pairs:
        own = list(rows)
        assert lesson.looked is not None
        return Pairs(
            mask=lesson.mask[own],
            reference=lesson.looked.reference[own],
            weights=np.full(len(own), 1.0 / len(own), np.float32),
        )


def _batch(trees: Sequence[Tree], dealt: DealtBatch) -> TreeBatch:
    return make_batch([trees[member] for member in dealt.members], dealt.bucket, batch=dealt.rows)


def _cut(whole: Any, own: Sequence[int], dealt: DealtBatch) -> Any:
    """The arrays of some rows, cut to the columns of a microbatch; rows that only fill it up are 0."""
    rows, length = dealt.rows, dealt.bucket.response_length
    arrays = {}
    for name, array in vars(whole).items():
        extra = 1 if name in ("value_weights", "values", "returns") else 0
        part = array[list(own)]
        if part.ndim == 3:
            part = part[:, :, : length + extra]
            part = np.pad(part, ((0, 0), (0, dealt.bucket.responses - part.shape[1]), (0, 0)))
        missing = [(0, rows - len(own)), *[(0, 0)] * (part.ndim - 1)]
        arrays[name] = np.pad(part, missing).astype(np.float32)
    return type(whole)(**arrays)


def response_columns(trees: Sequence[Tree], multiple: int) -> int:
    """Return R for trees of the data."""
    longest = int(lengths_of(trees).max())
    return -(-longest // multiple) * multiple
