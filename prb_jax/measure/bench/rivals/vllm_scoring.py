"""A serving engine, for comparison: vLLM's classification path, which batches and shares prefixes by itself."""

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

MEMORY_SHARE = 0.45  # of the GPU's memory, for vLLM: the other side's weights are in it too


class VllmScorer:
    """A classifier in vLLM, given token ids; prefix caching is on, so that a comparison's prefix can be shared.

    Its scores are not compared: vLLM puts them through an activation.
    """

    same_weights = False

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str, longest: int) -> None:
        """From a folder, or a ``config.json``'s contents with random weights, for conversations of a length."""
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
        """Scores all conversations of the batches at once: vLLM deals them itself, and pads nothing."""
        sequences = [ids for batch in batches for ids in batch]
        prompts = [{"prompt_token_ids": ids.tolist()} for ids in sequences]
        self._engine.reset_prefix_cache()  # or a second round would find the first one's work
        start = time.perf_counter()
        outputs = self._engine.encode(prompts, pooling_task="classify", use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(ids) for ids in sequences)
        scores = np.asarray([float(output.outputs.data.reshape(-1)[0]) for output in outputs])
        return PaddedRun(seconds, len(sequences), tokens, tokens, scores)
