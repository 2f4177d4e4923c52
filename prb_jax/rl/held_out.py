"""What a policy writes in the end for prompts that it did not train on, as of new people, and how gold likes it.

``held_out.jsonl`` has a row for each text: gold and, where the run has one, reward beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.writing import json_line, whole_file, writing
from prb_jax.errors import RunError, quote
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.processes.sharing import process_index
from prb_jax.rl.learner import Learner
from prb_jax.rl.rewards import Reward
from prb_jax.rl.rollouts import Sampler
from prb_jax.runs.behaviour import cluster_of

HELD_OUT = "held_out.jsonl"

Rows = list[dict[str, Any]]


def check_held_out(held_out: Sequence[Comparison], trained: Sequence[Comparison]) -> None:
    """Raise RunError for a comparison that is trained on, too."""
    known = {comparison.id for comparison in trained}
    for comparison in held_out:
        if comparison.id in known:
            raise RunError(
                f"config key 'watch.data': comparison {quote(comparison.id)} is in the training data too; expected "
                "prompts that the policy does not train on"
            )


def write_held_out(
    out: Path, learner: Learner, comparisons: Sequence[Comparison], *, reward: Reward | None, gold: Reward
) -> Rows:
    """Draw `rollout.n` texts for each prompt with the weights of now, and write and return them with their scores.

    A collective. The draws depend on the weights, the prompts and the seed alone.

    Raises:
      RunError: a reward fails, or the file cannot be written.
    """
    settings, policy = learner.settings, learner.policy
    options, together = settings.rollout, settings.batch.prompts
    room = policy.limit(Sampler.options_of(options), settings.max_length)
    prompts = policy.encode(comparisons, profile_posts=settings.profile_posts, limit=room)
    sampler = Sampler(policy, policy.program, prompts, options, per_step=together)
    measured = {"gold": gold} if reward is None else {"reward": reward, "gold": gold}
    rows: Rows = []
    for start in range(0, len(prompts), together):
        members = range(start, min(start + together, len(prompts)))
        # Steps of training count from 0, so that no draw of theirs has this number.
        drawn = sampler.draw(
            learner.params(),
            members,
            seed=settings.seed,
            step=settings.steps + start,
            columns=options.max_new_tokens,
        )
        asked = [comparisons[member] for member in members]
        scores = {
            name: scorer.score(asked, drawn.texts, step=settings.steps).values.astype(np.float64)
            for name, scorer in measured.items()
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
        path = out / HELD_OUT
        with writing(path), whole_file(path) as file:
            file.writelines(map(json_line, rows))
    return rows


def held_out_parts(rows: Rows) -> Mapping[str, Rows]:
    """Return all rows as "held out", and those of each subset by its name where there are several."""
    subsets = dict.fromkeys(row["subset"] for row in rows)
    parts = {"held out": rows}
    if len(subsets) > 1:
        parts |= {name or "no subset": [row for row in rows if row["subset"] == name] for name in subsets}
    return parts


def held_out_summary(rows: Rows) -> dict[str, Any]:
    """Return gold and any reward of each part with 95 % t intervals over users, JSON-ready."""
    summary = {}
    for part, part_rows in held_out_parts(rows).items():
        clusters = [cluster_of(row["user_id"], row["id"]) for row in part_rows]
        names = [name for name in ("reward", "gold") if name in part_rows[0]]
        values = {name: np.asarray([row[name] for row in part_rows]) for name in names}
        summary[part] = {"texts": len(part_rows), "users": len(set(clusters))} | {
            name: {"value": float(column.mean()), **mean_interval(column, clusters).to_json()}
            for name, column in values.items()
        }
    return summary
