"""The best of k samples: expected quality for a selector that takes the highest reward, for every k up to N.

Two estimators of the same expectation. The *unbiased* one averages over all subsets of k of the N samples (like pass@k,
Chen et al. 2021), and has the least variance. The *first-k* one uses only the first k samples, like the scripts of
Personalised RewardBench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.errors import DataError


def sizes_up_to(samples: int) -> list[int]:
    """Return 1, 2, 4, ... and finally ``samples``."""
    sizes = [1 << power for power in range(samples.bit_length()) if 1 << power < samples]
    return [*sizes, samples]


def subset_weights(samples: int, size: int) -> np.ndarray:
    """Return the probability that the best of ``size`` samples is the i-th worst of all, float64 [N].

    The samples are drawn from N = ``samples`` without replacement: C(i, k - 1) / C(N, k) for i = 0, ..., N - 1,
    computed from the best one down to avoid large numbers.
    """
    if not 1 <= size <= samples:
        raise DataError(f"k: expected 1 to {samples}, found {size}")
    weights = np.zeros(samples)
    # The best of all is in the subset with k / N; each next one counts only if all better ones are absent.
    weight = size / samples
    for rank in range(samples - 1, size - 2, -1):
        weights[rank] = weight
        if rank:
            weight *= (rank - size + 1) / rank
    return weights


def best_of_k(rewards: np.ndarray, quality: np.ndarray, size: int) -> float:
    """Return the expected quality of the sample with the highest reward among ``size``, over all subsets.

    Rewards and quality are float [N]; ties are broken at random.

    Raises:
      DataError: the size is not 1 to N, or rewards and quality do not match the samples one to one.
    """
    rewards, quality = _checked(rewards, quality)
    weights = subset_weights(len(rewards), size)
    order = np.argsort(rewards, kind="stable")
    _, first, counts = np.unique(rewards[order], return_index=True, return_counts=True)
    group = np.repeat(np.arange(len(counts)), counts)
    mass = np.add.reduceat(weights, first)
    means = np.bincount(group, weights=quality[order]) / counts
    return float(mass @ means)


def best_of_first(rewards: np.ndarray, quality: np.ndarray, size: int) -> float:
    """Return the quality of the sample with the highest reward among the first ``size``; ties go to the first one.

    Arguments and errors are the same as for :func:`best_of_k`.
    """
    rewards, quality = _checked(rewards, quality)
    if not 1 <= size <= len(rewards):
        raise DataError(f"k: expected 1 to {len(rewards)}, found {size}")
    return float(quality[int(np.argmax(rewards[:size]))])


@dataclass(frozen=True)
class Point:
    """A curve at one k: means over the prompts of :func:`best_of_k` (with the value of each prompt) and of
    :func:`best_of_first`."""

    k: int
    quality: float
    first: float
    by_prompt: np.ndarray


def curve(rewards: Sequence[np.ndarray], quality: Sequence[np.ndarray], sizes: Sequence[int]) -> list[Point]:
    """Return the curve of a selector over prompts, from rewards and quality [N] of each; N may differ. Prompts with
    fewer samples than a size use all of them."""
    points = []
    for size in sizes:
        pairs = list(zip(rewards, quality, strict=True))
        by_prompt = np.asarray([best_of_k(r, q, min(size, len(r))) for r, q in pairs])
        first = np.asarray([best_of_first(r, q, min(size, len(r))) for r, q in pairs])
        points.append(Point(size, float(by_prompt.mean()), float(first.mean()), by_prompt))
    return points


def _checked(rewards: np.ndarray, quality: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rewards, quality = np.asarray(rewards, np.float64), np.asarray(quality, np.float64)
    if rewards.ndim != 1 or rewards.shape != quality.shape or not len(rewards):
        raise DataError(
            f"expected a reward and a quality for each sample, found shapes {rewards.shape} and {quality.shape}"
        )
    return rewards, quality
