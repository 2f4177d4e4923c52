"""Detect a policy that exploits a weakness of its reward: measure gold and reward, and decide when to stop.

``gold.jsonl`` has one row for each measurement: reward and gold of the step's rollouts with intervals over users, their
KL, the share of distinct words and word pairs, and the sum and count of each user's gold. ``overoptimisation.png``
plots reward and gold against the square root of the KL, as in Gao et al. 2023 (2210.10760). ``behaviour.json`` has the
gold of the last tenth of the measurements and of held-out prompts, for `prb correlate`. ``held_out.jsonl`` has a row
for each text that the final policy writes for prompts outside its training data, e.g. of new people: gold and, if the
run has one, reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.behaviour.rl.learner import Learner
from prb_jax.behaviour.rl.rewards import Reward
from prb_jax.behaviour.rl.rollouts import Rollouts, Sampler
from prb_jax.behaviour.rl.sections import LABELLED, WatchSettings
from prb_jax.errors import RunError, quote
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.platform.extras import has_extra
from prb_jax.platform.processes.sharing import process_index
from prb_jax.records.comparison import Comparison
from prb_jax.records.writing import json_line, whole_file, writing
from prb_jax.runs.behaviour import REPETITION, Figure, cluster_of, figure_of, pool, write_behaviour
from prb_jax.training.logs import StepFile

GOLD = "gold.jsonl"
PICTURE = "overoptimisation.png"
HELD_OUT = "held_out.jsonl"

Rows = list[dict[str, Any]]


class GoldWatch:
    """Measures gold on rollouts. With several processes, only the first one writes.

    Args:
      out: Run folder.
      step: Number of completed steps: later measurements are dropped, and made again.
      settings: Interval of measurements and stopping rules.
      gold: Second reward for rollouts; None if only the KL is watched, or nothing is drawn.

    Attributes:
      rows: Measurements, in the first process of a run with gold.
      texts: Rows of the texts for held-out prompts, once they are written.
    """

    def __init__(self, out: Path, *, step: int, settings: WatchSettings, gold: Reward | None) -> None:
        self.out, self.settings, self.gold = out, settings, gold
        self.texts: Rows = []
        self.rows = StepFile(out / GOLD, step=step) if gold is not None and process_index() == 0 else None

    def measure(
        self, step: int, comparisons: Sequence[Comparison], batch: Rollouts, *, kl: float
    ) -> dict[str, float]:
        """Return the gold of a step, counted from 1, for `metrics.jsonl`; nothing if it is not due.

        `kl` is the mean KL of a rollout.
        """
        if self.gold is None or step % self.settings.every:
            return {}
        gold = self.gold.score(comparisons, batch.texts, step=step).values
        users = [comparison.user_id for comparison in comparisons]
        by_user: dict[str, list[float]] = {}
        for comparison, values in zip(comparisons, gold.astype(np.float64), strict=True):
            by_user.setdefault(cluster_of(comparison.user_id, comparison.id), []).extend(values.tolist())
        row = {
            "step": step,
            "kl": kl,
            "reward": float(batch.scores.mean()),
            **mean_interval(batch.scores.mean(axis=1), users).to_json("reward_ci95"),
            "gold": float(gold.mean()),
            **mean_interval(gold.mean(axis=1), users).to_json("gold_ci95"),
            **batch.distinct_words(),
            "gold_by_user": {user: [math.fsum(golds), len(golds)] for user, golds in by_user.items()},
        }
        if self.rows is not None:
            self.rows.write(row)
        return {"gold": row["gold"]}

    def finish(
        self,
        inputs: Mapping[str, Any],
        *,
        algorithm: str,
        reward: Reward | None,
        plot: bool,
    ) -> None:
        """Write `behaviour.json`: the gold of the last tenth of the measurements, and of the held-out prompts.

        Runs that differ only in their seed are repetitions of one figure.

        Args:
          inputs: Inputs of the run: everything that determines the figure.
          algorithm: Algorithm of the run.
          reward: Reward that trained the policy; None for dpo and sft, which use the labels of the data instead.
          plot: Draws `overoptimisation.png`, if gold was measured.

        Raises:
          RunError: a file cannot be written.
        """
        gold = [] if self.rows is None else self.rows.rows
        if plot and gold and has_extra("report", PICTURE):
            draw_overoptimisation(self.out / PICTURE, gold)
        if not (gold or self.texts):
            return
        chosen = {name: value for name, value in inputs["settings"].items() if name != "seed"}
        # Pairs chosen by a reward (`prb distil`) differ with the reward, so they are not a setting of the comparison.
        chosen_by_reward = ("data",) if algorithm in LABELLED and reward is not None else ()
        left_out = ("reward", "versions", *chosen_by_reward)
        kept = {name: value for name, value in inputs.items() if name not in left_out}
        if reward is None:
            label = "labels of the data"
            identity = {"name": label, "data": inputs["data"]["sources"]}
        else:
            label, identity = reward.name, reward.model_identity()
        setting = {**kept, "settings": chosen, REPETITION: inputs["settings"]["seed"]}
        policy = inputs["model"].get("architecture")
        shared: dict[str, Any] = {"label": label, "setting": setting, "policy": policy}
        figures = []
        if gold:
            last = []
            for by_user in (row["gold_by_user"] for row in gold[-max(1, len(gold) // 10) :]):
                sums, counts = zip(*by_user.values(), strict=True)
                sizes = {"clusters": list(by_user), "sums": sums, "counts": counts}
                last.append(Figure(name=f"{algorithm} gold", reward_model=identity, **sizes, **shared))
            figures.append(replace(pool(last), setting=setting))
        for part, rows in _parts(self.texts).items():
            users = [cluster_of(row["user_id"], row["id"]) for row in rows]
            values, name = [row["gold"] for row in rows], f"{algorithm} gold, {part}"
            figures.append(figure_of(values, users, name=name, identity=identity, **shared))
        write_behaviour(self.out, figures)

    def write_held_out(
        self, learner: Learner, comparisons: Sequence[Comparison], rewards: Mapping[str, Reward]
    ) -> None:
        """Draw `rollout.n` texts for each held-out prompt with the current weights, and write them with their scores.

        A collective. The draws depend only on the weights, the prompts and the seed.

        Raises:
          RunError: a reward fails, or the file cannot be written.
        """
        settings, columns = learner.settings, learner.settings.rollout.max_new_tokens
        sampler, together = Sampler(learner.policy, comparisons, settings), settings.batch.prompts
        rows: Rows = []
        for start in range(0, len(comparisons), together):
            members = range(start, min(start + together, len(comparisons)))
            # Training steps are numbered below `settings.steps`, so these draws use new random numbers.
            drawn = sampler.draw(learner.params(), members, step=settings.steps + start, columns=columns)
            asked = [comparisons[member] for member in members]
            scores = {
                name: reward.score(asked, drawn.texts, step=settings.steps).values.astype(np.float64)
                for name, reward in rewards.items()
            }
            rows += [
                {
                    "id": comparison.id,
                    "user_id": comparison.user_id,
                    "subset": comparison.subset,
                    "rollout": k,
                    "text": text,
                    **{name: float(values[row, k]) for name, values in scores.items()},
                }
                for row, comparison in enumerate(asked)
                for k, text in enumerate(drawn.texts[row])
            ]
        if process_index() == 0:
            path = self.out / HELD_OUT
            with writing(path), whole_file(path) as file:
                file.writelines(map(json_line, rows))
        self.texts = rows

    def summary(self) -> dict[str, Any]:
        """Return gold and any reward of the held-out texts, by part, with 95 % t intervals over users, JSON-ready."""
        return (
            {"held_out": {part: _figures(rows) for part, rows in _parts(self.texts).items()}}
            if self.texts
            else {}
        )


def reason_to_stop(rows: Sequence[Mapping[str, Any]], settings: WatchSettings) -> str | None:
    """Return why a run with these metrics of all steps so far ends; None if it continues."""
    if not rows:
        return None
    if settings.most_kl is not None and rows[-1]["kl"] > settings.most_kl:
        return f"the KL of a rollout, {rows[-1]['kl']:.4g}, is above watch.most_kl={settings.most_kl:g}"
    measured = [row for row in rows if "gold" in row]
    window = settings.window
    if window is None or len(measured) < 2 * window or "gold" not in rows[-1]:
        return None

    def means(name: str) -> tuple[float, float]:
        values = [row[name] for row in measured[-2 * window :]]
        return float(np.mean(values[:window])), float(np.mean(values[window:]))

    (reward, reward_now), (gold, gold_now) = means("reward"), means("gold")
    if gold_now < gold and reward_now > reward:
        return (
            f"gold fell from {gold:.4g} to {gold_now:.4g} while the reward rose from {reward:.4g} to {reward_now:.4g} "
            f"(means of {window} measurements)"
        )
    return None


def draw_overoptimisation(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw reward and gold, each minus its first value, against the square root of the KL; bands are 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axis = figure.subplots()
    order = sorted(rows, key=lambda row: row["kl"])
    roots = [max(row["kl"], 0.0) ** 0.5 for row in order]
    for name in ("reward", "gold"):
        first = rows[0][name]
        (drawn,) = axis.plot(
            roots, [row[name] - first for row in order], marker="o", markersize=3, label=name
        )
        bands = [row[f"{name}_ci95"] for row in order]
        if all(bands):
            low, high = ([band[end] - first for band in bands] for end in (0, 1))
            axis.fill_between(roots, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
    axis.set_xlabel("square root of the KL to the reference")
    axis.set_ylabel("difference to the first measurement")
    axis.grid(alpha=0.3)
    axis.legend()
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png", metadata={"Software": None})


def check_held_out(held_out: Sequence[Comparison], trained: Sequence[Comparison]) -> None:
    """Raise RunError if a held-out comparison is also in the training data."""
    known = {comparison.id for comparison in trained}
    for comparison in held_out:
        if comparison.id in known:
            raise RunError(
                f"config key 'watch.data': comparison {quote(comparison.id)} is in the training data too; expected "
                "prompts that the policy does not train on"
            )


def _parts(rows: Rows) -> dict[str, Rows]:
    """Return all rows as "held out", plus the rows of each subset by name if there are several; empty without rows."""
    subsets = dict.fromkeys(row["subset"] for row in rows)
    parts = {"held out": rows} if rows else {}
    if len(subsets) > 1:
        parts |= {name or "no subset": [row for row in rows if row["subset"] == name] for name in subsets}
    return parts


def _figures(rows: Rows) -> dict[str, Any]:
    clusters = [cluster_of(row["user_id"], row["id"]) for row in rows]
    values = {name: np.asarray([row[name] for row in rows]) for name in ("reward", "gold") if name in rows[0]}
    intervals = {
        name: {"value": float(column.mean()), **mean_interval(column, clusters).to_json()}
        for name, column in values.items()
    }
    return {"texts": len(rows), "users": len(set(clusters)), **intervals}
