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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.bench.workload import KL_COEFFICIENT, LEARNING_RATE
from prb_jax.data.comparison import Comparison
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_language_model
from prb_jax.reports.style import ResultsTable
from prb_jax.rl.ppo import ppo
from prb_jax.rl.sections import KlSettings, RolloutBatchSettings, RolloutSettings, UpdateSettings
from prb_jax.rl.settings import PpoSettings
from prb_jax.training.settings import LogSettings
from prb_jax.trees.batches import ScoredBatch
from prb_jax.trees.tree import Truncation


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """Training of a policy in one dtype. Seconds are medians over steps; ratios are medians of ratios, side by side.

    Attributes:
      dtype: of both sides.
      prompts, samples, new_tokens: of a step; samples of each prompt, of at most so many tokens.
      prompt_tokens: mean of a prompt.
      length: mean tokens of a rollout; a rollout may end by itself.
      rollout_seconds, update_seconds: of a step.
      compile_seconds: what the first step took beyond another.
      against_length, against_rollout_seconds, against_update_seconds: of TRL.
      speedup, rollout_speedup, update_speedup: how many times faster ours is, whole and by part.
    """

    dtype: str
    prompts: int
    samples: int
    new_tokens: int
    prompt_tokens: float
    length: float
    rollout_seconds: float
    update_seconds: float
    compile_seconds: float
    against_length: float | None = None
    against_rollout_seconds: float | None = None
    against_update_seconds: float | None = None
    speedup: float | None = None
    rollout_speedup: float | None = None
    update_speedup: float | None = None


@dataclass(frozen=True)
class _Length:
    """The reward. It is asked once a step, and then the rival makes a step too, so that both meet the same machine."""

    between: Callable[[], None]

    def identity(self) -> Mapping[str, Any]:
        return {"name": "length of the text"}

    def stream(self, comparisons: Sequence[Comparison], **_: Any) -> Iterator[ScoredBatch]:
        self.between()
        for place, each in enumerate(comparisons):
            scores = np.asarray([len(text) for text in each.responses], np.float32)
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

    Args:
      model: a folder of a causal language model; both sides start from it.
      prompts: of a step.
      samples: rollouts of each prompt.
      prompt_tokens: of a prompt, about.
      new_tokens: most tokens of a rollout.
      rounds: timed steps of each side, after a first one.
      against: "trl" or None.
      against_rows: rollouts of a microbatch of TRL's.
      mesh, dtype, attention: as of :func:`prb_jax.load_policy`.

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
            "against_length": float(np.mean([each.length for each in theirs])),
            "against_rollout_seconds": statistics.median(each.rollout_seconds for each in theirs),
            "against_update_seconds": statistics.median(each.update_seconds for each in theirs),
            "speedup": _ratio([each.rollout_seconds + each.update_seconds for each in theirs], whole),
            "rollout_speedup": _ratio(
                [each.rollout_seconds for each in theirs], [row["rollout_seconds"] for row in rows]
            ),
            "update_speedup": _ratio(
                [each.update_seconds for each in theirs], [row["update_seconds"] for row in rows]
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


def table(results: Sequence[PolicyResult]) -> ResultsTable:
    """Return all results, a column each."""
    columns: list[tuple[str, Any]] = [
        ("dtype", lambda r: r.dtype),
        ("prompts x rollouts", lambda r: f"{r.prompts} x {r.samples}"),
        ("prompt tokens", lambda r: f"{r.prompt_tokens:,.0f}"),
        ("rollout tokens", lambda r: f"{r.length:,.1f} of {r.new_tokens:,}"),
        ("rollout s", lambda r: f"{r.rollout_seconds:.2f}"),
        ("update s", lambda r: f"{r.update_seconds:.2f}"),
        ("compile s", lambda r: f"{r.compile_seconds:.1f}"),
    ]
    if any(each.speedup is not None for each in results):
        columns += [
            ("TRL rollout tokens", lambda r: f"{r.against_length:,.1f}"),
            ("TRL rollout s", lambda r: f"{r.against_rollout_seconds:.2f}"),
            ("TRL update s", lambda r: f"{r.against_update_seconds:.2f}"),
            ("speed-up", lambda r: f"{r.speedup:.2f}x"),
            ("  of the rollout", lambda r: f"{r.rollout_speedup:.2f}x"),
            ("  of the update", lambda r: f"{r.update_speedup:.2f}x"),
        ]
    return ResultsTable(
        "training a policy", [(name, [cell(each) for each in results]) for name, cell in columns]
    )
