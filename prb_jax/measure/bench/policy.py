"""`prb bench ppo`: how fast a policy is trained on this machine, compared with TRL's GRPOTrainer.

Our side is `prb ppo` itself, training all weights by GRPO with the KL in the loss. A step is a rollout (drawing the
texts) and an update: everything else, including reference, backward pass and AdamW. The reward costs nothing: the
length of the text.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.behaviour.rl.ppo import ppo
from prb_jax.behaviour.rl.sections import KlSettings, RolloutBatchSettings, RolloutSettings, UpdateSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.measure.bench.figures import Figures, median_ratio
from prb_jax.measure.bench.models import random_texts
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.workload import KL_COEFFICIENT, LEARNING_RATE
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison
from prb_jax.training.config import LogSettings
from prb_jax.trees.tree import ScoredBatch, Truncation

_PARTS = ("rollout_seconds", "update_seconds")


@dataclass(frozen=True)
class _Length:
    """The reward. It is called once per step, and the rival also runs a step then: both see the same machine load."""

    between: Callable[[], None]

    def identity(self) -> Mapping[str, Any]:
        return {"name": "length of the text"}

    def stream(self, comparisons: Sequence[Comparison], **_: Any) -> Iterator[ScoredBatch]:
        self.between()
        for place, comparison in enumerate(comparisons):
            scores = np.asarray([len(text) for text in comparison.responses], np.float32)
            yield ScoredBatch([place], [scores], [0], [Truncation()])


def bench_policy(options: BenchOptions) -> Figures:
    """Time steps of ours and, on request, of TRL, alternating.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: fewer than two samples, or more tokens than the context.
      RunError: torch or TRL is not installed.
    """
    loading = LoadOptions(mesh=options.mesh, dtype=options.dtype, attention=options.attention)
    opened = open_language_model(options.model, loading)
    chosen, tokenizer, samples = opened.dtype, opened.chat().tokenizer, options.samples
    settings = PpoSettings(
        model=options.model,
        algorithm="grpo",
        tuning="full",
        steps=options.rounds + 1,
        dtype=chosen,  # pyright: ignore[reportArgumentType] - checked on opening
        mesh=options.mesh,
        attention=options.attention,  # pyright: ignore[reportArgumentType]
        profile_posts=0,
        kl=KlSettings(place="loss", estimator="k3", coefficient=KL_COEFFICIENT),
        rollout=RolloutSettings(n=samples, max_new_tokens=options.new_tokens),
        batch=RolloutBatchSettings(prompts=options.prompts),
        optimizer=UpdateSettings(learning_rate=LEARNING_RATE),
        log=LogSettings(tensorboard=False, plot=False),
    )
    texts = random_texts(tokenizer, count=options.prompts, tokens=options.prompt_tokens)
    rival, steps = None, []
    if options.against:
        from prb_jax.measure.bench.rivals.trl import TrlPolicyTrainer

        rival = TrlPolicyTrainer(texts, options, dtype=chosen)
    reward = _Length(lambda: None if rival is None else steps.append(rival.run()))
    sides: Any = {"responses": ["a", "b"], "labels": [1.0, 0.0]}
    data = [Comparison(id=str(k), question=text, **sides) for k, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        ppo(settings, out=folder, data=data, reward=reward, progress=False)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    first, *rows = map(json.loads, lines)
    ours = _seconds(rows)
    theirs = _seconds([vars(step) for step in steps[1:]]) if steps else {}
    middle = {name: statistics.median(seconds) for name, seconds in ours.items()}
    beside = {name: statistics.median(seconds) for name, seconds in theirs.items()}
    speed = {name: median_ratio(seconds, ours[name]) for name, seconds in theirs.items()}
    length = float(np.mean([row["length"] for row in rows]))
    against_length = float(np.mean([step.length for step in steps[1:]])) if steps else None
    as_prompt: Any = {"add_generation_prompt": True, "return_dict": False}
    messages = [[{"role": "user", "content": text}] for text in texts]
    sizes = [len(tokenizer.apply_chat_template(message, **as_prompt)) for message in messages]
    figures = Figures()
    add = figures.add
    add("dtype", chosen, "dtype")
    add("prompts", options.prompts, "prompts x rollouts", f"{options.prompts} x {samples}")
    add("samples", samples)
    add("new_tokens", options.new_tokens)
    add("prompt_tokens", float(np.mean(sizes)), "prompt tokens", "{:,.0f}")
    add("length", length, "rollout tokens", f"{{:,.1f}} of {options.new_tokens:,}")  # a rollout may end early
    add("rollout_seconds", middle["rollout_seconds"], "rollout s", "{:.2f}")
    add("update_seconds", middle["update_seconds"], "update s", "{:.2f}")
    compiling = max(0.0, sum(first[name] for name in _PARTS) - middle["step"])
    add("compile_seconds", compiling, "compile s", "{:.1f}")
    add("against_length", against_length, "TRL rollout tokens", "{:,.1f}")
    add("against_rollout_seconds", beside.get("rollout_seconds"), "TRL rollout s", "{:.2f}")
    add("against_update_seconds", beside.get("update_seconds"), "TRL update s", "{:.2f}")
    add("speedup", speed.get("step"), "speed-up", "{:.2f}x")
    add("rollout_speedup", speed.get("rollout_seconds"), "  of the rollout", "{:.2f}x")
    add("update_speedup", speed.get("update_seconds"), "  of the update", "{:.2f}x")
    return figures


def _seconds(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of rollouts, of updates and of whole steps."""
    parts = {name: [step[name] for step in steps] for name in _PARTS}
    return {**parts, "step": [sum(step[name] for name in _PARTS) for step in steps]}
