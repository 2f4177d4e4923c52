"""`prb policy-accuracy`: does a policy, guided by a reward, give the preferred response the higher score?

``run.json`` holds everything that determines the result, ``rows.jsonl`` the scores of each reward model and comparison,
``summary.json`` the figures, ``behaviour.json`` the headline score for `prb correlate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np

from prb_jax.behaviour.generation.policy import Policy, open_policy
from prb_jax.behaviour.generation.token_scores import (
    PolicyTokens,
    read_policy,
    read_rewards,
    why_not_token_level,
)
from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.accuracy import margin
from prb_jax.metrics.policy_scores import (
    LENNORM,
    NAMES,
    POLICY_DEFINITIONS,
    SCORES,
    SEQUENCE,
    Judged,
    TokenFacts,
    response_scores,
    score_summary,
    split_clusters,
    values_of_test,
)
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.paths import shown
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.runs.behaviour import BEHAVIOUR, cluster_of, figure_of, write_behaviour
from prb_jax.runs.kind import RunKind, RunResult
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowFile, RowKind
from prb_jax.scoring.controls import with_other_users
from prb_jax.scoring.history import read_history, tell_strangers, with_history
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.scoring.same_choices import check_same_choices
from prb_jax.version import computing_versions


class _Line(TypedDict):
    scorer: str
    control: str
    id: str
    tokens: list[int]
    rewards: list[float]
    scores: dict[str, list[list[list[float | None]]]]


ROWS = RowKind("rows.jsonl", "policy accuracy", key=itemgetter("scorer", "control", "id"), schema=_Line)
RUNS = RunKind(name="prb_jax policy accuracy", command="prb policy-accuracy", rows=ROWS, sealed=(BEHAVIOUR,))
STRENGTHS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
TOGETHER = 16
"""Comparisons to read together."""

_SWAP: Final = "swap"


class PolicyAccuracy(RunResult):
    """The result of `policy_accuracy`: `out`, the run folder, and `summary`, the contents of `summary.json`."""


def policy_accuracy(
    policy: str | Path | Policy,
    rewards: str | Sequence[str],
    data: Any,
    *,
    out: str | Path,
    strengths: Sequence[float] = STRENGTHS,
    candidates: int = 10,
    score: str = "seq_logprob",
    validation: float = 0.3,
    profile_posts: int = 10,
    max_length: int | None = None,
    subset: str | None = None,
    limit: int | None = None,
    history: Any = None,
    seed: int = 0,
    policy_loading: LoadOptions | None = None,
    loading: LoadOptions | None = None,
    progress: bool = True,
) -> PolicyAccuracy:
    """Score given responses under a policy that each reward model guides, and write how often the policy is right.

    The same call resumes a killed run. Several processes score together, and process 0 writes. Every score of
    :mod:`prb_jax.metrics.policy_scores` and every control is computed. Some reward models give no rewards of single
    tokens: encoders, heads that read several tokens, other tokenizers, baselines. These have only ``seq_score``.

    Args:
      policy: Policy, or any model that :func:`prb_jax.load_policy` accepts.
      rewards: Models or baselines, as for `prb evaluate`: a list, or a text with commas.
      data: Data, as for :func:`prb_jax.evaluate`.
      out: Run folder.
      strengths: Values of lambda; 0 is added if missing.
      candidates: Number of most likely tokens at each step to compute rewards for; 0 skips ``seq_logprob``.
      score: Headline score, which `prb correlate` reads; ``seq_score`` for models without this score.
      validation: Share of the users on whom lambda is chosen.
      profile_posts: Number of posts that the policy sees; a reward model sees as many as in its training.
      max_length: Maximum tokens of the policy's prompt and response; by default its context.
      subset, limit: Same as for :func:`prb_jax.evaluate`.
      history: Labelled comparisons from which fitted personalisation methods among the models learn the users.
      seed: Seed for the split of users, and for the other users of the control.
      policy_loading, loading: Options to open the policy and the reward models. With `reference` or `reference_free` in
        `loading`, each reward is a policy's implicit reward, which has only ``seq_score``.
      progress: Show progress on standard error.

    Raises:
      PrbError: models, data, choices or folder cannot be used.
    """
    path = RUNS.check_together(out)
    rewards = rewards.split(",") if isinstance(rewards, str) else rewards
    if not rewards or len(set(rewards)) != len(rewards):
        raise DataError(f"rewards: expected different models, at least one, found {quote(list(rewards))}")
    lambdas = _checked(strengths, candidates=candidates, score=score, validation=validation)
    inputs = read_inputs(data, subset=subset, limit=limit)
    comparisons = list(inputs.comparisons)
    clusters = [cluster_of(comparison.user_id, comparison.id) for comparison in comparisons]
    held_out = split_clusters(clusters, share=validation, seed=seed)
    models: dict[str, Any] = {name: (name, loading) for name in rewards}
    if not isinstance(policy, Policy):
        models["policy"] = (policy, policy_loading)
    chosen = {
        "candidates": candidates,
        "posts": profile_posts,
        "max_length": max_length,
        "strengths": lambdas,
    }
    check_same_choices("policy-accuracy", models, chosen, inputs=inputs)
    opened = open_policy(policy, policy_loading or LoadOptions())
    candidates = min(candidates, opened.config.vocab_size)
    longest = opened.context if max_length is None else max_length
    if not 2 <= longest <= opened.context:
        raise DataError(f"max_length: expected 2 to {opened.context} tokens, found {longest}")
    scorers: dict[str, Any] = with_history(
        {shown(name): open_scorer(name, loading or LoadOptions()) for name in rewards}, read_history(history)
    )
    tell_strangers(scorers.values(), comparisons)
    identity = dict(opened.identity())
    policy_name = identity.pop("name")
    decided = {
        "policy": identity,
        "rewards": {name: {**scorer.identity(), "name": name} for name, scorer in scorers.items()},
        "data": inputs.to_json(),
        "strengths": lambdas,
        "candidates": candidates,
        "profile_posts": profile_posts,
        "max_length": max_length,
        "limit": limit,
        "seed": seed,
        "versions": computing_versions(plain=False),
    }
    setting = {key: value for key, value in decided.items() if key not in ("rewards", "versions")}
    notes = {"policy": policy_name, "data": list(inputs.sources)}
    scoring = _Scoring(opened, comparisons, lambdas, profile_posts, candidates, longest)
    swapped, why_not = _swapped(comparisons, seed=seed)
    controls = {"": comparisons} | ({} if swapped is None else {_SWAP: swapped})
    keys = [(name, control, one.id) for name in scorers for control in controls for one in comparisons]
    check_agreement(decided | {"score": score, "validation": validation})
    with RUNS.open_together(path, decided, notes=notes) as run:
        for name, control in [(name, control) for name in scorers for control in controls]:
            known = sum((name, control, comparison.id) in run.file.rows for comparison in comparisons)
            label = f"{name}, another user" if control else name
            with show_progress(label, Count(len(comparisons), known), enabled=progress) as display:
                for rows in scoring.missing_rows(run.file, name, control, scorers[name], controls[control]):
                    run.file.append(rows)
                    display.advance(len(rows), sum(sum(row["tokens"]) for row in rows))

        def finish() -> dict[str, Any]:
            rows = iter(run.file.finish(keys))
            judged = {
                (name, control): [
                    _judged(next(rows), comparison, cluster)
                    for comparison, cluster in zip(comparisons, clusters, strict=True)
                ]
                for name in scorers
                for control in controls
            }
            figures, behaviour = {}, []
            for name, scorer in scorers.items():
                swap = judged.get((name, _SWAP))
                figures[name] = of_reward = _figures(
                    judged[name, ""], swap, lambdas=lambdas, validation=held_out
                )
                fallback = SEQUENCE + (LENNORM if score.endswith(LENNORM) else "")
                headline = score if score in of_reward["scores"] else fallback
                of_reward |= {"token_level": why_not_token_level(scorer, opened), "headline": headline}
                strength = lambdas.index(of_reward["scores"][headline]["lambda"])
                behaviour.append(
                    figure_of(
                        values_of_test(judged[name, ""], headline, strength, held_out),
                        [row.cluster for row in judged[name, ""] if row.cluster not in held_out],
                        name=f"policy accuracy ({headline})",
                        label=name,
                        identity=scorer.identity(),
                        setting=setting | {"validation": validation},
                        policy=identity.get("architecture"),
                    )
                )
            test = [row for row in judged[next(iter(scorers)), ""] if row.cluster not in held_out]
            alone = lambdas.index(0.0)
            summary = {
                "policy": policy_name,
                "data": list(inputs.sources),
                "n": len(comparisons),
                "n_test": len(test),
                "users": len(set(clusters)),
                "users_validation": len(held_out),
                "candidates": candidates,
                "strengths": lambdas,
                "headline": score,
                "lambda_0": {
                    "sum": _accuracy(test, lambda row: row.at(SEQUENCE, alone)),
                    "lennorm": _accuracy(test, lambda row: row.at(SEQUENCE + LENNORM, alone)),
                },
                "length": _accuracy(test, lambda row: list(map(float, row.tokens))),
                "another_user": why_not,
                "rewards": figures,
                "definitions": dict(POLICY_DEFINITIONS),
            }
            write_behaviour(path, behaviour)
            run.finish(summary)
            return summary

        summary = on_first_process(finish)
    return PolicyAccuracy(path, summary)


def _checked(strengths: Sequence[float], *, candidates: int, score: str, validation: float) -> list[float]:
    lambdas = sorted({0.0, *map(float, strengths)})
    if not all(np.isfinite(value) and value >= 0 for value in lambdas):
        raise DataError(f"lambdas: expected finite numbers of at least 0, found {quote(list(strengths))}")
    if candidates < 0:
        raise DataError(f"candidates: expected 0 or more, found {candidates}")
    if not 0 < validation < 1:
        raise DataError(f"validation: expected a share above 0 and below 1, found {validation}")
    known = [name for name in NAMES if candidates or not name.startswith("seq_logprob")]
    if score not in known:
        raise DataError(f"score: expected one of {', '.join(known)}, found {quote(score)}")
    return lambdas


def _swapped(comparisons: Sequence[Comparison], *, seed: int) -> tuple[list[Comparison] | None, str | None]:
    """Return the comparisons with another user's profile, or the reason why this is impossible."""
    if not any(comparison.profile or comparison.user_id for comparison in comparisons):
        return None, "the data name no users and have no profiles"
    try:
        return with_other_users(comparisons, seed=seed), None
    except RunError as error:
        return None, str(error)


def _figures(
    rows: Sequence[Judged],
    swapped: Sequence[Judged] | None,
    *,
    lambdas: Sequence[float],
    validation: set[str],
) -> dict[str, Any]:
    test = [row for row in rows if row.cluster not in validation]
    wins = [margin(row.rewards, row.labels, id=row.id) > 0 for row in test]
    names = [name for name in NAMES if name.removesuffix(LENNORM) in rows[0].scores]
    half_credit = _accuracy(test, lambda row: list(row.rewards))
    return {
        "reward_alone": {"accuracy": sum(wins) / len(wins), "half_credit": half_credit},
        "scores": {
            name: score_summary(rows, name, strengths=lambdas, validation=validation, swapped=swapped)
            for name in names
        },
    }


def _accuracy(rows: Sequence[Judged], scores: Callable[[Judged], Any]) -> dict[str, Any]:
    values = np.asarray([row.value(scores(row)) for row in rows])
    interval = mean_interval(values, [row.cluster for row in rows])
    return {"policy_accuracy": float(values.mean()), **interval.to_json()}


@dataclass(frozen=True)
class _Scoring:
    """Scores comparisons. The policy's side of each comparison is read on first use, then cached in ``known``."""

    policy: Policy
    comparisons: Sequence[Comparison]
    lambdas: Sequence[float]
    profile_posts: int
    candidates: int
    limit: int
    known: dict[int, PolicyTokens] = field(default_factory=dict)

    def missing_rows(
        self, file: RowFile, name: str, control: str, scorer: Any, shown: Sequence[Comparison]
    ) -> Iterator[list[Row]]:
        """Yield the missing rows of a reward model in parts; ``shown`` are the comparisons that it reads."""
        by_token = why_not_token_level(scorer, self.policy) is None
        for start in range(0, len(shown), TOGETHER):
            # fixed parts of the input, whatever exists already: rows must not depend on an interruption
            part = range(start, min(start + TOGETHER, len(shown)))
            members = [shown[index] for index in part]
            if all((name, control, one.id) in file.rows for one in members):
                continue
            as_they_are = [self.comparisons[index] for index in part]
            of_control = scorer.with_other_states(as_they_are) if control else scorer
            whole: list[Any] = [None] * len(part)
            for batch in of_control.stream(members):
                for place, scores in zip(batch.indices, batch.scores, strict=True):
                    whole[place] = np.asarray(scores, np.float64)
            tokens = self._tokens(part)
            facts = [of_policy.facts(rewards) for of_policy, rewards in zip(tokens, whole, strict=True)]
            if by_token:
                facts = read_rewards(scorer, members, tokens, whole)
            yield [
                {"scorer": name, "control": control, **self._row(name, comparison, known)}
                for comparison, known in zip(members, facts, strict=True)
                if (name, control, comparison.id) not in file.rows
            ]

    def _tokens(self, indices: Sequence[int]) -> list[PolicyTokens]:
        """The policy's tokens of some comparisons."""
        missing = [index for index in indices if index not in self.known]
        if missing:
            tokens = read_policy(
                self.policy,
                [self.comparisons[index] for index in missing],
                profile_posts=self.profile_posts,
                candidates=self.candidates,
                limit=self.limit,
            )
            self.known.update(zip(missing, tokens, strict=True))
        return [self.known[index] for index in indices]

    def _row(self, name: str, comparison: Comparison, facts: Sequence[TokenFacts]) -> dict[str, Any]:
        by_strength = [[response_scores(one, strength) for one in facts] for strength in self.lambdas]
        scores = {
            score: [
                [list(prefix) for prefix in zip(*(response[score] for response in responses), strict=True)]
                for responses in by_strength
            ]
            for score in SCORES
            if score in by_strength[0][0]
        }
        by_prefix = [prefix for strengths in scores.values() for prefixes in strengths for prefix in prefixes]
        values = [value for prefix in by_prefix for value in prefix if value is not None]
        rewards = [one.reward for one in facts]
        if not np.isfinite([*values, *rewards]).all():
            where = f"{name}: comparison {quote(comparison.id)}"
            raise RunError(f"{where}: expected finite rewards and log-probabilities; try --dtype float32")
        return {
            "id": comparison.id,
            "tokens": [len(one.logprobs) for one in facts],
            "rewards": rewards,
            "scores": scores,
        }


def _judged(row: Row, comparison: Comparison, cluster: str) -> Judged:
    assert comparison.labels is not None
    return Judged(comparison.id, cluster, comparison.labels, row["tokens"], row["rewards"], row["scores"])
