"""Scoring, sampling and ranking with transformers, for comparison.

This module has padded batches of conversations, a script that caches a prefix, `generate`, and profile ranking. The
ranking follows the script of Personalised RewardBench: one question at a time, alone, then its posts in the order
of the profile, 16 at a time, padded to the longest of the 16.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import RunError
from prb_jax.models.readouts.text_encoder import Pooling
from prb_jax.study.retrieval.rank_profiles import Query
from prb_jax.trees.tree import Tree, build_tree

BATCH = 8
"""Conversations per call, or texts per call of `generate` unless a single prompt has more samples."""

RANKED_AT_ONCE = 16  # posts per call
PEAK_SECONDS = 1.0  # duration of repeated products of one size


@dataclass(frozen=True)
class PaddedRun:
    """One timed pass: number of conversations, their tokens without and with padding, scores float64 [sequences]."""

    seconds: float
    sequences: int
    tokens: int
    padded_tokens: int
    scores: np.ndarray


def padded_batches(trees: Sequence[Tree]) -> list[list[np.ndarray]]:
    """Return conversations in batches of eight: the first responses of eight comparisons, then the second ones, ..."""
    batches: list[list[np.ndarray]] = []
    for start in range(0, len(trees), BATCH):
        group = trees[start : start + BATCH]
        if len(group) == BATCH:
            for k in range(max(len(tree.responses) for tree in group)):
                batches.append([tree.sequence(k) for tree in group if k < len(tree.responses)])
        else:
            # Too few comparisons for a batch: fill it with all their conversations.
            flat = [tree.sequence(k) for tree in group for k in range(len(tree.responses))]
            batches.extend(flat[i : i + BATCH] for i in range(0, len(flat), BATCH))
    return batches


def import_torch() -> Any:
    """Return the module torch, which transformers requires for running models.

    Raises:
      RunError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise RunError(
            "the comparison with transformers needs torch, which is not installed: pip install 'prb-jax[test]'"
        ) from error
    return torch


def torch_peak(dtype: str) -> float:
    """Return torch's best FLOP/s over some large matrix products in ``dtype``, like
    :func:`prb_jax.models.flops.measured_peak` for JAX."""
    torch = import_torch()
    on_gpu = torch.cuda.is_available()
    best = 0.0
    for size in (4096, 8192) if on_gpu else (1024, 2048):
        a = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda" if on_gpu else "cpu")
        spent, fastest = 0.0, float("inf")
        while spent < PEAK_SECONDS:
            start = time.perf_counter()
            torch.mm(a, a)
            if on_gpu:
                torch.cuda.synchronize()
            took = time.perf_counter() - start
            fastest, spent = min(fastest, took), spent + took
        best = max(best, 2.0 * size**3 / fastest)
    return best


def _device() -> str:
    return "cuda" if import_torch().cuda.is_available() else "cpu"


def _open(auto: str, model: Path | Mapping[str, Any], *, dtype: str, left_out: Sequence[str] = ()) -> Any:
    """Return the model of a folder, or of the contents of a ``config.json`` with random weights, on the CPU or GPU."""
    torch = import_torch()
    import transformers

    kind, device = getattr(transformers, auto), _device()
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    if isinstance(model, Path):
        built = kind.from_pretrained(model, **options)
    else:
        unused = ("torch_dtype", "dtype", *left_out)
        fields = {name: value for name, value in model.items() if name not in unused}
        with torch.device(device):
            built = kind.from_config(transformers.AutoConfig.for_model(**fields), **options)
    return built.to(device).eval()


def _padded(
    sequences: Sequence[np.ndarray], *, before: int = 0, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [B, L] and mask [B, before + L] of sequences, padded with id 0 at the left or right."""
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros((len(sequences), before + longest), np.int64)
    mask[:, :before] = 1
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence) if left else 0
        ids[row, start : start + len(sequence)] = sequence
        mask[row, before + start : before + start + len(sequence)] = 1
    return ids, mask


class TransformersScorer:
    """A transformers classifier that scores padded batches on the CPU or GPU."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str) -> None:
        """Open a folder, or the contents of a ``config.json`` with random weights."""
        self._torch: Any = import_torch()
        self.device = _device()
        self.same_weights = isinstance(model, Path)
        self.model: Any = _open("AutoModelForSequenceClassification", model, dtype=dtype)
        # transformers reads the score at the last token other than padding; no response here ends with id 0.
        self.model.config.pad_token_id = 0

    def run(self, batches: Sequence[Sequence[np.ndarray]]) -> PaddedRun:
        """Score the batches one after another."""
        torch = self._torch
        scores: list[np.ndarray] = []
        sequences = tokens = padded = 0
        start = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                ids, mask = _padded(batch)
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
    """Return one tree per person: merge every ``questions`` consecutive trees, which begin alike."""
    people = [trees[start : start + questions] for start in range(0, len(trees), questions)]
    return [
        build_tree([tree.sequence(k) for tree in person for k in range(len(tree.responses))])
        for person in people
    ]


class CachedScorer:
    """A transformers classifier that computes each tree's prefix once."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str, responses: int | None = None) -> None:
        """Like `TransformersScorer`, with ``responses`` responses in one padded batch; all of a tree if None.

        Each response of a batch has a copy of the prefix's keys and values.
        """
        self.responses, plain = responses, TransformersScorer(model, dtype=dtype)
        self._torch, self.device, self.same_weights = plain._torch, plain.device, plain.same_weights
        self.model: Any = plain.model
        self.body: Any = getattr(plain.model, plain.model.base_model_prefix)

    def run(self, trees: Sequence[Tree]) -> PaddedRun:
        """Score the responses one tree after another, in the order of trees and responses."""
        scores: list[np.ndarray] = []
        sequences = tokens = padded = 0
        start = time.perf_counter()
        with self._torch.inference_mode():
            for tree in trees:
                cache = None
                if len(tree.prefix):
                    ids = self._torch.from_numpy(tree.prefix[None].astype(np.int64)).to(self.device)
                    cache = self.body(input_ids=ids, use_cache=True).past_key_values
                padded += len(tree.prefix)
                most = self.responses or len(tree.responses)
                for first in range(0, len(tree.responses), most):
                    some = tree.responses[first : first + most]
                    copied = cache if len(tree.responses) <= most else copy.deepcopy(cache)
                    scores.append(self._score(copied, len(tree.prefix), some))
                    padded += len(some) * max(map(len, some))
                sequences += len(tree.responses)
                tokens += tree.tokens
        return PaddedRun(time.perf_counter() - start, sequences, tokens, padded, np.concatenate(scores))

    def _score(self, cache: Any, prefix: int, responses: Sequence[np.ndarray]) -> np.ndarray:
        torch, count = self._torch, len(responses)
        ids, mask = _padded(responses, before=prefix)
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
    """One timed pass: number of tokens drawn, and the ids of each call, [sequences, new tokens]."""

    seconds: float
    tokens: int
    ids: list[np.ndarray]


class TransformersSampler:
    """A transformers causal language model on the CPU or GPU."""

    def __init__(self, model: Path | Mapping[str, Any], *, dtype: str) -> None:
        """Open a folder, or the contents of a ``config.json`` with random weights."""
        self._torch: Any = import_torch()
        self.device = _device()
        self.same_weights = isinstance(model, Path)
        left_out = ("architectures", "num_labels")
        self.model: Any = _open("AutoModelForCausalLM", model, dtype=dtype, left_out=left_out)

    def run(
        self, prompts: Sequence[np.ndarray], *, samples: int, tokens: int, temperature: float
    ) -> GeneratedRun:
        """Draw ``samples`` continuations of each prompt, all of exactly ``tokens`` tokens."""
        torch, drawn = self._torch, []
        size = max(1, BATCH // samples)
        drawing: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        start = time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(prompts), size):
                ids, mask = _padded(prompts[first : first + size], left=True)
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
                drawn.append(out[:, ids.shape[1] :].cpu().numpy())
        return GeneratedRun(time.perf_counter() - start, sum(ids.size for ids in drawn), drawn)


@dataclass(frozen=True)
class PaddedRanking:
    """One timed pass: number of posts with repetitions, and their tokens without and with padding."""

    seconds: float
    posts: int
    tokens: int
    padded_tokens: int
    orders: list[list[int]]  # per query, the positions of all its posts, best first
    # per query, the dot products of its posts, float32 [posts], in the order of the profile
    scores: list[np.ndarray]


class TransformersRanker:
    """A transformers encoder in float32, on the CPU or GPU."""

    def __init__(self, folder: Path, *, pooling: Pooling, max_length: int) -> None:
        """Open a folder; texts are cut, lower-cased and pooled as on our side."""
        torch = import_torch()
        from transformers import AutoModel, AutoTokenizer

        self._torch: Any = torch
        self.device = _device()
        self._pooling, self._max_length = pooling, max_length
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()

    def run(self, queries: Sequence[Query]) -> PaddedRanking:
        """Rank the posts of one query after another."""
        torch = self._torch
        tokens = padded = 0
        orders: list[list[int]] = []
        scores: list[np.ndarray] = []
        start = time.perf_counter()
        with torch.inference_mode():
            for query in queries:
                posts = [post["text"] for post in query.posts]
                starts = range(0, len(posts), RANKED_AT_ONCE)
                batches = (posts[start : start + RANKED_AT_ONCE] for start in starts)
                embedded = [self._embed(batch) for batch in ([query.question], *batches)]
                (question, *parts), masks = zip(*embedded, strict=True)
                similarities = torch.cat(parts) @ question[0]
                orders.append(torch.argsort(similarities, descending=True, stable=True).tolist())
                scores.append(similarities.cpu().numpy())
                tokens += sum(int(mask.sum()) for mask in masks)
                padded += sum(mask.numel() for mask in masks)
        seconds = time.perf_counter() - start
        return PaddedRanking(seconds, sum(map(len, orders)), tokens, padded, orders, scores)

    def _embed(self, texts: Sequence[str]) -> tuple[Any, Any]:
        """Return vectors [B, D] and mask [B, L] of one batch."""
        if self._pooling.lowercase:
            texts = [text.lower() for text in texts]
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_length, return_tensors="pt"
        )
        ids, mask = inputs["input_ids"].to(self.device), inputs["attention_mask"].to(self.device)
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self._pooling.mode == "cls":
            vectors = states[:, 0]
        else:
            vectors = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        if self._pooling.normalised:
            vectors = self._torch.nn.functional.normalize(vectors, dim=-1)
        return vectors, mask
