"""A clever script, for comparison: a common prefix once, with its cache, then what follows in padded batches."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.bench.rivals.transformers_scoring import PaddedRun, TransformersScorer
from prb_jax.trees.tree import Tree, build_tree


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
