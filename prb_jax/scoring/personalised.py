"""A fitted method with its backbone as a model: it adapts to a person from comparisons and scores for that person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, TypedDict

import jax
import numpy as np

from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.personal import SPLITS
from prb_jax.personal.embedder import EmbeddedTexts, Embedder
from prb_jax.personal.features import read_post
from prb_jax.personal.few_shot.protocol import BATCH, adapt_rows, in_batches, score_rows, score_table
from prb_jax.personal.history import (
    by_user,
    informative_comparisons,
    refuse_query_in_history,
    without_shared_responses,
)
from prb_jax.personal.saved import FittedMethod, UserStates, read_states, save_states
from prb_jax.platform.paths import shown
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.intake import Records, as_comparisons, digest
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.runs.sealed import check_file
from prb_jax.scoring.scorer import Scorer
from prb_jax.trees.tree import ScoredBatch, Skip, Truncation, skip_nothing

MOST: Final = 64  # maximum number of comparisons to adapt on, the latest ones

History = tuple[tuple[Comparison, ...], tuple[Post, ...]]  # context of a person: comparisons and posts

Query = tuple[str, tuple[Comparison, ...], Comparison]
"""A user, the user's earlier comparisons, and the comparison to score."""


class _Split(TypedDict):
    seen: list[str]
    validation: list[str]


class SplitsFile(TypedDict):
    """The part of a study's ``splits.json`` that a fitted method reads."""

    splits: list[_Split]


@dataclass(eq=False)
class PersonalisedModel(Scorer):
    """A model that adapts to people. Build with :func:`prb_jax.load`, from a folder of a fitted method.

    Attributes:
      fitted: Fitted method.
      embedder: Backbone.
      contexts: Comparisons of each user: see :meth:`adapt`.
      earlier: If True, an evaluation also adapts to the user's comparisons earlier in the data.
      left_out: Number of uninformative comparisons in the history, by reason.
      saved: Saved states of people: see :meth:`load_states`. Comparisons given to :meth:`adapt` take precedence.
      swapped: Original comparisons of a control that names other users: see :meth:`with_other_states`.
    """

    fitted: FittedMethod
    embedder: Embedder = field(repr=False)
    contexts: dict[str, tuple[Comparison, ...]] = field(default_factory=dict, repr=False)
    earlier: bool = True
    left_out: Mapping[str, int] = field(default_factory=dict, repr=False)
    saved: UserStates | None = field(default=None, repr=False)
    swapped: Sequence[Comparison] | None = field(default=None, repr=False)
    _features: dict[bytes, np.ndarray] = field(default_factory=dict, repr=False)
    _texts: EmbeddedTexts = field(init=False, repr=False)

    uses: ClassVar[tuple[str, ...]] = ()
    adapts: ClassVar[bool] = True

    __repr__ = short_repr

    def __post_init__(self) -> None:
        self._texts = EmbeddedTexts(self.embedder, self.fitted.standard, self.fitted.items, self._features)

    @property
    def decided(self) -> str:
        """Reason why it has no view options."""
        return "what a fitted method reads was decided with its features"

    @property
    def name(self) -> str:
        """Folder of the fitted method."""
        return shown(str(self.fitted.path))

    def rendered_mark(self, text: str) -> str | None:
        """Return the mark that shows that the backbone's chat template has rendered a text already, or None."""
        backbone = getattr(self.embedder, "model", None)  # encoders of single texts have no template
        return backbone.rendered_mark(text) if isinstance(backbone, Scorer) else None

    def adapt(self, user: str, comparisons: Records) -> Any:
        """Adapt to a person, replacing earlier comparisons of this person.

        Args:
          user: Name of the person: the ``user_id`` of later comparisons, or the `user` of :meth:`score`.
          comparisons: Labelled comparisons or records of this person; only the latest 64 count.

        Returns:
          The person's state, a tree of small arrays.

        Raises:
          DataError: A comparison lacks labels, or belongs to another user.
        """
        given = tuple(as_comparisons(comparisons))
        for comparison in given:
            if comparison.user_id not in (None, user):
                raise DataError(
                    f"comparison {quote(comparison.id)}: user {quote(comparison.user_id)}, expected {quote(user)}"
                )
        self.contexts[user] = given
        self._texts.embed(given)
        return jax.tree.map(lambda leaf: leaf[0], self._states([(given, _profile(given))]))

    def score(self, comparisons: Records, *, user: str | None = None) -> np.ndarray | list[np.ndarray]:
        """Return one float32 array [K] per comparison or record; only the array for a single one.

        Unknown users are scored with the method's state for new people; :meth:`unknown` lists them.

        Args:
          comparisons: Comparisons to score; labels are ignored.
          user: User for all comparisons; each comparison's ``user_id`` if not given.
        """
        given = as_comparisons(comparisons, labelled=False)
        users = [str(user or one.user_id) for one in given]
        asked = [(name, self.contexts.get(name, ()), one) for name, one in zip(users, given, strict=True)]
        scores = self._score(asked)
        return scores[0] if isinstance(comparisons, Comparison | Mapping) else scores

    def save_states(self, folder: str | Path) -> int:
        """Write the states of all people given to :meth:`adapt`, which replace their comparisons; return bytes on disk.

        Raises:
          RunError: No person was adapted to, or the folder cannot be written.
        """
        if not self.contexts:
            raise RunError("states: there are no users; adapt to users first")
        self._texts.embed([one for known in self.contexts.values() for one in known])
        states = self._states([(known, _profile(known)) for known in self.contexts.values()])
        return save_states(folder, UserStates(tuple(self.contexts), states), **self._fit)

    def load_states(self, folder: str | Path) -> tuple[str, ...]:
        """Read states of people, written by :meth:`save_states` or a study, and return their names.

        Raises:
          RunError: The folder contains no states, they are from another method or another fit, or a file is damaged.
        """
        self.saved = read_states(folder, mesh=None, **self._fit)
        return self.saved.users

    @property
    def _fit(self) -> dict[str, str]:
        """Fields of saved states that identify the fitted method."""
        return {"method": self.fitted.facts["method"], "fitted": self.fitted.facts["digest"]}

    def margins(
        self, contexts: Sequence[tuple[Comparison, ...]], queries: Sequence[Comparison]
    ) -> np.ndarray:
        """Return score margins (first response minus second), float32 [contexts, queries].

        Each context is one person. Profiles of queries are ignored.
        """
        self._texts.embed([*(one for context in contexts for one in context), *queries])
        states = self._states([(context, _profile(context)) for context in contexts])
        pairs = self._texts.responses([[(query, 0), (query, 1)] for query in queries])
        run = partial(score_table, self.fitted.method, self.fitted.fitted, pairs)
        scores = in_batches(run, (states, np.arange(len(contexts))))
        return scores[..., 0] - scores[..., 1]

    def pref_rule(self, context: tuple[Comparison, ...], queries: Sequence[Comparison]) -> np.ndarray | None:
        """Return how informative each question is by PReF's rule, float32 [queries]; None for another method."""
        if self.fitted.method.name != "pref":
            return None
        from prb_jax.personal.few_shot.pref import next_question

        self._texts.embed([*context, *queries])
        first, second = (
            self._texts.responses([[(query, k)] for query in queries]).take((slice(None), 0)) for k in (0, 1)
        )
        known = self._texts.contexts([(context, ())], most=MOST)
        state, context_of_person = jax.tree.map(lambda leaf: leaf[0], (self._states([(context, ())]), known))
        return np.asarray(next_question(self.fitted.fitted, state, context_of_person, first, second))

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the number of users it was fitted on, of users that its history lacks, and of uninformative
        comparisons in it."""
        fitted_on = len(self.fitted_on(comparisons))
        users = {one.user_id for one in comparisons if one.user_id is not None}
        return {
            "users_fitted_on": fitted_on,
            "history_left_out": dict(self.left_out) or None,
            "users_without_history": None if self.earlier else len(users - self._remembered),
        }

    @property
    def _remembered(self) -> set[str]:
        """Users with comparisons or a saved state."""
        return self.contexts.keys() | set(() if self.saved is None else self.saved.users)

    def unknown(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users without any context: no other comparison, no post and no saved state."""
        counts = Counter(one.user_id for one in comparisons if one.user_id is not None)
        known = {one.user_id for one in comparisons if one.profile} | self._remembered
        if self.earlier:
            known |= {user for user, count in counts.items() if count > 1}
        return counts.keys() - known

    def fitted_on(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users of the comparisons that the method was fitted or validated on.

        The study's ``splits.json``, two folders above the method, names them; without this file the set is empty.
        """
        path = self.fitted.path.absolute().parents[1] / SPLITS
        if not path.is_file():
            return set()
        check_file(path)
        splits = read_object(path, error=RunError)
        check_schema(splits, SplitsFile, where=str(path), error=RunError)
        if not splits["splits"]:
            raise RunError(f"{path}: field 'splits': expected a split or more, found none")
        first = splits["splits"][0]
        return {*first["seen"], *first["validation"]} & {str(one.user_id) for one in comparisons}

    def with_history(self, history: Sequence[Comparison] | Path) -> PersonalisedModel:
        """Return the same model, adapted only to the users of these comparisons, or of the states in a folder.

        Comparisons of identical responses, and pairs that the same user judged both ways, are left out and counted.

        Raises:
          DataError: A comparison lacks a user.
          RunError: The folder cannot be used: see :meth:`load_states`.
        """
        if isinstance(history, Path):
            model = replace(self, contexts={}, earlier=False, left_out={})
            model.load_states(history)
            return model
        by_user(history)  # raises an error for a comparison without a user
        kept, left_out = informative_comparisons(history)
        return replace(self, contexts=by_user(kept), earlier=False, left_out=left_out, saved=None)

    def with_other_states(self, comparisons: Sequence[Comparison]) -> PersonalisedModel:
        """Return the same model for a control that names another user for each person.

        The control uses the whole state of the other user. The state is learned from as many comparisons of the other
        user as the person has made before, never from the person's comparisons. Comparisons that share a response with
        the query are left out.

        Args:
          comparisons: Original comparisons, in the order of the ones with other users that :meth:`stream` gets.
        """
        return replace(self, swapped=comparisons)

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the scores, JSON-ready."""
        facts, known = self.fitted.facts, [c for of_user in self.contexts.values() for c in of_user]
        alone = "the history alone" if self.saved is None else "saved states alone"
        return {
            "name": self.name,
            "method": facts["method"],
            "settings": facts["settings"],
            "arrays": facts["digest"],
            "backbone": facts["backbone"]["identity"],
            "history": digest(known) if known else None,
            **({} if self.saved is None else {"states": self.saved.digest}),
            "adapts_on": "earlier comparisons of the data" if self.earlier else alone,
        }

    def stream(
        self, comparisons: Sequence[Comparison], *, skip: Skip = skip_nothing, **_: Any
    ) -> Iterator[ScoredBatch]:
        """Score every comparison with the context of its user; see :class:`PersonalisedModel`."""
        before: dict[str | None, list[Comparison]] = {}
        made = Counter[str | None]()  # in a control: earlier comparisons of each original person
        if self.swapped is not None and self.earlier:
            for one in self.swapped:
                before.setdefault(str(one.user_id), []).append(one)
        for start in range(0, len(comparisons), BATCH):
            indices = range(start, min(start + BATCH, len(comparisons)))
            shown = []
            for index in indices:
                one = comparisons[index]
                known = self.contexts.get(str(one.user_id), ())
                of_user = (
                    before.setdefault(one.user_id, []) if one.user_id is not None and self.earlier else []
                )
                if self.swapped is None:
                    refuse_query_in_history(known, one)
                    latest = of_user[-MOST:]
                    of_user.append(one)
                else:
                    person = self.swapped[index].user_id
                    latest = of_user[: made[person]][-MOST:]
                    made[person] += 1
                shown.append((str(one.user_id), without_shared_responses((*known, *latest), one), one))
            if not skip(indices):
                scores = self._score(shown)
                yield ScoredBatch(indices, scores, [0] * len(indices), [Truncation()] * len(indices))

    def _score(self, shown: Sequence[Query]) -> list[np.ndarray]:
        """Return the scores of queries: from the saved state if the user has no comparisons, otherwise from a state
        that is adapted now."""
        self._texts.embed([one for _, context, query in shown for one in (*context, query)])
        saved = {} if self.saved is None else self.saved.rows
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(shown)
        by_saved: dict[bool, list[int]] = {}
        for place, (user, context, _) in enumerate(shown):
            by_saved.setdefault(user in saved and not context, []).append(place)
        for is_saved, places in by_saved.items():
            rows = [shown[place] for place in places]
            if is_saved and self.saved is not None:
                states = self.saved.of([user for user, *_ in rows])
            else:
                states = self._adapted_states(rows)
            queries = [query for *_, query in rows]
            for size in sorted({len(query.responses) for query in queries}):
                members = [row for row, query in enumerate(queries) if len(query.responses) == size]
                responses = self._texts.responses([[(queries[m], k) for k in range(size)] for m in members])
                of_members = jax.tree.map(lambda leaf, m=members: leaf[m], states)
                run = partial(score_rows, self.fitted.method, self.fitted.fitted)
                for member, row in zip(members, in_batches(run, (of_members, responses)), strict=True):
                    scores[places[member]] = np.asarray(row, np.float32)
        return scores

    def _adapted_states(self, shown: Sequence[Query]) -> Any:
        """Return the state for each query from the user's earlier comparisons; equal contexts are computed once."""
        known: dict[Any, History] = {}
        keys = []
        for _, context, query in shown:
            latest = context[-MOST:]
            profile = query.profile or _profile(context)
            # a post that judges a response of the query would reveal the label
            posts = tuple(post for post in profile if read_post(post).text not in query.responses)
            keys.append((tuple(map(id, latest)), posts))
            known.setdefault(keys[-1], (latest, posts))
        numbers = {key: number for number, key in enumerate(known)}
        rows = np.array([numbers[key] for key in keys])
        return jax.tree.map(lambda leaf: leaf[rows], self._states(list(known.values())))

    def _states(self, known: Sequence[History]) -> Any:
        """Return the states of people, stacked on axis 0 of each leaf; the method's empty state for unknown people."""
        contexts = self._texts.contexts(known, most=MOST)
        method, fitted = self.fitted.method, self.fitted.fitted
        states = in_batches(partial(adapt_rows, method, fitted), (contexts,))
        unknown = ~contexts.mask.any(1)
        if contexts.posts is not None:
            unknown &= ~contexts.posts.mask.any(1)
        if not unknown.any():
            return states

        def or_empty(leaf: np.ndarray, empty: Any) -> np.ndarray:
            return np.where(unknown.reshape(-1, *[1] * (leaf.ndim - 1)), np.asarray(empty), leaf)

        return jax.tree.map(or_empty, states, method.empty_state(fitted))


def _profile(context: Sequence[Comparison]) -> tuple[Post, ...]:
    return next((one.profile for one in reversed(context) if one.profile), ())
