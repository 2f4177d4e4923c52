"""The usual way of training a policy, for comparison: TRL's GRPOTrainer, which draws by transformers' `generate`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from prb_jax.bench.rivals.trl import open_trl
from prb_jax.bench.timed_step import KL_COEFFICIENT, LEARNING_RATE
from prb_jax.errors import RunError

# Rollouts of a microbatch, as in the comparison of reward models' training.
_ROWS = {"cpu": 4, "cuda": 16}


@dataclass(frozen=True)
class PolicyStep:
    """Wall seconds of one step, its mean tokens of a rollout, and the tokens of its prompts."""

    rollout_seconds: float
    update_seconds: float
    length: float
    prompt_tokens: int


class TrlPolicyTrainer:
    """GRPOTrainer's own generation, advantages, reference and loss; torch's backward pass, clipping and AdamW.

    Its step without its bookkeeping. Gradient checkpointing is off. In bfloat16 it trains as TRL does by default:
    float32 weights under autocast.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[str],
        *,
        samples: int,
        new_tokens: int,
        dtype: str,
        rows: int | None,
    ) -> None:
        """Load the model.

        Args:
          model: folder of a causal language model.
          texts: the user's turns.
          samples: of each.
          new_tokens: of a sample, at most.
          dtype: of activations.
          rows: samples of a microbatch; chosen by device if not given.

        Raises:
          RunError: torch or TRL is not installed, or the rows do not divide the samples of a step.
        """
        from datasets import Dataset

        self._trl = open_trl()
        self.device = self._trl.device
        self._dtype, self._samples = dtype, samples
        whole = len(texts) * samples
        self._rows = rows or next(
            size for size in range(min(_ROWS[self.device], whole), 0, -1) if whole % size == 0
        )
        if whole % self._rows:
            raise RunError(
                f"--against-rows: expected a divisor of the {whole} rollouts of a step, found {rows}"
            )
        self._prompts = [[{"role": "user", "content": text}] for text in texts]
        self._folder = tempfile.TemporaryDirectory()
        parts = whole // self._rows
        torch, transformers = self._trl.torch, self._trl.transformers
        policy: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._trainer: Any = self._trl.trl.GRPOTrainer(
            model=policy.to(self.device),
            reward_funcs=cast(Any, _lengths),
            args=self._trl.trl.GRPOConfig(
                **self._trl.arguments(self._folder),
                beta=KL_COEFFICIENT,
                temperature=1.0,
                num_generations=samples,
                max_completion_length=new_tokens,
                per_device_train_batch_size=self._rows,
                gradient_accumulation_steps=parts,
                steps_per_generation=parts,
            ),
            train_dataset=Dataset.from_dict({"prompt": self._prompts}),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
        )
        self._trainer.model.train()
        self._trainer.current_gradient_accumulation_steps = parts
        self._optimizer: Any = torch.optim.AdamW(
            self._trainer.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )

    def run(self) -> PolicyStep:
        """One step over all prompts."""
        trainer = self._trainer
        drawing: list[float] = []
        inside = type(trainer)._generate

        def generate(prompts: Any) -> Any:
            begun = time.perf_counter()
            found = inside(trainer, prompts)
            drawing.append(time.perf_counter() - begun)
            return found

        trainer._generate = generate
        rows = [{"prompt": prompt} for prompt in self._prompts for _ in range(self._samples)]
        length, prompt_tokens = 0.0, 0
        start = time.perf_counter()
        for _ in range(trainer.current_gradient_accumulation_steps):
            with self._trl.narrow(self._dtype):
                part = trainer._prepare_inputs(rows)
                loss = trainer.compute_loss(trainer.model, part)
            loss.backward()
            trainer._step += 1
            length += float(part["completion_mask"].sum())
            prompt_tokens += int(part["prompt_mask"].sum())
        self._trl.update(trainer.model, self._optimizer, clip=1.0)
        (rollout,) = drawing
        return PolicyStep(
            rollout, time.perf_counter() - start - rollout, length / len(rows), prompt_tokens // self._samples
        )


def _lengths(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(each[0]["content"])) for each in completions]
