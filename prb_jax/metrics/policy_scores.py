"""Policy accuracy: does a policy, guided by a reward, give the preferred response the higher score? Numbers only.

The guided policy is p(v | x, y_<t) = pi(v | .) exp(lambda r(x, y_<t v)) / Z_t. The scores of a response y of T tokens:

``seq_logprob``       sum over t of log p(y_t | x, y_<t). The rewards of C likely tokens are known at every step; all
                      others count in Z_t with the reward of the text before them, r(x, y_<t). With C = V this is
                      the full sum, and at lambda 0 it is the policy's own log-probability for every C.
``seq_logprob_topk``  the same, but Z_t sums only over the C tokens and y_t.
``token_score_sum``   sum over t of log pi(y_t | .) + lambda r(x, y_<=t), not normalised.
``seq_score``         log pi(y | x) + lambda r(x, y).

Each also exists divided by T (``_lennorm``). The score of a prefix uses only its first tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, short_repr
from prb_jax.metrics.accuracy import margin
from prb_jax.metrics.uncertainty import mean_interval

SEQUENCE: Final = "seq_score"
TOKEN_SCORES: Final = ("seq_logprob", "seq_logprob_topk", "token_score_sum")
SCORES: Final = (*TOKEN_SCORES, SEQUENCE)
LENNORM: Final = "_lennorm"
NAMES: Final = tuple(name + end for name in SCORES for end in ("", LENNORM))
"""All scores, in display order."""

FRACTIONS: Final = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Fractions of a response at which prefixes are also scored; the last one is the whole response."""

POLICY_DEFINITIONS: Final[Mapping[str, str]] = {
    "policy_accuracy": "share of comparisons in which the preferred response has the highest score under the guided "
    "policy, ties counting half; of users that lambda was not chosen on",
    "ci95": "95 % t interval over users; null with fewer than six",
    "lambda": "strength of the reward, chosen on the validation users; the smallest of equally good ones",
    "curve": "policy accuracy of validation users and of the others, for every lambda",
    "prefixes": "policy accuracy where only the first part of every response is scored; rewards of prefixes are out of "
    "distribution for a reward model that was trained on whole responses",
    "another_user": "policy accuracy if the reward model sees another user's profile and name",
    "length_correlation": "Pearson's correlation of score and tokens over all responses",
    "lambda_0": "only the policy: by the sum of log-probabilities, and divided by the number of tokens",
    "reward_alone": "only the reward model: accuracy counts strict wins as in `prb evaluate`, half_credit ties half",
    "length": "the response with more tokens is preferred; ties count half",
    "seq_logprob": "sum of log p(y_t), p ~ pi exp(lambda r): of tokens whose reward is not computed (all but the most "
    "likely `candidates` and y_t) the reward is taken to be that of the text before them",
    "seq_logprob_topk": "the same, normalised over only the candidates and y_t",
    "token_score_sum": "sum of log pi(y_t) + lambda r(y_<=t)",
    "seq_score": "log pi(y) + lambda r(y)",
    "_lennorm": "divided by the number of tokens",
}


@dataclass(frozen=True)
class TokenFacts:
    """Log-probabilities and rewards of a response of T tokens."""

    logprobs: np.ndarray  # float [T], log pi(y_t | x, y_<t)
    reward: float  # reward of the whole response, read separately
    # float [T], r(x, y_<=t); None if the reward model gives no rewards of prefixes
    rewards: np.ndarray | None = None
    start: float = 0.0  # r(x), reward of the prompt without any response token
    tried_logprobs: np.ndarray | None = None  # float [T, C], for likely tokens of each step
    tried_rewards: np.ndarray | None = None  # float [T, C], for likely tokens of each step
    listed: np.ndarray | None = None  # bool [T], whether y_t is among these tokens

    __repr__ = short_repr


def prefix_sizes(tokens: int) -> list[int]:
    """Return the sizes of the prefixes of ``FRACTIONS`` in tokens, at least one."""
    return [max(1, math.ceil(share * tokens - 1e-9)) for share in FRACTIONS]


def response_scores(facts: TokenFacts, strength: float) -> dict[str, list[float | None]]:
    """Return the scores of a response, without length normalisation, for each prefix of ``FRACTIONS``.

    Lambda is ``strength``; 0 gives the policy's own log-probability in every known score. None marks a prefix without
    a known reward; if no prefix has one, only ``seq_score`` is returned.
    """
    logprobs = np.asarray(facts.logprobs, np.float64)
    sizes = np.asarray(prefix_sizes(len(logprobs)))
    base = np.cumsum(logprobs)
    whole = float(base[-1]) + strength * facts.reward
    if facts.rewards is None:
        sums = [float(base[size - 1]) if strength == 0 else None for size in sizes]
        return {SEQUENCE: [*sums[:-1], whole]}
    rewards = np.asarray(facts.rewards, np.float64)
    added = strength * rewards
    scores = {"token_score_sum": np.cumsum(logprobs + added)[sizes - 1].tolist()}
    scores[SEQUENCE] = [*(base + added)[sizes - 1][:-1].tolist(), whole]
    if facts.tried_rewards is not None:
        over_all, over_tried = _normalisers(facts, rewards, strength)
        scores["seq_logprob"] = np.cumsum(logprobs + added - over_all)[sizes - 1].tolist()
        scores["seq_logprob_topk"] = np.cumsum(logprobs + added - over_tried)[sizes - 1].tolist()
    return scores


def _normalisers(facts: TokenFacts, rewards: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Return log Z_t [T] over the whole vocabulary, and over the tried tokens plus the response's own."""
    assert facts.tried_logprobs is not None
    assert facts.listed is not None
    known = np.asarray(facts.tried_logprobs, np.float64)
    tilted = known + strength * np.asarray(facts.tried_rewards, np.float64)
    unlisted = np.where(facts.listed, -np.inf, facts.logprobs)
    known = np.concatenate([known, unlisted[:, None]], axis=1)
    tilted = np.concatenate([tilted, (unlisted + strength * rewards)[:, None]], axis=1)
    over_tried = np.logaddexp.reduce(tilted, axis=1)
    if strength == 0:
        return np.zeros(len(rewards)), over_tried
    before = np.concatenate([[facts.start], rewards[:-1]])
    rest = np.log(np.maximum(1 - np.exp(known).sum(axis=1), 1e-300))
    return np.logaddexp(over_tried, rest + strength * before), over_tried


@dataclass(frozen=True)
class Judged:
    """The scores of the K responses of one comparison, by name of ``SCORES``, for each lambda and each prefix, [K].

    Rewards are rewards of the whole responses; clusters are the units of resampling and splitting.
    """

    id: str
    cluster: str
    labels: Sequence[float]
    tokens: Sequence[int]
    rewards: Sequence[float]
    scores: Mapping[str, Sequence[Sequence[Sequence[float | None]]]]

    __repr__ = short_repr

    def value(self, scores: Sequence[float]) -> float:
        """Return 1 if the preferred response has the highest score, 0.5 for a tie, else 0."""
        difference = margin(scores, self.labels, id=self.id)
        return 0.5 if difference == 0 else float(difference > 0)

    def at(self, name: str, strength: int, prefix: int = -1) -> list[float] | None:
        """Return the scores [K] for a name in ``NAMES``, or None if they are unknown."""
        values = self.scores[name.removesuffix(LENNORM)][strength][prefix]
        kept = [value for value in values if value is not None]
        if len(kept) < len(values):
            return None
        if not name.endswith(LENNORM):
            return kept
        sizes = [prefix_sizes(count)[prefix] for count in self.tokens]
        return [value / size for value, size in zip(kept, sizes, strict=True)]


def split_clusters(clusters: Sequence[str], *, share: float, seed: int) -> set[str]:
    """Return the clusters of the validation part: about this share, at least one, and not all.

    Raises:
      DataError: there are fewer than two clusters.
    """
    names = sorted(set(clusters), key=lambda name: sha256(f"{seed}\0{name}".encode()).digest())
    if len(names) < 2:
        raise DataError(
            f"policy accuracy: expected at least two users, to choose lambda on one part of them, found {len(names)}"
        )
    return set(names[: min(max(1, round(share * len(names))), len(names) - 1)])


def score_summary(
    rows: Sequence[Judged],
    name: str,
    *,
    strengths: Sequence[float],
    validation: set[str],
    swapped: Sequence[Judged] | None,
) -> dict[str, Any]:
    """Return the figures of one score of ``NAMES``: the curve over lambda, the choice, and its controls.

    Lambda is chosen on the clusters in ``validation``; the figures use the other clusters. ``swapped`` contains the
    rows with another user's rewards, in the same order.
    """
    chosen_on = [row for row in rows if row.cluster in validation]
    test = [row for row in rows if row.cluster not in validation]
    curve = [
        {"lambda": strength, "validation": _mean(chosen_on, name, place), "test": _mean(test, name, place)}
        for place, strength in enumerate(strengths)
    ]
    best = max(range(len(curve)), key=lambda place: (curve[place]["validation"], -strengths[place]))
    values = values_of_test(rows, name, best, validation)
    prefixes = [
        None if any(row.at(name, best, place) is None for row in test) else _mean(test, name, best, place)
        for place in range(len(FRACTIONS))
    ]
    lengths = np.concatenate([np.asarray(row.tokens, np.float64) for row in test])
    scores = np.concatenate([np.asarray(_known(row, name, best)) for row in test])
    constant = np.ptp(lengths) == 0 or np.ptp(scores) == 0
    correlation = None if constant else float(np.corrcoef(lengths, scores)[0, 1])
    others = None
    if swapped is not None:
        others = _mean([row for row in swapped if row.cluster not in validation], name, best)
    return {
        "lambda": strengths[best],
        "policy_accuracy": float(np.mean(values)),
        **mean_interval(np.asarray(values), [row.cluster for row in test]).to_json(),
        "ties": sum(value == 0.5 for value in values) / len(values),
        "n": len(values),
        "curve": curve,
        "prefixes": dict(zip(map(str, FRACTIONS), prefixes, strict=True)),
        "another_user": others,
        "length_correlation": correlation,
    }


def values_of_test(rows: Sequence[Judged], name: str, place: int, validation: set[str]) -> list[float]:
    """Return 1, 0.5 or 0 for each test row."""
    return [row.value(_known(row, name, place)) for row in rows if row.cluster not in validation]


def _mean(rows: Sequence[Judged], name: str, place: int, prefix: int = -1) -> float:
    return float(np.mean([row.value(_known(row, name, place, prefix)) for row in rows]))


def _known(row: Judged, name: str, place: int, prefix: int = -1) -> list[float]:
    scores = row.at(name, place, prefix)
    assert scores is not None
    return scores
