"""Training with TRL, for comparison: the steps of RewardTrainer and GRPOTrainer without their bookkeeping."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prb_jax.errors import RunError
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.workload import KL_COEFFICIENT, LEARNING_RATE, OPTIMIZER, TimedStep
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.trees.tree import Tree


@dataclass(frozen=True)
class Trl:
    """The imported packages, and the device that torch uses."""

    torch: Any
    transformers: Any
    trl: Any
    device: str

    def arguments(self, folder: tempfile.TemporaryDirectory[str]) -> dict[str, Any]:
        """Return common arguments of the trainers: no reports, and no gradient checkpointing."""
        return {
            "output_dir": folder.name,
            "use_cpu": self.device == "cpu",
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
        }

    def narrow(self, dtype: str) -> Any:
        """Return the context of TRL's default precision: bfloat16 autocast over float32 weights."""
        if dtype != "bfloat16":
            return contextlib.nullcontext()
        return self.torch.autocast(self.device, dtype=self.torch.bfloat16)

    def update(self, model: Any, optimizer: Any, *, clip: float | None) -> None:
        """Clip the gradients if ``clip`` is given, take an optimiser step, and wait for the device."""
        if clip is not None:
            self.torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def open_trl() -> Trl:
    """Import the packages; raise RunError if one of them is not installed."""
    try:
        import torch
        import transformers
        import trl
    except ImportError as error:
        text = f"the comparison with TRL needs {error.name}, which is not installed: pip install trl"
        raise RunError(text) from error
    return Trl(torch, transformers, trl, "cuda" if torch.cuda.is_available() else "cpu")


# Pairs per microbatch: without gradient checkpointing eight long pairs do not fit in a laptop's memory,
# and on a CPU larger batches are not faster.
_PAIRS = {"cpu": 2, "cuda": 8}


class TrlTrainer:
    """RewardTrainer's collator and loss, with torch's backward pass, clipping and AdamW: its step without bookkeeping.

    Gradient checkpointing is off. In bfloat16 it uses TRL's default precision: float32 weights under
    autocast.
    """

    def __init__(self, config: DecoderConfig, params: Params, *, dtype: str, pairs: int | None) -> None:
        """Make a transformers classifier with our weights, and activations in ``dtype``.

        A microbatch has ``pairs`` pairs; default: two on CPUs, eight on GPUs.
        """
        from datasets import Dataset

        self._trl, self._dtype = open_trl(), dtype
        self.device = self._trl.device
        self.pairs = pairs or _PAIRS[self.device]
        torch, transformers = self._trl.torch, self._trl.transformers
        self._folder = tempfile.TemporaryDirectory()
        # Through a checkpoint: transformers itself joins the experts of a layer and other tensors.
        written = save_params(params, config, Path(self._folder.name) / "start")
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            written, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._trainer: Any = self._trl.trl.RewardTrainer(
            model=model.to(self.device),
            args=self._trl.trl.RewardConfig(**self._trl.arguments(self._folder), max_length=None),
            # the trainer requires one; run() passes batches directly
            train_dataset=Dataset.from_dict({"chosen_ids": [[1, 2]], "rejected_ids": [[1, 3]]}),
            processing_class=_padding_tokenizer(),
        )
        self._trainer.model.train()
        self._optimizer: Any = torch.optim.AdamW(
            self._trainer.model.parameters(),
            lr=LEARNING_RATE,
            betas=(OPTIMIZER.b1, OPTIMIZER.b2),
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
        )

    def run(self, trees: Sequence[Tree]) -> TimedStep:
        """Run one step over these pairs."""
        trainer = self._trainer
        total = 0.0
        tokens = padded = 0
        start = time.perf_counter()
        for at in range(0, len(trees), self.pairs):
            some = trees[at : at + self.pairs]
            both = ((tree.sequence(0).tolist(), tree.sequence(1).tolist()) for tree in some)
            rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in both]
            batch = {name: value.to(self.device) for name, value in trainer.data_collator(rows).items()}
            tokens += int(batch["attention_mask"].sum())
            padded += batch["attention_mask"].numel()
            with self._trl.narrow(self._dtype):
                loss = trainer.compute_loss(trainer.model, batch) * (len(some) / len(trees))
            loss.backward()
            total += float(loss.detach())
        self._trl.update(trainer.model, self._optimizer, clip=OPTIMIZER.clip_norm)
        return TimedStep(time.perf_counter() - start, total, padded, tokens)


def _padding_tokenizer() -> Any:
    """Return a tokenizer with only a padding token, id 0: no response of the workload ends with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<pad>")


# Rollouts per microbatch, twice the pairs above.
_ROWS = {"cpu": 4, "cuda": 16}


@dataclass(frozen=True)
class PolicyStep:
    """Wall seconds of one step, its mean tokens per rollout, and the tokens of its prompts."""

    rollout_seconds: float
    update_seconds: float
    length: float
    prompt_tokens: int


class TrlPolicyTrainer:
    """GRPOTrainer's own generation, advantages, reference and loss, with torch's backward pass, clipping and AdamW.

    This is its step without bookkeeping. Gradient checkpointing is off. In bfloat16 it uses TRL's default precision:
    float32 weights under autocast.
    """

    def __init__(self, texts: Sequence[str], options: BenchOptions, *, dtype: str) -> None:
        """Load the options' model, with ``texts`` as user turns and activations in ``dtype``.

        Raises:
          RunError: torch or TRL is not installed, or the microbatch size does not divide the samples of a step.
        """
        from datasets import Dataset

        self._trl = open_trl()
        self.device = self._trl.device
        self._dtype, self._samples = dtype, options.samples
        whole = len(texts) * options.samples
        sizes = range(min(_ROWS[self.device], whole), 0, -1)
        rows = options.against_rows or next(size for size in sizes if whole % size == 0)
        if whole % rows:
            expected = f"expected a divisor of the {whole} rollouts of a step, found {rows}"
            raise RunError(f"--against-rows: {expected}")
        self._prompts = [[{"role": "user", "content": text}] for text in texts]
        self._folder = tempfile.TemporaryDirectory()
        model, parts = options.model, whole // rows
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
                num_generations=options.samples,
                max_completion_length=options.new_tokens,
                per_device_train_batch_size=rows,
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
        """Run one step over all prompts."""
        trainer = self._trainer
        drawing: list[float] = []
        inside = type(trainer)._generate

        def generate(prompts: Any) -> Any:
            begun = time.perf_counter()
            step = inside(trainer, prompts)
            drawing.append(time.perf_counter() - begun)
            return step

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
    return [float(len(completion[0]["content"])) for completion in completions]
