"""The rows of `prb policy-accuracy`: the scores of every response of a comparison under one reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError, quote
from prb_jax.generation.policy import Policy
from prb_jax.generation.token_scores import (
    PolicyTokens,
    RewardTokens,
    batch_shards,
    read_policy,
    read_rewards,
    why_not_token_level,
)
from prb_jax.metrics.policy_scores import SCORES, Judged, TokenFacts, response_scores
from prb_jax.runs.rows import Row, RowFile
from prb_jax.text.view import ViewOptions

FIELDS: Final = ("scorer", "control", "id", "tokens", "rewards", "scores")


@dataclass(frozen=True)
class PolicyReader:
    """The policy's side of every comparison, read when it is first asked for and then kept."""

    policy: Policy
    comparisons: Sequence[Comparison]
    profile_posts: int
    candidates: int
    limit: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kept", {})

    def read(self, indices: Sequence[int]) -> list[PolicyTokens]:
        """Return the policy's tokens of some comparisons."""
        kept: dict[int, PolicyTokens] = self._kept  # pyright: ignore[reportAttributeAccessIssue]
        step = batch_shards(self.policy.mesh)
        missing = [index for index in indices if index not in kept]
        for start in range(0, len(missing), step):
            part = missing[start : start + step]
            found = read_policy(
                self.policy,
                [self.comparisons[index] for index in part],
                profile_posts=self.profile_posts,
                candidates=self.candidates,
                limit=self.limit,
            )
            kept.update(zip(part, found, strict=True))
        return [kept[index] for index in indices]


def missing_rows(
    file: RowFile,
    reader: PolicyReader,
    name: str,
    control: str,
    scorer: Any,
    shown: Sequence[Comparison],
    lambdas: Sequence[float],
) -> Iterator[list[Row]]:
    """Yield the rows that are missing, some at a time.

    Args:
      file: the rows that are there.
      reader: of the policy.
      name, control: of the rows.
      scorer: the reward model.
      shown: what it is shown of each comparison.
      lambdas: strengths of the reward.
    """
    by_token = why_not_token_level(scorer, reader.policy) is None
    view = scorer.reader.view(ViewOptions()) if by_token else None
    step = max(16, batch_shards(scorer.mesh) if by_token else 1)
    for start in range(0, len(shown), step):
        # parts of the input, whatever is there already: a row does not depend on an interruption
        part = range(start, min(start + step, len(shown)))
        if all((name, control, shown[index].id) in file.rows for index in part):
            continue
        whole: list[Any] = [None] * len(part)
        for batch in scorer.stream([shown[index] for index in part], skip=lambda indices: False):
            for place, scores in zip(batch.indices, batch.scores, strict=True):
                whole[place] = np.asarray(scores, np.float64)
        tokens = reader.read(part)
        rewards: list[RewardTokens | None] = [None] * len(part)
        if by_token:
            assert view is not None
            size = batch_shards(scorer.mesh)
            for first in range(0, len(part), size):
                own = part[first : first + size]
                rewards[first : first + size] = read_rewards(
                    scorer, [shown[index] for index in own], tokens[first : first + size], view=view
                )
        yield [
            _row(name, control, shown[index], whole[place], tokens[place], rewards[place], lambdas)
            for place, index in enumerate(part)
            if (name, control, shown[index].id) not in file.rows
        ]


def _row(
    name: str,
    control: str,
    comparison: Comparison,
    whole: np.ndarray,
    tokens: PolicyTokens,
    rewards: RewardTokens | None,
    lambdas: Sequence[float],
) -> Row:
    facts = []
    for k, ids in enumerate(tokens.ids):
        known: dict[str, Any] = {}
        if rewards is not None:
            known = {"rewards": rewards.rewards[k], "start": rewards.start}
            if tokens.tried[k].shape[1]:
                known |= {
                    "tried_logprobs": tokens.tried_logprobs[k],
                    "tried_rewards": rewards.tried[k],
                    "listed": (tokens.tried[k] == ids[:, None]).any(axis=1),
                }
        facts.append(TokenFacts(tokens.logprobs[k], float(whole[k]), **known))
    by_strength = [[response_scores(each, strength) for each in facts] for strength in lambdas]
    names = [score for score in SCORES if score in by_strength[0][0]]
    scores = {
        score: [
            [list(prefix) for prefix in zip(*(one[score] for one in own), strict=True)] for own in by_strength
        ]
        for score in names
    }
    finite = [
        value for own in scores.values() for one in own for each in one for value in each if value is not None
    ]
    if not np.isfinite([*finite, *whole]).all():
        where = f"{name}: comparison {quote(comparison.id)}"
        raise RunError(f"{where}: expected finite rewards and log-probabilities; try --dtype float32")
    return {
        "scorer": name,
        "control": control,
        "id": comparison.id,
        "tokens": [len(ids) for ids in tokens.ids],
        "rewards": list(map(float, whole)),
        "scores": scores,
    }


def judged_row(row: Row, comparison: Comparison, cluster: str) -> Judged:
    """Return a row as the metrics take it."""
    assert comparison.labels is not None
    return Judged(comparison.id, cluster, comparison.labels, row["tokens"], row["rewards"], row["scores"])


def count_rows(file: RowFile, name: str, control: str) -> int:
    """Return how many rows of a scorer there are."""
    return sum(key[:2] == (name, control) for key in file.rows if isinstance(key, tuple))


def row_key(row: Row) -> tuple[str, str, str]:
    """Return the key that tells rows apart."""
    return row["scorer"], row["control"], row["id"]
