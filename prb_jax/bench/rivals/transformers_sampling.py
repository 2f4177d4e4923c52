"""The usual way of sampling, for comparison: `generate` of transformers, prompts padded on the left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.bench.rivals.transformers_scoring import import_torch

BATCH = 8
"""Sequences of a call, unless a single prompt has more samples."""


@dataclass(frozen=True)
class GeneratedRun:
    """One timed pass.

    Attributes:
      seconds: wall time.
      tokens: drawn.
      ids: [sequences, new tokens] of each call.
    """

    seconds: float
    tokens: int
    ids: list[np.ndarray]


class TransformersSampler:
    """A causal language model of transformers on the CPU or the GPU."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str) -> None:
        """From a folder; or from the contents of a ``config.json``, with random weights."""
        torch = import_torch()
        import transformers

        self._torch: Any = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.same_weights = isinstance(model, Path)
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        causal = transformers.AutoModelForCausalLM
        if isinstance(model, Path):
            built: Any = causal.from_pretrained(model, **options)
        else:
            left_out = ("torch_dtype", "dtype", "architectures", "num_labels")
            fields = {name: value for name, value in model.items() if name not in left_out}
            config = transformers.AutoConfig.for_model(**fields)
            with torch.device(self.device):
                built = causal.from_config(config, **options)
        self.model: Any = built.to(self.device).eval()

    def run(
        self, prompts: Sequence[np.ndarray], *, samples: int, tokens: int, temperature: float
    ) -> GeneratedRun:
        """Draw ``samples`` continuations of each prompt, all of exactly ``tokens`` tokens."""
        torch, found = self._torch, []
        size = max(1, BATCH // samples)
        drawing: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(prompts), size):
                batch = prompts[first : first + size]
                longest = max(map(len, batch))
                ids = np.zeros((len(batch), longest), np.int64)
                mask = np.zeros((len(batch), longest), np.int64)
                for row, prompt in enumerate(batch):
                    ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
                out = self.model.generate(
                    torch.from_numpy(ids).to(self.device),
                    attention_mask=torch.from_numpy(mask).to(self.device),
                    num_return_sequences=samples,
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    pad_token_id=0,
                    eos_token_id=None,
                    **drawing,
                )
                found.append(out[:, longest:].cpu().numpy())
        return GeneratedRun(time.perf_counter() - start, sum(each.size for each in found), found)
