"""The usual way of ranking profiles, for comparison: one question after the other, its posts in batches of 16.

This is how the ranking script of Personalised RewardBench runs transformers: the question alone, then the posts in
the order of the profile, 16 at a time, padded to the longest of the 16.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.bench.rivals.transformers import import_torch
from prb_jax.readouts.text_encoder import Pooling
from prb_jax.retrieval.rankers import Query

BATCH = 16


@dataclass(frozen=True)
class PaddedRanking:
    """One timed pass.

    Attributes:
      seconds: wall time.
      posts: ranked, equal ones counted each time.
      tokens: real tokens of questions and posts.
      padded_tokens: tokens computed.
      orders: for each query all positions of its posts, the best one first.
      scores: for each query the dot products of its posts, float32 [posts], in the order of the profile.
    """

    seconds: float
    posts: int
    tokens: int
    padded_tokens: int
    orders: list[list[int]]
    scores: list[np.ndarray]


class TransformersRanker:
    """An encoder of transformers in float32, on the CPU or the GPU."""

    def __init__(self, folder: Path, *, pooling: Pooling, max_length: int) -> None:
        """From a folder; texts are cut, lower-cased and pooled as our side does.

        Raises:
          RunError: torch is not installed.
        """
        torch = import_torch()
        from transformers import AutoModel, AutoTokenizer

        self._torch: Any = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._pooling, self._max_length = pooling, max_length
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()

    def run(self, queries: Sequence[Query]) -> PaddedRanking:
        """Ranks the posts of one query after another."""
        torch = self._torch
        tokens = padded = 0
        orders: list[list[int]] = []
        scores: list[np.ndarray] = []
        start = time.perf_counter()
        with torch.inference_mode():
            for query in queries:
                posts = [post["text"] for post in query.posts]
                batches = [posts[first : first + BATCH] for first in range(0, len(posts), BATCH)]
                embedded = [self._embed(batch) for batch in ([query.question], *batches)]
                (question, *parts), masks = zip(*embedded, strict=True)
                found = torch.cat(parts) @ question[0]
                orders.append(torch.argsort(found, descending=True, stable=True).tolist())
                scores.append(found.cpu().numpy())
                tokens += sum(int(mask.sum()) for mask in masks)
                padded += sum(mask.numel() for mask in masks)
        seconds = time.perf_counter() - start
        return PaddedRanking(seconds, sum(map(len, orders)), tokens, padded, orders, scores)

    def _embed(self, texts: Sequence[str]) -> tuple[Any, Any]:
        """Vectors [B, D] and the mask [B, L] of one batch."""
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
