"""The usual way of scoring, for comparison: whole conversations in padded batches of eight.

This is how the released scripts of Personalised RewardBench run transformers: every conversation is
computed whole, eight at a time in the order of the data, padded to the longest of the eight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.trees.tree import Tree

BATCH = 8


@dataclass(frozen=True)
class PaddedRun:
    """One timed pass.

    Attributes:
      seconds: wall time.
      sequences: conversations scored.
      tokens: real tokens of these conversations.
      padded_tokens: tokens computed.
      scores: float64 [sequences].
    """

    seconds: float
    sequences: int
    tokens: int
    padded_tokens: int
    scores: np.ndarray


def padded_batches(trees: Sequence[Tree]) -> list[list[np.ndarray]]:
    """Conversations in batches of eight: of eight comparisons their first responses, then their second, ..."""
    batches: list[list[np.ndarray]] = []
    for start in range(0, len(trees), BATCH):
        group = trees[start : start + BATCH]
        if len(group) == BATCH:
            for k in range(max(len(tree.responses) for tree in group)):
                batches.append([tree.sequence(k) for tree in group if k < len(tree.responses)])
        else:
            # Too few comparisons for a batch: their conversations fill it.
            flat = [tree.sequence(k) for tree in group for k in range(len(tree.responses))]
            batches.extend(flat[i : i + BATCH] for i in range(0, len(flat), BATCH))
    return batches


def import_torch() -> Any:
    """The module, without which transformers runs no model.

    Raises:
      RunError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise RunError(
            "the comparison with transformers needs torch, which is not installed: pip install 'prb-jax[test]'"
        ) from error
    return torch


def torch_peak(dtype: str, *, seconds: float = 1.0) -> float:
    """FLOP/s of the best of some large products of torch in ``dtype``, as
    :func:`prb_jax.models.flops.measured_peak` is for JAX."""
    torch = import_torch()
    on_gpu = torch.cuda.is_available()
    best = 0.0
    for size in (4096, 8192) if on_gpu else (1024, 2048):
        a = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda" if on_gpu else "cpu")
        spent, fastest = 0.0, float("inf")
        while spent < seconds:
            start = time.perf_counter()
            torch.mm(a, a)
            if on_gpu:
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            fastest, spent = min(fastest, took), spent + took
        best = max(best, 2.0 * size**3 / fastest)
    return best


class TransformersScorer:
    """A classifier of transformers, scoring padded batches on the CPU or the GPU."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str) -> None:
        """From a folder; or from the contents of a ``config.json``, with random weights."""
        torch = import_torch()
        import transformers

        self._torch: Any = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa"
        self.same_weights = isinstance(model, Path)
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        classifier = transformers.AutoModelForSequenceClassification
        if isinstance(model, Path):
            built = classifier.from_pretrained(model, **options)
        else:
            fields = {name: value for name, value in model.items() if name not in ("torch_dtype", "dtype")}
            config = transformers.AutoConfig.for_model(**fields)
            with torch.device(self.device):
                built = classifier.from_config(config, **options)
        self.model: Any = built.to(self.device).eval()
        # transformers reads a score at the last token that is not padding: id 0 ends no response here.
        self.pad = self.model.config.pad_token_id = 0

    def run(self, batches: Sequence[Sequence[np.ndarray]]) -> PaddedRun:
        """Scores the batches one after another."""
        torch = self._torch
        scores: list[np.ndarray] = []
        sequences = tokens = padded = 0
        start = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                longest = max(len(ids) for ids in batch)
                ids = np.full((len(batch), longest), self.pad, np.int64)
                mask = np.zeros((len(batch), longest), np.int64)
                for row, sequence in enumerate(batch):
                    ids[row, : len(sequence)] = sequence
                    mask[row, : len(sequence)] = 1
                logits = self.model(
                    input_ids=torch.from_numpy(ids).to(self.device),
                    attention_mask=torch.from_numpy(mask).to(self.device),
                ).logits
                scores.append(logits[:, 0].double().cpu().numpy())
                sequences += len(batch)
                tokens += int(mask.sum())
                padded += mask.size
        return PaddedRun(time.perf_counter() - start, sequences, tokens, padded, np.concatenate(scores))
