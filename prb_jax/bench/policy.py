"""`prb bench ppo`: how fast a policy is trained on this machine, beside TRL's GRPOTrainer.

Ours is `prb ppo` itself, all weights trained by GRPO with the KL in the loss. A step is a rollout (drawing the texts)
and an update: everything else, the reference, the backward pass and AdamW included. The reward costs nothing: the
length of the text.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.bench.table import shown
from prb_jax.bench.workload import KL_COEFFICIENT, LEARNING_RATE
from prb_jax.data.comparison import Comparison
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_language_model
from prb_jax.rl.ppo import ppo
from prb_jax.rl.sections import KlSettings, RolloutBatchSettings, RolloutSettings, UpdateSettings
from prb_jax.rl.settings import PpoSettings
from prb_jax.training.settings import LogSettings
from prb_jax.trees.tree import ScoredBatch, Truncation


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Training of a policy in one dtype. Seconds are medians over steps; ratios are medians of ratios, side by side."""

    dtype: str = field(metadata=shown("dtype", meaning="of both sides"))
    prompts: int = field(metadata=shown("prompts x rollouts", "{v} x {r.samples}", "of a step"))
    samples: int
    new_tokens: int
    prompt_tokens: float = field(metadata=shown("prompt tokens", "{v:,.0f}", "mean"))
    length: float = field(
        metadata=shown("rollout tokens", "{v:,.1f} of {r.new_tokens:,}", "mean; a rollout may end by itself")
    )
    rollout_seconds: float = field(metadata=shown("rollout s", "{v:.2f}", "of a step"))
    update_seconds: float = field(metadata=shown("update s", "{v:.2f}", "of a step"))
    compile_seconds: float = field(metadata=shown("compile s", "{v:.1f}", "of the first step beyond another"))
    against_length: float | None = field(default=None, metadata=shown("TRL rollout tokens", "{v:,.1f}"))
    against_rollout_seconds: float | None = field(default=None, metadata=shown("TRL rollout s", "{v:.2f}"))
    against_update_seconds: float | None = field(default=None, metadata=shown("TRL update s", "{v:.2f}"))
    speedup: float | None = field(default=None, metadata=shown("speed-up", "{v:.2f}x"))
    rollout_speedup: float | None = field(default=None, metadata=shown("  of the rollout", "{v:.2f}x"))
    update_speedup: float | None = field(default=None, metadata=shown("  of the update", "{v:.2f}x"))


@dataclass(frozen=True)
class _Length:
    """The reward. It is asked once a step, and then the rival makes a step too, so that both meet the same machine."""

    between: Callable[[], None]

    def identity(self) -> Mapping[str, Any]:
        return {"name": "length of the text"}

    def stream(self, comparisons: Sequence[Comparison], **_: Any) -> Iterator[ScoredBatch]:
        self.between()
        for place, comparison in enumerate(comparisons):
            scores = np.asarray([len(text) for text in comparison.responses], np.float32)
            yield ScoredBatch([place], [scores], [0], [Truncation()])


def bench_policy(
    model: str,
    *,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    against: str | None,
    against_rows: int | None,
    mesh: str | None,
    dtype: str | None,
    attention: str = "auto",
) -> PolicyResult:
    """Time steps of ours and, where asked for, of TRL, in turn.

    The arguments are the options of `prb bench ppo`, whose help explains them.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: fewer than two samples, or more tokens than the context.
      RunError: torch or TRL is not installed.
    """
    opened = open_language_model(model, LoadOptions(mesh=mesh, dtype=dtype, attention=attention))
    chosen = opened.dtype
    settings = PpoSettings(
        model=model,
        algorithm="grpo",
        tuning="full",
        steps=rounds + 1,
        dtype=chosen,  # pyright: ignore[reportArgumentType] - checked when it was opened
        mesh=mesh,
        attention=attention,  # pyright: ignore[reportArgumentType]
        profile_posts=0,
        kl=KlSettings(place="loss", estimator="k3", coefficient=KL_COEFFICIENT),
        rollout=RolloutSettings(n=samples, max_new_tokens=new_tokens),
        batch=RolloutBatchSettings(prompts=prompts),
        optimizer=UpdateSettings(learning_rate=LEARNING_RATE),
        log=LogSettings(tensorboard=False, plot=False),
    )
    texts = random_texts(opened.chat().tokenizer, count=prompts, tokens=prompt_tokens)
    rival, steps = None, []
    if against:
        from prb_jax.bench.rivals.trl import TrlPolicyTrainer

        rival = TrlPolicyTrainer(
            model, texts, samples=samples, new_tokens=new_tokens, dtype=chosen, rows=against_rows
        )
    reward = _Length(lambda: None if rival is None else steps.append(rival.run()))
    data = [
        Comparison(id=str(k), question=text, responses=["a", "b"], labels=[1.0, 0.0])
        for k, text in enumerate(texts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        ppo(settings, out=folder, data=data, reward=reward, progress=False)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    first, *rows = map(json.loads, lines)
    whole = [row["rollout_seconds"] + row["update_seconds"] for row in rows]
    result: dict[str, Any] = {
        "dtype": chosen,
        "prompts": prompts,
        "samples": samples,
        "new_tokens": new_tokens,
        "prompt_tokens": float(np.mean([len(ids) for ids in _prompt_ids(opened.chat().tokenizer, texts)])),
        "length": float(np.mean([row["length"] for row in rows])),
        "rollout_seconds": statistics.median(row["rollout_seconds"] for row in rows),
        "update_seconds": statistics.median(row["update_seconds"] for row in rows),
        "compile_seconds": max(
            0.0, first["rollout_seconds"] + first["update_seconds"] - statistics.median(whole)
        ),
    }
    if rival is not None:
        theirs = steps[1:]
        result |= {
            "against_length": float(np.mean([step.length for step in theirs])),
            "against_rollout_seconds": statistics.median(step.rollout_seconds for step in theirs),
            "against_update_seconds": statistics.median(step.update_seconds for step in theirs),
            "speedup": _ratio([step.rollout_seconds + step.update_seconds for step in theirs], whole),
            "rollout_speedup": _ratio(
                [step.rollout_seconds for step in theirs], [row["rollout_seconds"] for row in rows]
            ),
            "update_speedup": _ratio(
                [step.update_seconds for step in theirs], [row["update_seconds"] for row in rows]
            ),
        }
    return PolicyResult(**result)


def random_texts(tokenizer: Any, *, count: int, tokens: int) -> list[str]:
    """Return texts of about so many tokens, of words that are tokens of the tokenizer.

    Args:
      tokenizer: of transformers.
      count: of texts.
      tokens: of each, about.
    """
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha())
    random = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(random.choice(words, length))

    for_each = len(tokenizer(text(1000), add_special_tokens=False)["input_ids"]) / 1000
    return [text(max(1, round(tokens / for_each))) for _ in range(count)]


def _prompt_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(other / own for other, own in zip(theirs, ours, strict=True))
