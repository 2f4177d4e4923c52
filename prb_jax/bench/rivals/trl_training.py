"""The usual way of training, for comparison: TRL's RewardTrainer on padded batches of whole conversations."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from prb_jax.bench.rivals.trl import open_trl
from prb_jax.bench.timed_step import LEARNING_RATE, OPTIMIZER, TimedStep
from prb_jax.checkpoints.hf_map import flatten, leaf_maps
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.trees.tree import Tree

# Pairs of a microbatch: without gradient checkpointing eight long pairs do not fit in a laptop's memory,
# and on a CPU they would be no faster.
_PAIRS = {"cpu": 2, "cuda": 8}


class TrlTrainer:
    """RewardTrainer's collator and loss, torch's backward pass, clipping and AdamW: its step without its bookkeeping.

    Gradient checkpointing is off. In bfloat16 it trains as TRL does by default: float32 weights under
    autocast.
    """

    def __init__(self, config: DecoderConfig, params: Params, *, dtype: str, pairs: int | None) -> None:
        """A classifier of transformers with our weights.

        Args:
          config: architecture.
          params: its weights.
          dtype: of activations.
          pairs: of a microbatch; two on CPUs and eight on GPUs if not given.

        Raises:
          RunError: torch or TRL is not installed.
        """
        self._trl = open_trl()
        self.device, self.version = self._trl.device, self._trl.version
        self.pairs = pairs or _PAIRS[self.device]
        self._dtype = dtype
        self._clip = OPTIMIZER.clip_norm
        fields = {
            name: value for name, value in config.original.items() if name not in ("torch_dtype", "dtype")
        }
        torch, transformers = self._trl.torch, self._trl.transformers
        model: Any = transformers.AutoModelForSequenceClassification.from_config(
            transformers.AutoConfig.for_model(**fields), dtype=torch.float32, attn_implementation="sdpa"
        )
        _copy_weights(torch, model, config, params)
        self._folder = tempfile.TemporaryDirectory()
        self._trainer: Any = self._trl.trl.RewardTrainer(
            model=model.to(self.device),
            args=self._trl.trl.RewardConfig(**self._trl.arguments(self._folder), max_length=None),
            train_dataset=_one_pair(),
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
        """One step over these pairs."""
        trainer = self._trainer
        total = 0.0
        tokens = padded = 0
        start = time.perf_counter()
        for at in range(0, len(trees), self.pairs):
            some = trees[at : at + self.pairs]
            rows = [
                {"chosen_ids": t.sequence(0).tolist(), "rejected_ids": t.sequence(1).tolist()} for t in some
            ]
            batch = {name: value.to(self.device) for name, value in trainer.data_collator(rows).items()}
            tokens += int(batch["attention_mask"].sum())
            padded += batch["attention_mask"].numel()
            with self._trl.narrow(self._dtype):
                loss = trainer.compute_loss(trainer.model, batch) * (len(some) / len(trees))
            loss.backward()
            total += float(loss.detach())
        self._trl.update(trainer.model, self._optimizer, clip=self._clip)
        return TimedStep(time.perf_counter() - start, total, padded, tokens)


def _copy_weights(torch: Any, model: Any, config: DecoderConfig, params: Params) -> None:
    """Our weights into transformers' tensors, one at a time."""
    tensors = dict(model.named_parameters())
    leaves = flatten(params)
    with torch.no_grad():
        for leaf in leaf_maps(config):
            for layer, key in enumerate(leaf.file_keys):
                value = leaves[leaf.path][layer] if leaf.stacked else leaves[leaf.path]
                array = np.array(jax.device_get(value), np.float32)
                tensors[key].copy_(torch.from_numpy(array.T.copy() if leaf.transposed else array))


def _one_pair() -> Any:
    """A data set, which the trainer asks for; batches are given to it directly."""
    from datasets import Dataset

    return Dataset.from_dict({"chosen_ids": [[1, 2]], "rejected_ids": [[1, 3]]})


def _padding_tokenizer() -> Any:
    """A tokenizer that knows nothing but padding, which is id 0: no response of the workload ends with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<pad>")
