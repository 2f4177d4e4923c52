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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import read_object
from prb_jax.data.records import Records
from prb_jax.data.writing import refuse_file, write_json
from prb_jax.errors import RunError, listed
from prb_jax.processes.agreement import check_agreement
from prb_jax.processes.sharing import on_first_process
from prb_jax.rl.learner import Learner, make_learner
from prb_jax.rl.record import open_ppo_run, panels_of, read_ppo_run, run_inputs, run_summary
from prb_jax.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.rl.rollouts import ROLLOUTS, Sampler, encode_pairs, encode_preferred, lengths_of
from prb_jax.rl.sections import LABELLED
from prb_jax.rl.settings import PpoSettings, load_ppo_settings
from prb_jax.rl.steps import PolicySteps
from prb_jax.rl.watch import Rows, Watch, check_held_out, write_held_out
from prb_jax.runs.kind import SUMMARY
from prb_jax.runs.weights_and_biases import check_wandb
from prb_jax.scoring.batching import shape_options
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.load import Model
from prb_jax.training.curves import draw_learning_curves
from prb_jax.training.folder import MODEL
from prb_jax.training.logs import StepFile
from prb_jax.training.loop import StepLoop, TrainResult, open_loop, run_steps
from prb_jax.training.order import Order
from prb_jax.training.record import shared_settings
from prb_jax.training.settings import TrainSettings, ValidationSettings
from prb_jax.training.splits import TrainingData, read_training_data
from prb_jax.trees.shapes import Shapes, choose_shapes, round_up
from prb_jax.trees.tree import Tree

ADAPTER = "adapter"

FORMS = {
    "reward": ".3f", "accuracy": ".2f", "kl": ".3f", "entropy": ".2f", "clip_share": ".2f", "length": ".0f"
}  # fmt: skip
"""The numbers that are shown of a run on its way, and how."""

_STEPS_SIMULATED = 16
_BATCH_COST = 256
"""What starting one more microbatch costs, in tokens."""


class PpoResult(TrainResult):
    """What `ppo` leaves; its `model` is the policy."""


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
    check_agreement(shared_settings(settings, "ppo"))
    source = _read_data(settings, data)
    settings = settings.with_steps(len(source.train))
    held_out = None if settings.watch.data is None else read_inputs(settings.watch.data.split(","))
    if held_out is not None:
        check_held_out(held_out.comparisons, source.train)
    learner = make_learner(settings)
    opened, measured = (
        None
        if model is None and name is None
        else open_reward(settings, name if model is None else model, out=path)
        for model, name in ((reward, settings.reward), (gold, settings.watch.gold))
    )
    check_scoring(settings.scoring, [scorer for scorer in (opened, measured) if scorer is not None])
    inputs = run_inputs(settings, source, learner, opened, measured, held_out)
    check_agreement(inputs)
    with contextlib.ExitStack() as stack:

        def open_folder() -> dict[str, Any] | None:
            stack.enter_context(open_ppo_run(path, inputs, learner, reward=opened))
            return read_object(path / SUMMARY, error=RunError) if (path / SUMMARY).is_file() else None

        summary = on_first_process(open_folder)
        if summary is not None:
            return PpoResult(path, int(summary["steps"]), path / MODEL, summary)
        comparisons = list(source.train)
        order = Order(len(comparisons), settings.batch.prompts, settings.seed)
        labelled, sampler, lengths, columns = _prepared(learner, comparisons)
        shapes = _shapes(learner, order, lengths)
        loop = stack.enter_context(
            open_loop(
                path,
                settings,
                learner.begin,
                keep_last=settings.checkpoint.keep_last,
                forms=FORMS,
                progress=progress,
            )
        )
        first, offline = loop.log is not None, labelled is not None
        if opened is not None:
            _say_reward(loop, opened, comparisons, offline=offline)
        watch = Watch(path, step=loop.step, settings=settings.watch, gold=None if offline else measured)
        steps = PolicySteps(
            learner=learner,
            comparisons=comparisons,
            labelled=labelled,
            sampler=sampler,
            reward=opened,
            order=order,
            shapes=shapes,
            columns=columns,
            speed=loop.speed,
            watch=watch,
            kept=StepFile(path / ROLLOUTS, step=loop.step) if first else None,
            coefficient=float(loop.facts.get("kl_coefficient", settings.kl.coefficient)),
        )

        def make_step(step: int) -> Callable[[], Mapping[str, float]]:
            row = steps.make(step)
            return lambda: row

        def save(step: int, facts: Mapping[str, Any]) -> None:
            for rows in (steps.kept, watch):
                if rows is not None:
                    rows.sync()
            learner.save(loop.checkpoints, step, {**facts, "kl_coefficient": steps.coefficient})

        def reason_to_end() -> str | None:
            if not watch.may_stop:
                return None
            return on_first_process(lambda: watch.reason_to_stop([] if loop.log is None else loop.log.rows))

        end = run_steps(
            make_step, iter(range(loop.step, settings.steps)), loop, save=save, reason_to_end=reason_to_end
        )
        if end.stopped_by is not None:
            return PpoResult(path, end.step, stopped_by=end.stopped_by)
        if end.reason is not None:
            loop.say(f"ended at step {end.step} of {settings.steps}: {end.reason}")
        there = on_first_process(lambda: [(path / name).exists() for name in (MODEL, ADAPTER)])
        if not there[0]:
            learner.export(path / MODEL)
        if settings.tuning == "lora" and not there[1]:
            learner.export_adapter(path / ADAPTER)
        rows: Rows = []
        if held_out is not None and measured is not None:
            rows = write_held_out(path, learner, held_out.comparisons, reward=opened, gold=measured)

        def sum_up() -> dict[str, Any]:
            assert loop.log is not None
            metrics = loop.log.rows
            if settings.log.plot:
                draw_learning_curves(metrics, path, say=loop.say, panels=panels_of(metrics))
                watch.draw()
            watch.write_behaviour(algorithm=settings.algorithm, reward=opened, inputs=inputs, held_out=rows)
            summary = run_summary(settings, metrics, len(comparisons), opened, end.reason, rows)
            write_json(path / SUMMARY, summary)
            return summary

        return PpoResult(path, end.step, path / MODEL, on_first_process(sum_up))


def _check_wanted(out: Path, wandb: str | None) -> None:
    refuse_file(out)
    read_ppo_run(out)
    if wandb is not None:
        check_wandb(f"log.wandb={wandb}")


def _say_reward(loop: StepLoop, reward: Reward, comparisons: Sequence[Comparison], *, offline: bool) -> None:
    read = "texts for watch.data" if offline else "rollouts"
    loop.say(f"reward: {reward.name}, which reads the {read} as text")
    if unknown := reward.unknown(comparisons):
        loop.say(
            f"reward: knows nothing of {len(unknown)} users, who are scored as anybody: {listed(sorted(unknown))}"
        )


def _prepared(
    learner: Learner, comparisons: Sequence[Comparison]
) -> tuple[list[Tree] | None, Sampler | None, list[tuple[int, int, int]], int]:
    """Labelled trees or a sampler, (p, K, R) of every tree, and R."""
    settings, policy = learner.settings, learner.policy
    multiple = shape_options(learner.actor.config, learner.mesh).multiple
    if settings.algorithm in LABELLED:
        encode = encode_pairs if settings.algorithm == "dpo" else encode_preferred
        trees = encode(
            comparisons, policy, profile_posts=settings.profile_posts, max_length=settings.max_length
        )
        return trees, None, [tree.shape for tree in trees], round_up(int(lengths_of(trees).max()), multiple)
    options = settings.rollout
    room = policy.limit(Sampler.options_of(options), settings.max_length)
    prompts = policy.encode(comparisons, profile_posts=settings.profile_posts, limit=room)
    sampler = Sampler(policy, policy.program, prompts, options, per_step=settings.batch.prompts)
    columns = round_up(options.max_new_tokens, multiple)
    return None, sampler, [(len(prompt.ids), options.n, columns) for prompt in prompts], columns


def _shapes(learner: Learner, order: Order, lengths: Sequence[tuple[int, int, int]]) -> Shapes:
    settings, batch = learner.settings, learner.settings.batch
    options = shape_options(learner.actor.config, learner.mesh)
    # A backward pass holds the activations of all layers: less at a time than in scoring.
    tokens = options.tokens_per_batch // 2 if batch.tokens is None else batch.tokens * options.divisor
    parts = batch.prompts // (batch.minibatch or batch.prompts)
    steps = range(min(_STEPS_SIMULATED, settings.steps))
    return choose_shapes(
        lengths,
        options=replace(
            options, tokens_per_batch=tokens, max_buckets=batch.max_buckets, batch_cost=_BATCH_COST
        ),
        together=[part for step in steps for part in np.split(order.step(step), parts)],
        fill=True,
    )


def _read_data(settings: PpoSettings, data: Records | None) -> TrainingData:
    """The comparisons, of sources with splits those of "train"."""
    read = TrainSettings(
        data=settings.data,
        subset=settings.subset,
        limit=settings.limit,
        validation=ValidationSettings(fraction=0.0),
    )
    return read_training_data(read, data=data)
