"""`prb ppo`: train a policy with a reward, and save it as a model; resumable.

In addition to the files of every training run (:mod:`prb_jax.training.record`), its folder has

``rollouts.jsonl``  some rollouts of some steps.
``gold.jsonl``      gold and reward, if a second reward is measured; ``overoptimisation.png`` plots them, and
                    ``behaviour.json`` has the final gold for `prb correlate`.
``adapter/``        with LoRA, the policy in PEFT's format.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from prb_jax.behaviour.rl.credit import credit
from prb_jax.behaviour.rl.learner import Learner
from prb_jax.behaviour.rl.numbers import adapted_coefficient
from prb_jax.behaviour.rl.rewards import Reward, check_scoring, open_reward
from prb_jax.behaviour.rl.rollouts import Rollouts, Sampler
from prb_jax.behaviour.rl.settings import PpoSettings, load_ppo_settings
from prb_jax.errors import listed
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records
from prb_jax.runs.training import MODEL, POLICY_RUN, ROLLOUTS
from prb_jax.scoring.inputs import Inputs, read_inputs
from prb_jax.scoring.open_scorer import Model
from prb_jax.seams import get
from prb_jax.training.data import Examples, Order, read_examples
from prb_jax.training.logs import StepFile
from prb_jax.training.loop import Loop, TrainResult, open_loop, write_summary
from prb_jax.training.record import (
    check_start,
    computing_versions,
    open_run,
    session_on,
    settings_with,
)
from prb_jax.trees.tree import Tree

if TYPE_CHECKING:
    from prb_jax.behaviour.rl.watch import GoldWatch

ADAPTER = "adapter"

_SUMMED_UP = (
    "reward", "score", "kl", "entropy", "clip_share", "length", "ended_share", "explained_variance", "loss", "accuracy",
    "margin",
)  # fmt: skip

_DEFINITIONS = {
    "reward": "mean scaled score of a rollout under the reward",
    "score": "mean of the same after the rules for rollouts that are cut or long",
    "kl": "mean over rollouts of the sum of log p(policy) - log p(reference), at the temperature of the rollouts",
    "entropy": "mean over tokens of the entropy of their distribution, in nats",
    "clip_share": "share of tokens whose gradient the clip removes",
    "old_kl": "mean over tokens and updates of log p(when drawn) - log p(now)",
    "explained_variance": "1 - var(returns - values) / var(returns)",
    "equal_groups": "prompts whose rollouts all have the same score, from which group advantages learn nothing",
    "gold": "mean score of the second reward, which is not trained on",
    "distinct_1": "share of different words among all words of a step's rollouts; distinct_2: the same for word pairs",
    "held_out": "means over the trained policy's texts for watch.data: all, and by subset; 95 % t intervals over users",
    "ended_share": "share of rollouts that end with a stop token",
    "sampler_difference": "largest difference of a token's log-probability between the sampler and the training pass",
}


class PpoResult(TrainResult):
    """The result of `ppo`; its `model` is the policy."""


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
    """Train a policy with a reward and write it to `out`; the same call resumes a killed run.

    Resuming raises an error if any setting that determines the result differs from the original run. The mesh, the
    devices, `batch.tokens`, and the saved and logged files may differ.

    Args:
      config: Config file, ConfigDict (`prb_jax.behaviour.rl.settings.default_config`), mapping, or settings.
      out: Run folder.
      data: Records, instead of the config's `data`, which names files and data sets.
      reward: Loaded model, or a function that returns K numbers for a comparison of K rollouts, instead of the config's
        `reward`, which names one.
      gold: Second reward, instead of the config's `watch.gold`: it is measured and never trained on.
      overrides: `key=value` strings, as on the command line.
      progress: Show progress on standard error.

    Raises:
      RunError: the config is invalid; `out` cannot be used, is full, or holds another run; the reward fails (names the
        comparison); the loss is not finite.
      DataError: the data cannot be used.
      CheckpointError, MeshError: a model cannot be loaded.
    """
    # Settings, data and models.
    path, objects = Path(out), {"data": data, "reward": reward, "watch.gold": gold}
    given = [key for key, value in objects.items() if value is not None]
    settings = load_ppo_settings(config, overrides, given=given)
    check_start(POLICY_RUN, path, settings)
    read = read_examples(settings.data, "data", subset=settings.subset, limit=settings.limit, given=data)
    comparisons = list(read.comparisons)
    settings = settings.with_steps(len(comparisons))
    held_out = None if settings.watch.data is None else read_inputs(settings.watch.data.split(","))
    if held_out is not None:
        get("policies", "check held-out").value(held_out.comparisons, comparisons)
    learner = Learner(settings)
    wanted = {
        "reward": settings.reward if reward is None else reward,
        "gold": settings.watch.gold if gold is None else gold,
    }
    rewards = {
        name: open_reward(settings, model, out=path, trains=name == "reward")
        for name, model in wanted.items()
        if model is not None
    }
    opened, measured = rewards.get("reward"), rewards.get("gold")
    check_scoring(settings.scoring, list(rewards.values()))
    inputs = _inputs(settings, read, learner, rewards, held_out)
    notes = {"model": learner.start.name, "reward": None if opened is None else opened.name}
    with contextlib.ExitStack() as stack:
        session = session_on(learner.mesh, settings, learner.actor.config)
        folder = open_run(POLICY_RUN, path, inputs=inputs, session=session, notes=notes)
        summary = stack.enter_context(folder)
        if summary is not None:
            return PpoResult(path, int(summary["steps"]), path / MODEL, summary)

        # Inputs of a step: labelled responses of the data, or rollouts.
        order = Order(len(comparisons), settings.batch.prompts, settings.seed)
        encode, labelled, sampler = learner.objective.encode, list[Tree](), None
        if encode is not None:
            posts, longest = settings.profile_posts, settings.max_length
            labelled += encode(comparisons, learner.policy, profile_posts=posts, max_length=longest)
        else:
            sampler = Sampler(learner.policy, comparisons, settings)
        learner.plan(sampler.longest() if sampler else labelled, order)
        columns = settings.rollout.max_new_tokens if sampler else max(tree.shape[2] for tree in labelled)

        # The loop: see `learn_from_rollouts` for the phases of a step.
        loop = stack.enter_context(open_loop(path, learner, progress=progress))
        watch: GoldWatch | None = None
        if (watched := measured if sampler else None) is not None or held_out is not None:
            watch = get("policies", "watch").value(
                path, step=loop.step, settings=settings.watch, gold=watched
            )
        kept = None if loop.log is None else StepFile(path / ROLLOUTS, step=loop.step)
        loop.files += [rows for rows in (kept, watch and watch.rows) if rows is not None]
        if opened is not None:
            loop.say(
                f"reward: {opened.name}, which reads the {'rollouts' if sampler else 'texts for watch.data'} as text"
            )
            if unknown := opened.unknown(comparisons):
                names = listed(sorted(unknown))
                loop.say(
                    f"reward: has no data about {len(unknown)} users, who are scored as unknown users: {names}"
                )
        loop.facts = {"kl_coefficient": float(loop.facts.get("kl_coefficient", settings.kl.coefficient))}
        loop.reason = _reason_to_stop(loop, settings)
        for step in loop.steps():
            members = order.step(step).tolist()
            asked = [comparisons[member] for member in members]
            if sampler is None:
                batch = Rollouts([labelled[member] for member in members], columns)
                row = learn_from_labels(loop, learner, batch, asked)
            else:
                assert opened is not None
                row = learn_from_rollouts(
                    loop, learner, members, asked, sampler=sampler, reward=opened, watch=watch, kept=kept
                )
            loop.report({"step": step + 1, "epoch": order.epoch_of(step + 1), **row})
            loop.reason = _reason_to_stop(loop, settings)
        if loop.stopped_by is not None:
            return PpoResult(path, loop.step, stopped_by=loop.stopped_by)
        if loop.reason is not None:
            loop.say(f"ended at step {loop.step} of {settings.steps}: {loop.reason}")

        # Export the policy, and write the texts that evaluate it.
        there = on_first_process(lambda: [(path / name).exists() for name in (MODEL, ADAPTER)])
        if not there[0]:
            learner.export(path / MODEL)
        if settings.tuning == "lora" and not there[1]:
            learner.export_adapter(path / ADAPTER)
        if watch is not None and held_out is not None and measured is not None:
            watch.write_held_out(learner, held_out.comparisons, rewards)

        def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            if watch is not None:
                watch.finish(inputs, algorithm=settings.algorithm, reward=opened, plot=settings.log.plot)
            return {
                "algorithm": settings.algorithm,
                "reward": None if opened is None else opened.name,
                "steps": len(rows),
                **({} if loop.reason is None else {"ended_by_watch": loop.reason}),
                "prompts": len(comparisons),
                "prompts_seen": len(rows) * settings.batch.prompts,
                "tokens_seen": int(sum(row["tokens"] for row in rows)),
                "first": _means(rows[:1]),
                "last_tenth": _means(rows[-max(1, len(rows) // 10) :]),
                **(watch.summary() if watch is not None else {}),
                "definitions": _DEFINITIONS,
            }

        return PpoResult(path, loop.step, path / MODEL, write_summary(loop, POLICY_RUN, summarise))


def learn_from_rollouts(
    loop: Loop,
    learner: Learner,
    members: Sequence[int],
    asked: Sequence[Comparison],
    *,
    sampler: Sampler,
    reward: Reward,
    watch: GoldWatch | None,
    kept: StepFile | None,
) -> dict[str, float]:
    """Make one step of a policy in named phases, and return its numbers. One batch goes through all of them.

    Args:
      loop: The run; its facts contain the coefficient of the KL.
      learner: Policy, value function and reference.
      members: Numbers of the prompts.
      asked: Comparisons with these prompts.
      sampler: Draws the rollouts.
      reward: Scores the rollouts.
      watch: Measures gold, if due; None without gold.
      kept: File of some rollouts of some steps.
    """
    settings, number, coefficient = learner.settings, loop.step + 1, loop.facts["kl_coefficient"]
    times = [time.perf_counter()]
    # Draw: prompts gain texts.
    columns = settings.rollout.max_new_tokens
    batch = sampler.draw(learner.params(), members, step=loop.step, columns=columns)
    times.append(time.perf_counter())
    # Score: texts gain rewards.
    scored = reward.score(asked, batch.texts, step=number)
    times.append(time.perf_counter())
    # Look: tokens gain log-probabilities, also under the reference, and values. The policy's may wait for the update.
    batch = learner.look(replace(batch, scores=scored.values))
    # Credit: tokens gain advantages.
    arrays = (batch.scores, batch.ended, batch.lengths, batch.logprobs, batch.reference, batch.values)
    credited = credit(*map(jnp.asarray, arrays), jnp.float32(coefficient), settings=settings)
    batch = replace(batch, credit=credited, kl=0.0 if settings.kl_in_reward else coefficient)
    # Update.
    updates, batch = update(loop, learner, batch, asked)
    times.append(time.perf_counter())
    # Record.
    if kept is not None and (number == 1 or number % settings.rollouts_every == 0):
        kept.write(*batch.rows(number, asked, settings.rollout.keep))
    tokens = int(batch.mask.sum())
    row = {
        **updates,
        **{name: float(np.asarray(value)) for name, value in credited.numbers.items()},
        **batch.kl_numbers(),
        "kl_coefficient": coefficient,
        "empty": scored.empty,
        "failed": scored.failed,
        "sampler_difference": float(np.abs((batch.logprobs - batch.sampled) * batch.mask).max()),
        "tokens": tokens,
        "rollout_seconds": times[1] - times[0],
        "reward_seconds": times[2] - times[1],
        "update_seconds": times[3] - times[2],
        **loop.rates(tokens=tokens),
    }
    row |= batch.distinct_words()
    if watch is not None:
        row |= watch.measure(number, asked, batch, kl=row["kl"])
    if settings.kl.target is not None:
        loop.facts = {
            "kl_coefficient": adapted_coefficient(
                coefficient,
                kl=row["kl"],
                target=settings.kl.target,
                horizon=settings.kl.horizon,
                samples=len(members) * settings.rollout.n,
            )
        }
    return row


def learn_from_labels(
    loop: Loop, learner: Learner, batch: Rollouts, asked: Sequence[Comparison]
) -> dict[str, float]:
    """Make one step of a policy from labelled responses (`dpo.py`, `sft.py`), and return its numbers."""
    start = time.perf_counter()
    if learner.objective.has_reference:
        batch = learner.look(batch)
    updates, _ = update(loop, learner, batch, asked)
    tokens, seconds = sum(tree.tokens for tree in batch.trees), time.perf_counter() - start
    return {**updates, "tokens": tokens, "update_seconds": seconds, **loop.rates(tokens=tokens)}


def update(
    loop: Loop, learner: Learner, batch: Rollouts, asked: Sequence[Comparison]
) -> tuple[dict[str, float], Rollouts]:
    """Make the updates of a step; return the means of their numbers, and the batch with all log-probabilities.

    Raises:
      RunError: a loss is not finite; names the comparisons.
    """
    made: list[dict[str, float]] = []
    for rows, metrics, logprobs in learner.updates(batch, step=loop.step):
        remedy = "A lower optimizer.learning_rate or dtype=float32 may help"
        loop.check_finite(metrics, [asked[row].id for row in rows], step=loop.step + 1, remedy=remedy)
        made.append(metrics)
        if logprobs is not None:
            batch = replace(batch, logprobs=logprobs)
    means = {name: float(np.mean([metrics[name] for metrics in made])) for name in made[0]}
    return {**means, "learning_rate": made[-1]["learning_rate"]}, batch


def _reason_to_stop(loop: Loop, settings: PpoSettings) -> str | None:
    """Return why the run ends here, or None; collective if the settings define a stopping rule."""
    if settings.watch.most_kl is None and settings.watch.window is None:
        return None
    rows = [] if loop.log is None else loop.log.rows
    reason_to_stop = get("policies", "reason to stop").value
    return on_first_process(lambda: reason_to_stop(rows, settings.watch))


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in _SUMMED_UP if name in rows[0]]
    return {name: float(np.mean([row[name] for row in rows])) for name in names}


def _inputs(
    settings: PpoSettings,
    data: Examples,
    learner: Learner,
    rewards: Mapping[str, Reward],
    held_out: Inputs | None,
) -> dict[str, Any]:
    """Return everything that determines the result, JSON-ready."""
    chosen = settings_with(settings, "result") | {
        "kl.place": "reward" if settings.kl_in_reward else "loss",
        "kl.estimator": settings.kl_estimator,
        "scoring.no_end_value": settings.scoring.value_of_no_end,
    }
    return {
        "settings": chosen,
        "model": dict(learner.start.identity),
        **{name: rewards[name].identity() if name in rewards else None for name in ("reward", "gold")},
        "data": {"sources": {"data": data.sources}, "train": len(data)},
        **({} if held_out is None else {"held_out": held_out.to_json()}),
        "versions": computing_versions(),
    }
