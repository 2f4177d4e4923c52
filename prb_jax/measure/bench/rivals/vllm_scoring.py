"""A serving engine for comparison: vLLM's classification path, with its own batching and prefix sharing."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.rivals.transformers import PaddedRun

MEMORY_SHARE = 0.45  # vLLM's share of GPU memory, which our weights use too


class VllmScorer:
    """A classifier in vLLM for token ids; prefix caching is on, so a comparison's prefix can be shared.

    Its scores are not compared, because vLLM passes them through an activation.
    """

    same_weights = False

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str, longest: int) -> None:
        """Open a folder, or a ``config.json``'s contents with random weights; ``longest`` is the limit in tokens."""
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise RunError(
                "the comparison with vLLM needs vllm, which is not installed: pip install vllm, on a machine with a GPU"
            ) from error
        options: dict[str, Any] = {}
        if isinstance(model, Path):
            folder = str(model)
        else:
            self._folder = tempfile.TemporaryDirectory()
            folder = self._folder.name
            (Path(folder) / "config.json").write_text(json.dumps(dict(model)))
            options["load_format"] = "dummy"
        self._engine: Any = vllm.LLM(
            model=folder,
            runner="pooling",
            dtype=dtype,
            max_model_len=longest,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            gpu_memory_utilization=MEMORY_SHARE,
            **options,
        )

    def run(self, batches: Sequence[Sequence[np.ndarray]]) -> PaddedRun:
        """Score all conversations of the batches at once: vLLM makes its own batches, without padding."""
        sequences = [ids for batch in batches for ids in batch]
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in sequences]
        self._engine.reset_prefix_cache()  # a second round must not reuse the first round's work
        start = time.perf_counter()
        outputs = self._engine.encode(prompts, pooling_task="classify", use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(ids) for ids in sequences)
        scores = np.asarray([float(output.outputs.data.reshape(-1)[0]) for output in outputs])
        return PaddedRun(seconds, len(sequences), tokens, tokens, scores)
