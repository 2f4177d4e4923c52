"""The choices of people among responses, as arrays, and the part of them that a method sees of one person.

Letters: R distinct responses, D features of one, n choices, U users, k comparisons of one user, K responses of one
comparison, M posts of a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import jax
import numpy as np

from prb_jax.errors import DataError

Array = Any  # a numpy or jax array

Adapter = Any
"""The trained part of a backbone, a tree of float32 arrays of the host: low-rank factors and the score head."""

AdapterTrainer = Callable[[np.ndarray, Adapter | None], Adapter]
"""``(members, start)`` -> the adapter after the trainer's number of steps on the choices at the places ``members``,
int [m]; it starts as ``start``, or as the backbone is where that is None."""


class Backbone(Protocol):
    """A trainable model, with the responses behind R rows of features."""

    def trainer(self, pairs: np.ndarray, *, settings: Any, steps: int, seed: int) -> AdapterTrainer:
        """Return a trainer of adapters.

        Args:
          pairs: Rows of the chosen and of the rejected response of each choice, int [n, 2].
          settings: Settings of the adapters, :class:`prb_jax.personal.few_shot.lora.AdapterSettings`.
          steps: Number of updates in each training.
          seed: Seed for the factors and the order of the choices.
        """
        ...

    def rewards(self, adapters: Adapter, *, settings: Any) -> np.ndarray:
        """Return the reward of every response under each of C adapters, float32 [R, C]; the arrays of ``adapters`` have
        a leading axis C."""
        ...


class ArrayTable:
    """Arrays that share their leading axes."""

    def take(self, rows: Array) -> Self:
        """Return the ``rows`` (int32, any shape) of a table with one leading axis."""
        return jax.tree.map(lambda leaf: leaf[rows], self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Responses(ArrayTable):
    """Responses with the facts that a method may use of each."""

    # float32 [..., D], the backbone's state at the read position of the response given the question
    features: Array
    # int32 [...], the identity of the response's text, equal wherever the same text is judged
    items: Array | None = None
    base_scores: Array | None = None  # float32 [...], the backbone's own reward, where it has one
    # float32 [...], the reward of the same backbone when it saw this user's profile
    in_context: Array | None = None
    prompts: Array | None = None  # float32 [..., D], the backbone's state of the question alone


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Posts(ArrayTable):
    """The posts of a profile, padded; a table of users has a leading axis U."""

    features: Array  # float32 [..., M, D], the backbone's states of the posts
    mask: Array  # bool [..., M], True where there is a post
    # float32 [..., M]: 1 where the post is a text that the user agrees with, -1 where it is a text that the
    # user disagrees with, 0 for the user's own words
    signs: Array | None = None
    # int32 [..., M], the identity of the post's text among ``Responses.items``, -1 for no such text
    items: Array | None = None

    @property
    def votes(self) -> Array:
        """float32 [..., M]: ``signs``, or 0 throughout."""
        return np.zeros(self.mask.shape, np.float32) if self.signs is None else self.signs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """All that a method sees of one user: k comparisons and the profile's posts.

    Only the masks mark padding, never features of zero.
    """

    chosen: Responses  # the responses of the comparisons, with leading axis k
    rejected: Responses  # the responses of the comparisons, with leading axis k
    mask: Array  # bool [k], True where there is a comparison
    posts: Posts | None = None  # the user's posts; None where the data have none

    @property
    def deltas(self) -> Array:
        """Features of chosen minus rejected, float32 [k, D]; zero for padding."""
        return (self.chosen.features - self.rejected.features) * self.mask[:, None]


@dataclass(frozen=True)
class UserRows:
    """Comparisons grouped by user: the k of a context, or the queries to be scored. Numpy arrays of the host."""

    users: np.ndarray  # int32 [U], the user of each row, and the user's row in the table of posts
    # int32 [U, k], the places of the choices in their `Choices`; any number where the mask is False
    places: np.ndarray
    mask: np.ndarray  # bool [U, k]

    def first(self, count: int, *, width: int | None = None) -> UserRows:
        """Return the first ``count`` comparisons of every user, in ``width`` places: at least 1, and ``count`` if not
        given. One width for several counts means one compiled program for all of them."""
        width = max(1, count if width is None else width)
        spare = max(0, width - self.places.shape[1])
        places, mask = (np.pad(table, ((0, 0), (0, spare)))[:, :width] for table in (self.places, self.mask))
        return UserRows(self.users, places, mask & (np.arange(width) < count))

    def of(self, users: np.ndarray) -> UserRows:
        """Return the rows of ``users`` in their order; a user without any has an empty row."""
        rows = {int(user): row for row, user in enumerate(self.users)}
        kept = np.array([rows.get(int(user), -1) for user in users], np.int64)
        mask = self.mask[kept] & (kept >= 0)[:, None]
        return UserRows(np.asarray(users, np.int32), self.places[kept], mask)

    @classmethod
    def stacked(cls, parts: Sequence[UserRows]) -> UserRows:
        """Return the rows of several, one below the other."""
        width = max(part.places.shape[1] for part in parts)
        rows = [[np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in (p.places, p.mask)] for p in parts]
        places, mask = (np.concatenate(tables) for tables in zip(*rows, strict=True))
        return cls(np.concatenate([part.users for part in parts]), places, mask)


PER_CHOICE = ("chosen", "rejected", "users", "questions", "in_context", "queries")
"""The fields of `Choices` that have an entry for each choice."""


@dataclass(frozen=True)
class Choices:
    """The choices of people between two responses each."""

    # float32 [R, D] of distinct responses, see `Responses`; standardised by the caller on the seen part
    features: Array
    chosen: np.ndarray  # int32 [n], rows of ``features``
    rejected: np.ndarray  # int32 [n], rows of ``features``
    users: np.ndarray  # int32 [n], below ``number_of_users``
    questions: np.ndarray  # int32 [n], the identity of the question
    number_of_users: int  # U
    items: Array | None = None  # as in `Responses`, with leading axis R
    base_scores: Array | None = None  # as in `Responses`, with leading axis R
    prompts: Array | None = None  # as in `Responses`, with leading axis R
    # float32 [n, 2], of the chosen and of the rejected response, by the backbone that saw the profile
    in_context: Array | None = None
    posts: Posts | None = None  # the profiles, with leading axis U
    backbone: Backbone | None = None  # the model of the features, where it can be trained
    # for users of a validation part: bool [n], True for choices to predict, False for choices to adapt on; or
    # int [n], see `rows_by_fold`. If None, `halves` divides the choices of each user
    queries: np.ndarray | None = None

    def __post_init__(self) -> None:
        rows, count = len(self.features), len(self.chosen)
        if np.ndim(self.features) != 2:
            raise DataError(f"choices: features: expected [R, D], found shape {np.shape(self.features)}")
        per_row = [(name, getattr(self, name), rows) for name in ("items", "base_scores", "prompts")]
        per_choice = [(name, getattr(self, name), count) for name in PER_CHOICE]
        profiles = ("posts", self.posts and self.posts.features, self.number_of_users)
        for name, values, length in (*per_row, *per_choice, profiles):
            if values is not None and len(values) != length:
                raise DataError(f"choices: {name}: expected {length} rows, found {len(values)}")
        for name, limit in (("chosen", rows), ("rejected", rows), ("users", self.number_of_users)):
            values = np.asarray(getattr(self, name))
            if count and (values.min() < 0 or values.max() >= limit):
                bad = int(np.flatnonzero((values < 0) | (values >= limit))[0])
                raise DataError(
                    f"choices: {name}[{bad}]: expected 0 to {limit - 1}, found {int(values[bad])}"
                )
        for name in ("features", "base_scores", "prompts", "in_context"):
            values = getattr(self, name)
            if values is not None and not np.isfinite(np.asarray(values)).all():
                raise DataError(f"choices: {name}: expected finite numbers, found NaN or infinity")

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def table(self) -> Responses:
        """The distinct responses, with leading axis R; without ``in_context``, which depends on the user too."""
        return Responses(self.features, self.items, self.base_scores, None, self.prompts)

    @property
    def deltas(self) -> np.ndarray:
        """float32 [n, D]: chosen minus rejected."""
        features = np.asarray(self.features, np.float32)
        return features[self.chosen] - features[self.rejected]

    @property
    def mean_square(self) -> np.float32:
        """The mean of |chosen minus rejected|^2."""
        return np.mean(np.sum(self.deltas**2, axis=1))

    @property
    def texts(self) -> np.ndarray:
        """int64 [n, 2]: the texts that were chosen and rejected, by ``items``, or by the rows of ``features``."""
        rows = np.stack([self.chosen, self.rejected], axis=1).astype(np.int64)
        return rows if self.items is None else np.asarray(self.items, np.int64)[rows]

    @property
    def people(self) -> int:
        """P, how many users made a choice."""
        return len(np.unique(np.asarray(self.users)))

    @property
    def person(self) -> np.ndarray:
        """int32 [n]: the users of the choices, numbered from 0 to P - 1."""
        return np.unique(np.asarray(self.users), return_inverse=True)[1].reshape(-1).astype(np.int32)

    @property
    def known_posts(self) -> np.ndarray:
        """bool [U, M]: the posts of the users who made a choice."""
        assert self.posts is not None
        return np.asarray(self.posts.mask) & np.isin(np.arange(self.number_of_users), self.users)[:, None]

    def profile_votes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the users, texts and signs of the votes on known texts, [m] each, in the profiles of the users who
        made a choice."""
        if self.posts is None or self.posts.items is None:
            return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32)
        texts, signs = np.asarray(self.posts.items), np.asarray(self.posts.votes)
        told = self.known_posts & (texts >= 0) & (signs != 0)
        return np.nonzero(told)[0], texts[told], signs[told]

    def only(self, places: np.ndarray) -> Choices:
        """Return the choices at ``places`` (int or bool [n]) with the same tables."""
        kept = {name: getattr(self, name) for name in PER_CHOICE if getattr(self, name) is not None}
        return replace(self, **{name: np.asarray(values)[places] for name, values in kept.items()})

    def turned_round(self) -> Choices:
        """Return the choices with chosen and rejected exchanged."""
        shown = None if self.in_context is None else np.asarray(self.in_context)[:, ::-1]
        return replace(self, chosen=self.rejected, rejected=self.chosen, in_context=shown)

    def require(self, method: str, needs: Sequence[str]) -> None:
        """Raise one clear DataError where nobody chose anything, or the data lack a field that a method needs; fields
        of the posts are named as ``posts.signs``."""
        if not len(self):
            raise DataError(f"{method}: expected at least one comparison, found none")
        for name in needs:
            value: Any = self
            for part in name.split("."):
                value = None if value is None else getattr(value, part)
            if value is None:
                raise DataError(f"{method} needs {_MEANING[name]}; the data have none")


_MEANING = {
    "items": "responses that several people judged (`items`)",
    "base_scores": "the backbone's own scores (`base_scores`)",
    "prompts": "the states of the questions alone (`prompts`)",
    "in_context": "the scores of the backbone that saw the profile (`in_context`)",
    "backbone": "a decoder that can be trained (a MODEL as backbone, not a folder of its features)",
    "posts": "the states of the profile's posts (`posts`)",
    "posts.signs": "posts that the user agrees or disagrees with (`posts.signs`)",
    "posts.items": "posts that are judged responses too (`posts.items`)",
}
assert set(_MEANING) >= {field.name for field in fields(Responses)} - {"features"}


def group(choices: Choices, among: np.ndarray | None = None, *, seed: int | None = None) -> UserRows:
    """Group choices, all or those in ``among`` (bool [n]), by user, padded to the largest number of one user.

    ``seed`` shuffles each user's choices; without a seed they keep the order of the data.
    """
    places = np.arange(len(choices)) if among is None else np.flatnonzero(among)
    if seed is not None:
        places = np.random.default_rng(seed).permutation(places)
    users = np.asarray(choices.users)[places]
    order = np.argsort(users, kind="stable")
    distinct, first, counts = np.unique(users[order], return_index=True, return_counts=True)
    width = int(counts.max(initial=1))
    column = np.arange(len(order)) - np.repeat(first, counts)
    table = np.zeros((len(distinct), width), np.int32)
    mask = np.zeros((len(distinct), width), bool)
    row = np.repeat(np.arange(len(distinct)), counts)
    table[row, column], mask[row, column] = places[order], True
    return UserRows(distinct.astype(np.int32), table, mask)


def halves(choices: Choices, *, seed: int) -> np.ndarray:
    """bool [n], True for the queries: half of each user's questions, or of their choices where they have one question.

    The only choice of a user is a query, and is predicted at zero shots.
    """
    rng = np.random.default_rng(seed)
    queries = np.zeros(len(choices), bool)
    grouped = group(choices)
    for places, mask in zip(grouped.places, grouped.mask, strict=True):
        of_user = places[mask]
        questions = rng.permutation(np.unique(np.asarray(choices.questions)[of_user]))
        if len(questions) > 1:
            queries[of_user] = np.isin(
                np.asarray(choices.questions)[of_user], questions[: (len(questions) + 1) // 2]
            )
        else:
            queries[rng.permutation(of_user)[: (len(of_user) + 1) // 2]] = True
    return queries


def contexts_and_queries(choices: Choices, *, seed: int) -> tuple[UserRows, UserRows]:
    """Return the comparisons to adapt on, in a random order, and those to predict, of the users who have any of these.

    A comparison that shares a response with a query of the same user reveals the query's label, and is not used to
    adapt. The queries come from ``choices``, or from `halves`.
    """
    asked = halves(choices, seed=seed) if choices.queries is None else np.asarray(choices.queries)
    fold = np.where(asked, 0, -1) if asked.dtype == bool else asked
    if not (fold >= 0).any():
        raise DataError("choices: queries: expected at least one comparison to predict, found none")
    return rows_by_fold(choices, fold, seed=seed)


def rows_by_fold(
    choices: Choices, fold: np.ndarray, *, seed: int, among: np.ndarray | None = None
) -> tuple[UserRows, UserRows]:
    """Return the comparisons to adapt on, in a random order, and those to predict, a row for each user and fold.

    Args:
      choices: Choices of any users.
      fold: Fold of each choice, int [n], from 0; -1 for choices not to predict. A fold is predicted from the user's
        choices outside the fold that share no response with it.
      seed: Seed for the order.
      among: Choices to use, bool [n]; all if None.
    """
    among = np.ones(len(choices), bool) if among is None else among
    contexts, queries = list[UserRows](), list[UserRows]()
    for number in range(max(1, int(fold.max(initial=0)) + 1)):
        of_fold = among & (fold == number)
        queries.append(group(choices, of_fold))
        users = queries[-1].users
        known = among & (fold != number) & ~shares_response(choices, of_fold)
        if known.any():
            contexts.append(group(choices, known, seed=seed).of(users))
        else:
            empty = np.zeros((len(users), 1), np.int32)
            contexts.append(UserRows(users, empty, empty > 0))
    return UserRows.stacked(contexts), UserRows.stacked(queries)


def shares_response(choices: Choices, queries: np.ndarray) -> np.ndarray:
    """bool [n], True for a choice that shares a response with a choice of the same user in ``queries``, bool [n]."""
    texts = choices.texts
    texts += np.asarray(choices.users, np.int64)[:, None] * (int(texts.max(initial=0)) + 1)
    return np.asarray(np.isin(texts, texts[queries]).any(axis=1))
