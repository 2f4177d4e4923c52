"""A judge of pairs for groups: it compares some pairs of the responses to one prompt."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NotRequired, TypedDict

from prb_jax.behaviour.judges.names import ALL_PAIRS, CIRCULAR, HALF, KNOCK_OUT, LOSS
from prb_jax.behaviour.judges.pairs import PairJudge, warn_of_one_letter
from prb_jax.behaviour.judges.scorer import (
    Answer,
    Judgement,
    JudgeProtocol,
    cut_replies,
    nothing_read,
    random_order,
)
from prb_jax.records.comparison import Comparison
from prb_jax.runs.rows import Row

Match = tuple[int, int]
"""Positions of two responses to compare."""


class GroupLine(TypedDict):
    """The fields written by a judge that compares the responses of a group."""

    ratings: list[float | None]
    matches: list[list[int]]
    results: list[float | None]  # score of each match's first response; null without a verdict
    verdicts: list[
        list[str | None]
    ]  # verdicts of each match; empty for equal texts, which tie without being shown
    letter_mass: NotRequired[list[list[float]]]


@dataclass
class _Group:
    """The matches of one comparison so far."""

    comparison: Comparison
    rounds: Generator[list[Match], list[float | None], list[float | None]]
    waiting: list[Match] = field(default_factory=list)
    played: list[tuple[Match, float | None, dict[str, Any]]] = field(default_factory=list)
    answer: Answer = field(default_factory=lambda: Answer(0, 0))
    ratings: list[float | None] = field(default_factory=list)

    def go_on(self, results: list[float | None] | None) -> None:
        """Pass on the results of the awaited matches; further matches may follow."""
        try:
            self.waiting = next(self.rounds) if results is None else self.rounds.send(results)
        except StopIteration as ended:
            self.waiting, self.ratings = [], ended.value


@dataclass(frozen=True)
class GroupJudge(JudgeProtocol):
    """Compares the responses of a group with a judge of pairs, each pair in both orders.

    The rating of a response is its mean result: 1 for a win and 0 for a loss, or the share if the judge uses logits or
    votes. In a knock-out, the rating is the share of rounds that the response survived. A match without a verdict is
    missing. A response without results has no rating, and a knock-out with a missing match rates nobody. Equal texts
    tie, and a single response has no rating.
    """

    pairs: PairJudge  # how two responses are compared
    pairing: str = ALL_PAIRS  # "all" (K (K - 1) / 2 matches), "circular" (K) or "knock-out" (K - 1)
    ties: str = HALF  # value of a tie: "half" for each, a "loss" for both, or "missing"
    seed: int = 0  # seed of a knock-out: draws the matches, and the winner of a tie

    line = GroupLine
    compares = True

    @property
    def model(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The model that is asked."""
        return self.pairs.model

    def with_max_length(self, length: int) -> GroupJudge:
        return replace(self, pairs=self.pairs.with_max_length(length))

    def identity(self) -> Mapping[str, Any]:
        identity = {**self.pairs.identity(), "judge": "pairs", "pairing": self.pairing}
        return identity | ({"seed": self.seed} if self.pairing == KNOCK_OUT else {"ties": self.ties})

    def judge(self, members: Sequence[tuple[Comparison, int]], *, posts: int) -> list[Judgement]:
        groups = [_Group(comparison, self._rounds(comparison)) for comparison, _ in members]
        for group in groups:
            group.go_on(None)
        while any(group.waiting for group in groups):
            self._play([group for group in groups if group.waiting], posts)
        return [self._judgement(group) for group in groups]

    def _play(self, groups: Sequence[_Group], posts: int) -> None:
        """Ask about all awaited matches, of several groups together."""
        shown = [
            [
                replace(
                    group.comparison,
                    responses=[group.comparison.responses[place] for place in match],
                    labels=None,
                )
                for match in group.waiting
            ]
            for group in groups
        ]
        asked = [pair for pairs in shown for pair in pairs if len(set(pair.responses)) > 1]
        asks = [partial(self.pairs.ask, pair, 0) for pair in asked]
        answers = iter(self.model.answers(asked, asks, posts=posts) if asked else ())
        for group, pairs in zip(groups, shown, strict=True):
            results: list[float | None] = []
            for match, pair in zip(group.waiting, pairs, strict=True):
                result, details = 0.5, dict[str, Any]()
                if len(set(pair.responses)) > 1:
                    answer = next(answers)
                    group.answer += answer
                    (share, _), details = self.pairs.read(pair, 0, answer)
                    result = float(share) if self.pairs.is_read(details) else None
                results.append(result)
                group.played.append((match, result, details))
            group.go_on(results)

    def _judgement(self, group: _Group) -> Judgement:
        details: dict[str, Any] = {
            "ratings": group.ratings,
            "matches": [list(match) for match, _, _ in group.played],
            "results": [result for _, result, _ in group.played],
            "verdicts": [details.get("verdicts", []) for _, _, details in group.played],
        }
        masses = [details["letter_mass"] for _, _, details in group.played if "letter_mass" in details]
        details |= {"letter_mass": masses} if masses else {}
        unread = None in group.ratings
        scores = [0.5] * len(group.ratings) if unread else group.ratings
        return Judgement(scores, details, group.answer)

    def _rounds(
        self, comparison: Comparison
    ) -> Generator[list[Match], list[float | None], list[float | None]]:
        """Yield the matches of each round, receive their results, and return the ratings."""
        count = len(comparison.responses)
        if count < 2:
            return [None] * count
        if self.pairing == KNOCK_OUT:
            return (yield from self._knock_out(comparison))
        matches = list(itertools.combinations(range(count), 2))
        if self.pairing == CIRCULAR and count > 2:
            matches = [(place, (place + 1) % count) for place in range(count)]
        results: list[list[float]] = [[] for _ in range(count)]
        for (first, second), result in zip(matches, (yield matches), strict=True):
            equal = comparison.responses[first] == comparison.responses[second]
            if result is None or (result == 0.5 and not equal and self.ties not in (HALF, LOSS)):
                continue
            lost = result == 0.5 and not equal and self.ties == LOSS
            results[first].append(0.0 if lost else result)
            results[second].append(0.0 if lost else 1 - result)
        return [sum(of_one) / len(of_one) if of_one else None for of_one in results]

    def _knock_out(
        self, comparison: Comparison
    ) -> Generator[list[Match], list[float | None], list[float | None]]:
        """Pair the responses in random order; an odd response advances, and so does the first one after a tie."""
        texts = comparison.responses
        different = set({text: place for place, text in enumerate(texts)}.values())
        left = [place for place in random_order(comparison, self.seed) if place in different]
        if len(left) == 1:
            return [0.5] * len(texts)
        survived, rounds = dict.fromkeys(texts, 0), 0
        while len(left) > 1:
            matches = list(zip(left[::2], left[1::2]))
            results = yield matches
            if None in results:
                return [None] * len(texts)
            winners = [
                second if result is not None and result < 0.5 else first
                for (first, second), result in zip(matches, results, strict=True)
            ]
            left = [*winners, *left[2 * len(matches) :]][::-1]  # the odd response plays first next round
            rounds += 1
            for place in left:
                survived[texts[place]] += 1
        return [survived[text] / rounds for text in texts]

    def figures(self, rows: Sequence[Row], comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return statistics of the matches, each judged in both orders."""
        results = [result for row in rows for result in row["results"]]
        verdicts = [letter for row in rows for match in row["verdicts"] for letter in match]
        a, b = verdicts.count("A"), verdicts.count("B")
        unparsable = sum(None in row["ratings"] for row in rows)
        return {
            **warn_of_one_letter(a, b),
            "n": len(rows),
            "pairing": self.pairing,
            "matches": len(results),
            "tied_matches": results.count(0.5),
            "missing_matches": results.count(None),
            "position_bias": abs(2 * a / (a + b) - 1) if a + b else None,
            "said_a": a,
            "said_b": b,
            "unparsable": unparsable,
            "unparsable_verdicts": verdicts.count(None),
            **cut_replies(rows),
            **(nothing_read(undefined=True) if unparsable == len(rows) else {}),
        }
