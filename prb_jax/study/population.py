"""The people of a study: their comparisons as choices between rows of features, and all that is left out, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from prb_jax.data.comparison import Comparison, Message, Post
from prb_jax.errors import DataError, short_repr
from prb_jax.metrics.clusters import Clusters
from prb_jax.personal.features import FeatureStore, post_key, read_post
from prb_jax.personal.few_shot.choices import Choices
from prb_jax.personal.history import CONTRADICTED, IDENTICAL, preferred_pairs
from prb_jax.scoring.comparison_table import clusters_of

NO_USER: Final[str] = "comparisons without a user"
REPEATED: Final[str] = "a choice that the same user made before"
EXCLUDED: Final = (NO_USER, IDENTICAL, REPEATED, CONTRADICTED)


@dataclass(frozen=True)
class Profiles:
    """Distinct profiles, padded to the longest one.

    Attributes:
      features: float32 [N, D], of each distinct post, as they are stored.
      rows: int32 [P, M], the post of each place; any number where the mask is False.
      mask: bool [P, M].
      signs: float32 [P, M], as of :class:`prb_jax.personal.few_shot.choices.Posts`.
      items: int32 [P, M], likewise.
    """

    features: np.ndarray
    rows: np.ndarray
    mask: np.ndarray
    signs: np.ndarray
    items: np.ndarray

    __repr__ = short_repr


@dataclass(frozen=True)
class Population:
    """The choices of all people of a data set.

    Attributes:
      choices: n choices with the features as they are stored, without posts; ``items`` are equal for equal texts of
        responses.
      profiles: the distinct profiles.
      profile_of: int32 [n], the profile of each choice.
      users: the name of each user.
      ids: the comparison of each choice; one of K > 2 responses gives a choice for each response that is not among the
        best.
      subsets: the subset of each choice's comparison, or None.
      texts: [R] the text of each row of features.
      prompts: [R] the conversation before it.
      item_keys: uint8 [I, 16], the digest of each item's text.
      clusters: of the choices.
      excluded: how many choices were left out, by reason.
    """

    choices: Choices
    profiles: Profiles
    profile_of: np.ndarray
    users: tuple[str, ...]
    ids: tuple[str, ...]
    subsets: tuple[str | None, ...]
    texts: tuple[str, ...]
    prompts: tuple[tuple[Message, ...], ...]
    item_keys: np.ndarray
    clusters: Clusters
    excluded: Mapping[str, int]

    __repr__ = short_repr


@dataclass(frozen=True)
class _Choice:
    comparison: int
    user: str
    question: str
    chosen: int
    rejected: int
    sides: tuple[int, int]  # of these responses in the comparison

    @property
    def pair(self) -> tuple[str, int, int]:
        return self.user, min(self.chosen, self.rejected), max(self.chosen, self.rejected)


def read_population(comparisons: Sequence[Comparison], store: FeatureStore) -> Population:
    """Return the choices of people, with the features of a store.

    Raises:
      DataError: no comparison names a user, nothing is left, or a text has no features in the store.
    """
    texts, prompts = [""] * len(store.answers), [tuple[Message, ...]()] * len(store.answers)
    found = list[_Choice]()
    excluded: Counter[str] = Counter(dict.fromkeys(EXCLUDED, 0))
    for number, comparison in enumerate(comparisons):
        if comparison.user_id is None:
            excluded[NO_USER] += 1
            continue
        rows = store.answer_rows(comparison)
        for row, text in zip(rows, comparison.responses, strict=True):
            texts[row], prompts[row] = text, comparison.prompt
        question = "\n".join(f"{message.role}: {message.content}" for message in comparison.prompt)
        for chosen, rejected in preferred_pairs(comparison):
            sides = (chosen, rejected)
            found.append(_Choice(number, comparison.user_id, question, rows[chosen], rows[rejected], sides))
    if not found:
        raise DataError(
            "no comparison names a user (field 'user_id'): methods of personalisation learn from the comparisons of "
            "each person"
        )
    kept = _kept(found, excluded)
    if not kept:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in excluded.items() if count)
        raise DataError(f"no comparison is left to learn from ({reasons})")
    places = [choice.comparison for choice in kept]
    used = sorted(set(places))
    order = {place: number for number, place in enumerate(used)}
    clusters = clusters_of([comparisons[place] for place in used])
    names = tuple(dict.fromkeys(choice.user for choice in kept))
    number_of = {name: number for number, name in enumerate(names)}
    questions = {name: number for number, name in enumerate(dict.fromkeys(c.question for c in kept))}
    keys = [post_key(text) for text in texts]
    items = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    numbers: dict[tuple[Post, ...], int] = {}
    profile_of = [numbers.setdefault(comparisons[place].profile, len(numbers)) for place in places]
    shown = [store.shown_rewards(comparisons[place]) for place in used]
    in_context = [
        None if rewards is None else rewards[list(choice.sides)]
        for rewards, choice in zip((shown[order[place]] for place in places), kept, strict=True)
    ]
    every = range(len(store.answers))
    choices = Choices(
        features=store.answers.read(every),
        base_scores=None if store.rewards is None else store.rewards.read(every)[:, 0],
        in_context=None if store.shown is None else np.array(in_context, np.float32),
        chosen=np.array([c.chosen for c in kept], np.int32),
        rejected=np.array([c.rejected for c in kept], np.int32),
        users=np.array([number_of[c.user] for c in kept], np.int32),
        questions=np.array([questions[c.question] for c in kept], np.int32),
        number_of_users=len(names),
        items=np.array([items[key] for key in keys], np.int32),
    )
    return Population(
        choices=choices,
        profiles=_profiles(list(numbers), store, items),
        profile_of=np.array(profile_of, np.int32),
        users=names,
        ids=tuple(comparisons[place].id for place in places),
        subsets=tuple(comparisons[place].subset for place in places),
        texts=tuple(texts),
        prompts=tuple(prompts),
        item_keys=np.frombuffer(b"".join(items), np.uint8).reshape(len(items), -1),
        clusters=clusters.take([order[place] for place in places]),
        excluded=dict(excluded),
    )


def _kept(found: Sequence[_Choice], excluded: Counter[str]) -> list[_Choice]:
    """The choices that say something, each once; the others are counted."""
    ways: dict[tuple[str, int, int], set[int]] = {}
    for choice in found:
        ways.setdefault(choice.pair, set()).add(choice.chosen)
    kept, seen = list[_Choice](), set[tuple[str, int, int]]()
    for choice in found:
        if choice.chosen == choice.rejected:
            excluded[IDENTICAL] += 1
        elif len(ways[choice.pair]) > 1:
            excluded[CONTRADICTED] += 1
        elif choice.pair in seen:
            excluded[REPEATED] += 1
        else:
            seen.add(choice.pair)
            kept.append(choice)
    return kept


def _profiles(
    profiles: Sequence[tuple[Post, ...]], store: FeatureStore, items: Mapping[bytes, int]
) -> Profiles:
    shape = (len(profiles), max(map(len, profiles)))
    rows, known = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    mask, signs = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, posts in enumerate(profiles):
        count = len(posts)
        read = [read_post(post) for post in posts]
        rows[number, :count] = store.post_rows(posts)
        mask[number, :count] = True
        signs[number, :count] = [each.sign for each in read]
        known[number, :count] = [items.get(post_key(each.text), -1) for each in read]
    return Profiles(store.posts.read(range(len(store.posts))), rows, mask, signs, known)
