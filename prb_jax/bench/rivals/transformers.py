"""The usual ways of transformers, for comparison: padded batches, a script with the cache of a prefix, `generate`."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.trees.tree import Tree, build_tree

BATCH = 8
"""Conversations of a call, or texts that are drawn at a time, unless a single prompt has more samples."""


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


def trees_of_people(trees: Sequence[Tree], questions: int) -> list[Tree]:
    """Return a tree for each person: every ``questions`` trees in a row begin alike, and become one."""
    people = [trees[start : start + questions] for start in range(0, len(trees), questions)]
    return [
        build_tree([tree.sequence(k) for tree in person for k in range(len(tree.responses))])
        for person in people
    ]


class CachedScorer:
    """A classifier of transformers that computes each tree's prefix once."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str, responses: int | None = None) -> None:
        """A model of a folder; or of the contents of a ``config.json``, with random weights.

        Args:
          model: its place, or its contents.
          dtype: of weights and activations.
          responses: of one padded batch; all of a tree if None. Each has a copy of the prefix's keys and values.
        """
        self.responses = responses
        plain = TransformersScorer(model, dtype=dtype)
        self._torch, self.device = plain._torch, plain.device
        self.version = f"{plain.version}, with the cache of the prefix"
        self.same_weights = plain.same_weights
        self.model: Any = plain.model
        self.body: Any = getattr(plain.model, plain.model.base_model_prefix)

    def run(self, trees: Sequence[Tree]) -> PaddedRun:
        """Scores the responses of the trees one tree after another, in the order of trees and responses."""
        scores: list[np.ndarray] = []
        sequences = tokens = padded = 0
        start = time.perf_counter()
        with self._torch.inference_mode():
            for tree in trees:
                cache = self._read(tree.prefix)
                padded += len(tree.prefix)
                most = self.responses or len(tree.responses)
                for first in range(0, len(tree.responses), most):
                    some = tree.responses[first : first + most]
                    own = cache if len(tree.responses) <= most else copy.deepcopy(cache)
                    scores.append(self._score(own, len(tree.prefix), some))
                    padded += len(some) * max(map(len, some))
                sequences += len(tree.responses)
                tokens += tree.tokens
        return PaddedRun(time.perf_counter() - start, sequences, tokens, padded, np.concatenate(scores))

    def _read(self, prefix: np.ndarray) -> Any:
        """The keys and values of a prefix; None of an empty one."""
        if not len(prefix):
            return None
        ids = self._torch.from_numpy(prefix[None].astype(np.int64)).to(self.device)
        return self.body(input_ids=ids, use_cache=True).past_key_values

    def _score(self, cache: Any, prefix: int, responses: Sequence[np.ndarray]) -> np.ndarray:
        torch = self._torch
        count, longest = len(responses), max(map(len, responses))
        ids = np.zeros((count, longest), np.int64)
        mask = np.zeros((count, prefix + longest), np.int64)
        mask[:, :prefix] = 1
        for row, response in enumerate(responses):
            ids[row, : len(response)] = response
            mask[row, prefix : prefix + len(response)] = 1
        if cache is not None:
            cache.batch_repeat_interleave(count)
        states = self.body(
            input_ids=torch.from_numpy(ids).to(self.device),
            attention_mask=torch.from_numpy(mask).to(self.device),
            past_key_values=cache,
        ).last_hidden_state
        rows = torch.arange(count, device=self.device)
        last = torch.tensor([len(response) - 1 for response in responses], device=self.device)
        return self.model.score(states[rows, last])[:, 0].double().cpu().numpy()


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
        return GeneratedRun(time.perf_counter() - start, sum(ids.size for ids in found), found)
