"""`prb ppo`: train a policy by a reward, and leave it as a model; resumable.

``train.json``      what is trained; its ``inputs`` decide the result: a run is continued only with equal inputs.
``metrics.jsonl``   one row a step.
``rollouts.jsonl``  some rollouts of some steps.
``gold.jsonl``      gold beside the reward, where a second reward is measured; ``overoptimisation.png`` shows them, and
                    ``behaviour.json`` has the gold at the end for `prb correlate`.
``checkpoints/``    states to continue from.
``model/``          the policy, a Hugging Face folder; ``adapter/``, with LoRA, the same for PEFT. Written at the end.
``summary.json``    written last: a folder that has it is finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import read_object
from prb_jax.data.records import Records
from prb_jax.data.writing import held_folder, refuse_file, write_json
from prb_jax.errors import RunError, listed, short_repr
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process, process_index
from prb_jax.rl.algorithms import LABELLED
from prb_jax.rl.board import RolloutBoard
from prb_jax.rl.held_out import Rows, check_held_out, write_held_out
from prb_jax.rl.learner import Learner, make_learner
from prb_jax.rl.loop import Loop, response_columns
from prb_jax.rl.record import (
    open_ppo_run,
    panels_of,
    read_ppo_run,
    run_inputs,
    run_summary,
    shared_settings,
)
from prb_jax.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.rl.rollouts import Sampler, encode_pairs, encode_preferred
from prb_jax.rl.settings import PpoSettings, load_ppo_settings
from prb_jax.rl.step_rows import ROLLOUTS, StepRows
from prb_jax.rl.watch import Watch
from prb_jax.runs.folder import SUMMARY
from prb_jax.runs.progress import Display, show_progress
from prb_jax.runs.weights_and_biases import check_wandb
from prb_jax.scoring.batching import shape_options
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.load import Model
from prb_jax.training.config import flat_settings
from prb_jax.training.folder import CHECKPOINTS, MODEL
from prb_jax.training.interruption import watch_signals
from prb_jax.training.logs import MetricsLog
from prb_jax.training.order import Order
from prb_jax.training.saved_states import Checkpoints
from prb_jax.training.settings import TrainSettings, ValidationSettings
from prb_jax.training.splits import TrainingData, read_training_data
from prb_jax.trees.shapes import Shapes, choose_shapes
from prb_jax.trees.tree import Tree

ADAPTER = "adapter"

_STEPS_SIMULATED = 16
_BATCH_COST = 256
"""What starting one more microbatch costs, in tokens."""


@dataclass(frozen=True)
class PpoResult:
    """What `ppo` leaves.

    Attributes:
      out: the run folder.
      steps: steps made.
      model: the policy, a Hugging Face folder; None for a run that was stopped before its end.
      summary: what `summary.json` holds; empty for such a run.
      stopped_by: the signal that stopped it, as "SIGTERM".
    """

    out: Path
    steps: int
    model: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None

    __repr__ = short_repr


def ppo(
    config: Any,
    *,
    out: str | Path,
    data: Records | None = None,
    reward: Model | None = None,
    gold: Model | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
) -> PpoResult:
    """Train a policy by a reward and write it to `out`; the same call continues a run that was killed.

    It is refused where anything that decides the result differs from what `out` was started with. The mesh, the
    devices, `batch.tokens`, and what is kept and logged may differ.

    Args:
      config: a config file, a ConfigDict (`prb_jax.rl.settings.default_config`), a mapping of keys, or settings.
      out: the run folder.
      data: the records themselves, in place of the config's `data`, which names files and data sets.
      reward: a loaded model, or a function that gives K numbers for a comparison of K rollouts, in place of the
        config's `reward`, which names one.
      gold: a second reward, in place of the config's `watch.gold`: it is measured and never trained on.
      overrides: `key=value`, as on the command line.
      progress: shows progress on standard error.

    Raises:
      RunError: a config that cannot be; `out` cannot be used, is full, or holds another run; a reward that fails
        (naming the comparison); a loss that is not finite.
      DataError: the data cannot be used.
      CheckpointError, MeshError: a model cannot be loaded.
    """
    settings = load_ppo_settings(
        config,
        overrides,
        data_given=data is not None,
        reward_given=reward is not None,
        gold_given=gold is not None,
    )
    path = Path(out)
    on_first_process(lambda: _check_wanted(path, settings.log.wandb))
    # Nothing more is shared before the processes are compared: another one may not train at all.
    check_agreement(shared_settings(settings))
    found = _read_data(settings, data)
    settings = settings.with_steps(len(found.train))
    held_out = None if settings.watch.data is None else read_inputs(settings.watch.data.split(","))
    if held_out is not None:
        check_held_out(held_out.comparisons, found.train)
    learner = make_learner(settings)
    rewards = [(reward, settings.reward), (gold, settings.watch.gold)]
    opened, measured = (
        None
        if given is None and name is None
        else open_reward(settings, name if given is None else given, out=path)
        for given, name in rewards
    )
    check_scoring(settings.scoring, [each for each in (opened, measured) if each is not None])
    inputs = run_inputs(settings, found, learner, opened, measured, held_out)
    check_agreement(inputs)
    with contextlib.ExitStack() as stack:

        def open_folder() -> dict[str, Any] | None:
            stack.enter_context(held_folder(path))
            open_ppo_run(path, inputs, learner, reward=opened)
            return read_object(path / SUMMARY, error=RunError) if (path / SUMMARY).is_file() else None

        summary = on_first_process(open_folder)
        if summary is not None:
            return PpoResult(path, int(summary["steps"]), path / MODEL, summary)
        prompts = [] if held_out is None else list(held_out.comparisons)
        return _Run(settings, path, list(found.train), prompts, learner, opened, measured, inputs).go(
            progress=progress
        )


def _check_wanted(out: Path, wandb: str | None) -> None:
    refuse_file(out)
    read_ppo_run(out)
    if wandb is not None:
        check_wandb(f"log.wandb={wandb}")


@dataclass(eq=False)
class _Run:
    """One start of a run: everything between its folder and its end."""

    settings: PpoSettings
    out: Path
    comparisons: list[Comparison]
    held_out: list[Comparison]
    learner: Learner
    reward: Reward | None
    gold: Reward | None
    inputs: dict[str, Any]

    def go(self, *, progress: bool) -> PpoResult:
        settings, learner = self.settings, self.learner
        order = Order(len(self.comparisons), settings.batch.prompts, settings.seed)
        labelled, sampler, lengths, columns = self._prepared()
        shapes = self._shapes(order, lengths)
        first = process_index() == 0
        with contextlib.ExitStack() as stack:
            messages: list[str] = []
            checkpoints = Checkpoints(
                self.out / CHECKPOINTS,
                keep_last=settings.checkpoint.keep_last,
                keep_best=0,
                say=messages.append,
            )
            stack.callback(checkpoints.close)
            done, facts = learner.begin(checkpoints)
            board = RolloutBoard(settings.steps, done)
            shown = show_progress(f"training {self.out}", board, enabled=progress and first)
            display = stack.enter_context(shown)
            say = display.say if first else lambda text: None
            if self.reward is not None:
                read = "texts for watch.data" if settings.algorithm in LABELLED else "rollouts"
                messages.append(f"reward: {self.reward.name}, which reads the {read} as text")
                if unknown := self.reward.unknown(self.comparisons):
                    messages.append(
                        f"reward: knows nothing of {len(unknown)} users, who are scored as anybody: "
                        f"{listed(sorted(unknown))}"
                    )
            if done:
                messages.append(f"continued from the checkpoint of step {done}")
            for message in messages:
                say(message)
            interruption = stack.enter_context(watch_signals())
            log = None
            if first:
                log = MetricsLog(self.out, step=done, options=settings.log, settings=flat_settings(settings))
                stack.callback(log.close)
            of_rollouts = None if settings.algorithm in LABELLED else self.gold
            watch = Watch(self.out, step=done, settings=settings.watch, gold=of_rollouts)
            loop = Loop(
                learner,
                comparisons=self.comparisons,
                labelled=labelled,
                sampler=sampler,
                reward=self.reward,
                order=order,
                shapes=shapes,
                columns=columns,
                checkpoints=checkpoints,
                log=log,
                board=board,
                display=display,
                kept=StepRows(self.out / ROLLOUTS, step=done) if first else None,
                watch=watch,
                interruption=interruption,
            )
            stopped = loop.run(done, facts)
            if stopped is not None:
                say(
                    f"{stopped}: saved at step {loop.step} of {settings.steps}; the same command continues the run"
                )
                return PpoResult(self.out, loop.step, stopped_by=stopped)
            checkpoints.wait()
            if loop.reason is not None:
                say(f"ended at step {loop.step} of {settings.steps}: {loop.reason}")
            summary = self._finish(log, display, watch, loop.reason)
            return PpoResult(self.out, loop.step, self.out / MODEL, summary)

    def _prepared(self) -> tuple[list[Tree] | None, Sampler | None, list[tuple[int, int, int]], int]:
        """Labelled trees or a sampler, (p, K, R) of every tree, and R."""
        settings, policy = self.settings, self.learner.policy
        multiple = shape_options(self.learner.actor.config, self.learner.mesh).multiple
        if settings.algorithm in LABELLED:
            encode = encode_pairs if settings.algorithm == "dpo" else encode_preferred
            trees = encode(
                self.comparisons,
                policy,
                profile_posts=settings.profile_posts,
                max_length=settings.max_length,
            )
            return trees, None, [tree.shape for tree in trees], response_columns(trees, multiple)
        options = settings.rollout
        room = policy.limit(Sampler.options_of(options), settings.max_length)
        prompts = policy.encode(self.comparisons, profile_posts=settings.profile_posts, limit=room)
        sampler = Sampler(policy, policy.program, prompts, options, per_step=settings.batch.prompts)
        columns = -(-options.max_new_tokens // multiple) * multiple
        return None, sampler, [(len(prompt.ids), options.n, columns) for prompt in prompts], columns

    def _shapes(self, order: Order, lengths: Sequence[tuple[int, int, int]]) -> Shapes:
        batch = self.settings.batch
        options = shape_options(self.learner.actor.config, self.learner.mesh)
        # A backward pass holds the activations of all layers: less at a time than in scoring.
        tokens = options.tokens_per_batch // 2 if batch.tokens is None else batch.tokens * options.divisor
        parts = batch.prompts // (batch.minibatch or batch.prompts)
        steps = range(min(_STEPS_SIMULATED, self.settings.steps))
        return choose_shapes(
            lengths,
            options=replace(
                options, tokens_per_batch=tokens, max_buckets=batch.max_buckets, batch_cost=_BATCH_COST
            ),
            together=[part for step in steps for part in np.split(order.step(step), parts)],
            fill=True,
        )

    def _finish(
        self, log: MetricsLog | None, display: Display, watch: Watch, reason: str | None
    ) -> dict[str, Any]:
        """Export the policy, draw the curves and write the summary."""
        there = on_first_process(lambda: [(self.out / name).exists() for name in (MODEL, ADAPTER)])
        if not there[0]:
            self.learner.export(self.out / MODEL)
        if self.settings.tuning == "lora" and not there[1]:
            self.learner.export_adapter(self.out / ADAPTER)
        rows: Rows = []
        if self.held_out and self.gold is not None:
            rows = write_held_out(self.out, self.learner, self.held_out, reward=self.reward, gold=self.gold)
        return on_first_process(lambda: self._summed_up(log, display, watch, reason, rows))

    def _summed_up(
        self,
        log: MetricsLog | None,
        display: Display,
        watch: Watch,
        reason: str | None,
        held_out: Rows,
    ) -> dict[str, Any]:
        assert log is not None
        if self.settings.log.plot:
            from prb_jax.training.curves import plot_curves

            panels = panels_of(log.rows)
            try:
                plot_curves(log.rows, self.out / "learning_curves.png", title=self.out.name, panels=panels)
                watch.draw()
            except RunError as error:  # a picture less is no reason to fail
                display.say(f"no picture: {error}")
        watch.write_behaviour(
            algorithm=self.settings.algorithm, reward=self.reward, inputs=self.inputs, held_out=held_out
        )
        summary = run_summary(self.settings, log.rows, len(self.comparisons), self.reward, reason, held_out)
        write_json(self.out / SUMMARY, summary)
        return summary


def _read_data(settings: PpoSettings, data: Records | None) -> TrainingData:
    """The comparisons, of sources with splits those of "train"."""
    read = TrainSettings(
        data=settings.data,
        subset=settings.subset,
        limit=settings.limit,
        validation=ValidationSettings(fraction=0.0),
    )
    return read_training_data(read, data=data)
