"""Splits into seen, validation and unseen people: disjoint, seeded, saved. Published flaws of data raise errors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, PrbWarning, RunError, quote, short_repr
from prb_jax.metrics.paired import smallest_shift
from prb_jax.metrics.texts import WRAPPERS, wrapper_features
from prb_jax.metrics.uncertainty import accuracy_interval, difference_interval
from prb_jax.personal.few_shot.choices import Choices, Posts, group, shares_response
from prb_jax.study.population import Population

SPLITS: Final[Mapping[str, str]] = {
    "user": "new people: any other choice of the person may be learned from that shares no response",
    "other-question": "new people, adapted on their choices on other questions",
    "user+question": "new people and new questions, adapted on choices on other questions",
}
"""The new part of the test in each kind of split."""

FOLDS: Final = 3
"""Number of folds of an unseen person's choices: each is predicted from the others, if any other choice may be learned
from."""

UNSEEN: Final = 0.3
VALIDATION: Final = 0.15
LEAST_USERS: Final = 8

SEEN_PART, VALIDATION_PART, UNSEEN_PART = range(3)
PARTS: Final = ("seen", "validation", "unseen")

LEVEL: Final = 0.999
MARGIN: Final = 0.03
"""Minimum excess over chance of the wrapper classifier, at this confidence: anything less is not a leak of labels."""

EXCHANGES: Final = 99
"""Number of permutations of wrappers among texts, for the accuracy by chance."""

CONTENT: Final = 0.5
"""Minimum share of a wrapper's texts that both win and lose, relative to chance, for a wrapper that is content."""

NORMS: Final = 1.5
"""Maximum ratio of the mean feature norms of seen and unseen people."""

WRAPPER: Final = "wrapper"  # the name of the check in ``--relax``


@dataclass(frozen=True)
class StudySplit:
    """One division of the people and their choices."""

    seed: int  # number of the split; splits of a study have disjoint unseen people
    part: np.ndarray  # int8 [U]: 0 seen, 1 validation, 2 unseen
    # int8 [n]: 0 and up for the choices to predict, all choices of one person and fold together, from the person's
    # choices outside this fold; -1 for the other choices. Methods are not fitted on seen people's choices to predict.
    fold: np.ndarray
    # bool [n]: choices with a response that the same person judges in another fold, which reveals its label: methods
    # are neither fitted nor adapted on them
    leaking: np.ndarray
    trained: np.ndarray  # bool [n]: choices of seen people that methods are fitted on
    # bool [n]: choices of people of the validation part, none on a question of the test
    validated: np.ndarray

    __repr__ = short_repr

    @property
    def queries(self) -> np.ndarray:
        """The choices to predict, bool [n]."""
        return self.fold >= 0

    def to_json(self, population: Population) -> dict[str, Any]:
        """Return the split with names of users and ids of comparisons, as in ``splits.json``."""
        people = {
            name: [user for user, part in zip(population.users, self.part, strict=True) if part == number]
            for number, name in enumerate(PARTS)
        }
        choices = {
            name: [population.ids[place] for place in np.flatnonzero(places)]
            for name, places in (("queries", self.queries), ("told", self.leaking))
        }
        return {"seed": self.seed, **people, **choices}


def make_splits(population: Population, *, by: str, seeds: int) -> list[StudySplit]:
    """Return the splits of a study.

    Each person is unseen in at most one of them: with ``seeds`` splits, the unseen part is 1 / seeds of the people, at
    most 0.3. Of the others, 0.15 are the validation part.

    With "user", every comparison of people outside the seen part is predicted, one third at a time from the others. Of
    seen people, up to a fifth of the comparisons is predicted, and none if these share a response with every other one,
    which would leave nothing to fit on. With "other-question", whole questions are predicted: for people outside the
    seen part about a third, at least one (of their comparisons if they have one question); for seen people comparisons
    on one question. With "user+question", a third of all questions is never fitted on, a different third in each split,
    and only comparisons on these are predicted.

    Args:
      population: The people.
      by: Key of :data:`SPLITS`.
      seeds: Number of splits.

    Raises:
      DataError: ``by`` is unknown, there is no split, or too few people or questions.
    """
    if by not in SPLITS:
        raise DataError(f"split: expected one of {', '.join(SPLITS)}; found {quote(by)}")
    if seeds < 1:
        raise DataError(f"seeds: expected at least 1, found {seeds}")
    users = len(population.users)
    share = min(UNSEEN, 1 / seeds)
    if users < LEAST_USERS or int(users * share) < 1:
        raise DataError(
            f"users: expected at least {max(LEAST_USERS, int(np.ceil(1 / share)))} for {seeds} "
            f"split{'s' if seeds > 1 else ''} into seen, validation and unseen people, found {users}"
        )
    questions = int(population.choices.questions.max()) + 1
    if by == "user+question" and questions < 3:
        raise DataError(
            f"split user+question: expected at least 3 questions, found {questions}: use --split user"
        )
    order = np.random.default_rng(0).permutation(users)
    asked = np.random.default_rng(1).permutation(questions)
    count = int(users * share)
    return [
        _split(
            population.choices,
            order[seed * count : (seed + 1) * count],
            np.array_split(asked, 3)[seed % 3] if by == "user+question" else None,
            plain=by == "user",
            seed=seed,
        )
        for seed in range(seeds)
    ]


def _split(
    choices: Choices, unseen: np.ndarray, asked: np.ndarray | None, *, plain: bool, seed: int
) -> StudySplit:
    """Return one split, given its unseen people and, if questions are new, the questions of the test."""
    users = choices.number_of_users
    rng = np.random.default_rng([seed, users])
    part = np.full(users, SEEN_PART, np.int8)
    part[unseen] = UNSEEN_PART
    others = rng.permutation(np.flatnonzero(part == SEEN_PART))
    part[others[: max(1, int(len(others) * VALIDATION))]] = VALIDATION_PART
    # on a question of the test
    new = np.zeros(len(choices), bool) if asked is None else np.isin(choices.questions, asked)
    part_of = part[choices.users]
    fold = np.where((part_of == SEEN_PART) & new, 0, -1).astype(np.int8)
    # If any other choice may be learned from, treat each choice as a separate question.
    questions = np.arange(len(choices)) if plain else choices.questions
    grouped, texts = group(choices), choices.texts
    for user, places, mask in zip(grouped.users, grouped.places, grouped.mask, strict=True):
        of_user = places[mask]
        if part[user] == SEEN_PART and asked is None and len(of_user) > 1:
            most = max(1, len(of_user) // 5)
            if plain:
                held = rng.permutation(of_user)[:most]
            else:
                question = rng.choice(np.unique(questions[of_user]))
                held = rng.permutation(of_user[questions[of_user] == question])[:most]
            rest = texts[np.setdiff1d(of_user, held)]
            nothing_left = np.isin(rest, texts[held]).any(axis=1).all()
            fold[held] = -1 if nothing_left else 0
        elif part[user] != SEEN_PART and plain:
            fold[rng.permutation(of_user)] = np.arange(len(of_user)) % FOLDS
        elif part[user] == VALIDATION_PART:
            fold[_choose_queries(of_user[~new[of_user]], of_user[~new[of_user]], questions, rng)] = 0
        elif part[user] == UNSEEN_PART:
            fold[
                _choose_queries(of_user, of_user if asked is None else of_user[new[of_user]], questions, rng)
            ] = 0
    leaking = np.zeros(len(choices), bool)
    for number in range(fold.max(initial=-1) + 1):
        leaking |= shares_response(choices, fold == number) & (fold != number)
    queries = fold >= 0
    trained = (part_of == SEEN_PART) & ~queries & ~leaking
    validated = (part_of == VALIDATION_PART) & ~new & (queries | ~leaking)
    return StudySplit(seed, part, fold, leaking, trained, validated)


def _choose_queries(
    of_user: np.ndarray, new: np.ndarray, questions: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return which of a person's allowed choices are predicted: whole questions if there are several."""
    if not len(new):
        return new
    all_, candidates = np.unique(questions[of_user]), rng.permutation(np.unique(questions[new]))
    if len(all_) > 1:
        count = max(1, round(len(all_) / 3))
        if len(candidates) < len(all_):  # the other questions, fitted on elsewhere, form the context
            count = len(candidates)
        return new[np.isin(questions[new], candidates[:count])]
    return rng.permutation(new)[: -(-len(of_user) // 3)]


def posts_of_split(population: Population, split: StudySplit) -> tuple[Posts | None, int]:
    """Return the posts of every person in a split, and the number of removed posts.

    For a person with several profiles, the profile of the first predicted comparison is used. A post that judges a
    response of any of the person's own comparisons reveals the choice, and is removed.
    """
    choices = population.choices
    if not population.profiles.mask.any():
        return None, 0
    users = np.arange(len(population.users))
    asked_first = np.lexsort((np.arange(len(choices)), ~split.queries, choices.users))
    first = asked_first[np.searchsorted(choices.users[asked_first], users)]
    posts = population.profiles.take(population.profile_of[first])
    assert posts.items is not None  # profiles read from comparisons name the judged items
    count = len(population.item_keys)
    judged = choices.users[:, None].astype(np.int64) * count + choices.texts
    leaking = posts.mask & (posts.items >= 0) & np.isin(users[:, None] * count + posts.items, judged)
    mask = posts.mask & ~leaking
    features = population.posts[posts.features] * mask[..., None]
    return Posts(features, mask, posts.signs * mask, np.where(mask, posts.items, -1)), int(leaking.sum())


def check_wrappers(population: Population, split: StudySplit, *, relaxed: bool = False) -> dict[str, Any]:
    """Reject data whose labels are revealed by only the wrapping of the responses.

    A linear classifier is fitted on the differences of the wrappers of seen people's choices, and predicts the choices
    of all other people; a tie counts as half. If several people judge the same texts, the accuracy must exceed chance
    over texts too: a few popular texts that happen to end in a quotation mark are not a leak. Chance is the median
    accuracy with wrappers exchanged among the texts, because popular texts are liked by other people too.

    If the texts with the strongest wrapper both win and lose, the wrapper belongs to the content, e.g. a quotation mark
    after a punch line, and not to the label. This raises only a warning.

    Args:
      population: The people.
      split: Split of the people.
      relaxed: If True, raise nothing and do not warn, for any accuracy.

    Returns:
      "wrapper_accuracy", the accuracy of the classifier; "wrapper_detectable", the smallest leak, beyond chance, that
      would have been rejected in 80 % of such studies: None if no two responses differ in their wrappers, or no leak
      would be rejected. If the accuracy is suspicious, also "wrapper", the strongest one, "wrapper_chance", and
      "wrapper_both_ways", the share of its texts, of those judged twice or more, that won and lost.

    Raises:
      RunError: the accuracy is above chance, and the wrapper reveals the label.
    """
    choices = population.choices
    wrapped = wrapper_features(population.texts)
    tested = split.part[choices.users] != SEEN_PART
    scores, weights = _wrapper_scores(choices, split, wrapped)
    decided = scores != 0
    check: dict[str, Any] = {"wrapper_accuracy": _tie_half(scores), "wrapper_detectable": None}
    if not decided.any():
        return check
    clusters = population.clusters.take(np.flatnonzero(tested)[decided].tolist())
    right = (scores > 0)[decided]
    paired = difference_interval(np.where(right, 1, -1), clusters, level=LEVEL)
    if paired.standard_error is not None and paired.degrees is not None:
        error = paired.standard_error / 2
        least = smallest_shift(right.astype(float), standard_error=error, degrees=paired.degrees, level=LEVEL)
        check["wrapper_detectable"] = least and max(least * float(decided.mean()), MARGIN)
    interval = accuracy_interval(right, clusters, level=LEVEL)
    if check["wrapper_accuracy"] < 0.5 + MARGIN or interval.low is None or interval.low <= 0.5:
        return check
    rng = np.random.default_rng([split.seed, 13])
    exchanged = [_wrapper_scores(choices, split, rng.permutation(wrapped))[0] for _ in range(EXCHANGES)]
    chance = max(float(np.median([_tie_half(one) for one in exchanged])), 0.5)
    deltas = wrapped[choices.chosen[tested]] - wrapped[choices.rejected[tested]]
    strongest = int(np.abs((deltas * weights).sum(0)).argmax())
    name = list(WRAPPERS)[strongest]
    both_ways, expected = _both_ways(choices, wrapped[:, strongest])
    check |= {"wrapper": name, "wrapper_chance": chance, "wrapper_both_ways": both_ways}
    share = float(decided.mean())
    if check["wrapper_accuracy"] < chance + MARGIN or (interval.low - 0.5) * share <= chance - 0.5 or relaxed:
        return check
    if both_ways is not None and expected is not None and both_ways >= CONTENT * expected > 0:
        warnings.warn(
            f"{name} goes with the choices (a classifier that reads nothing but the wrapping of the responses is right "
            f"in {check['wrapper_accuracy']:.3f}, by chance {chance:.3f}), but belongs to what was written: "
            f"{both_ways:.0%} of its texts both win and lose",
            PrbWarning,
            stacklevel=2,
        )
        return check
    raise RunError(
        f"the wrapping of the responses tells the labels: {name} alone marks the "
        f"{'preferred' if weights[strongest] > 0 else 'rejected'} ones, and a classifier that reads nothing else is "
        f"right in {check['wrapper_accuracy']:.3f} of {int(tested.sum()):,} comparisons of people that it was not "
        f"fitted on (chance: {chance:.3f}). Write both responses of a comparison in the same way. If the "
        "difference is genuine, allow it with --relax wrapper; every table will state this"
    )


def _wrapper_scores(
    choices: Choices, split: StudySplit, wrapped: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of the choices of people outside the seen part, above 0 for the chosen response, and the weight
    of each wrapper."""
    deltas = wrapped[choices.chosen] - wrapped[choices.rejected]
    fitted = deltas[split.trained]
    weights = fitted.sum(0) / (np.abs(fitted).sum(0) + 1)  # shrunk naive Bayes weights
    return deltas[split.part[choices.users] != SEEN_PART] @ weights, weights


def _tie_half(scores: np.ndarray) -> float:
    return float(np.mean((scores > 0) + 0.5 * (scores == 0)))


def _both_ways(choices: Choices, has: np.ndarray) -> tuple[float | None, float | None]:
    """Return the share of a wrapper's texts that both won and lost, among texts judged twice or more against texts
    without it; and the expected share if all win equally often. None without such texts."""
    chosen = has[choices.chosen] > 0
    told = chosen != (has[choices.rejected] > 0)
    if not told.any():
        return None, None
    texts = np.where(chosen, choices.texts[:, 0], choices.texts[:, 1])[told]
    _, place, judged = np.unique(texts, return_inverse=True, return_counts=True)
    won = np.bincount(place, weights=chosen[told])
    several = judged > 1
    if not several.any():
        return None, None
    often, share = judged[several], float(chosen[told].mean())
    both = (won[several] > 0) & (won[several] < often)
    return float(both.mean()), float(np.mean(1 - share**often - (1 - share) ** often))


def check_norms(population: Population, split: StudySplit, features: np.ndarray) -> float:
    """Reject features that were computed differently for seen and for unseen people.

    Returns:
      Ratio of the mean feature norm of unseen people's responses to seen people's.

    Raises:
      RunError: the ratio is above 1.5 or below 1 / 1.5.
    """
    choices = population.choices
    lengths = np.linalg.norm(features, axis=1)
    unseen = split.part[choices.users] == UNSEEN_PART
    here = [np.mean(lengths[[choices.chosen[p], choices.rejected[p]]]) for p in (unseen, split.trained)]
    ratio = float(here[0] / max(here[1], 1e-30))
    if not 1 / NORMS < ratio < NORMS:
        raise RunError(
            f"the features of the responses that unseen people judge are {ratio:.2f} times as long as those of seen "
            "people: the two were not made in the same way"
        )
    return ratio
