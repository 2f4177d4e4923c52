"""The people of a study: their comparisons as choices between rows of features, and the counts of exclusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, short_repr
from prb_jax.metrics.clusters import Clusters
from prb_jax.personal.embedder import pad_posts
from prb_jax.personal.features import FeatureStore, post_key
from prb_jax.personal.few_shot.choices import Choices, Posts
from prb_jax.personal.history import CONTRADICTED, IDENTICAL, preferred_pairs
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.conversation import transcript
from prb_jax.scoring.clusters import clusters_of

NO_USER: Final[str] = "comparisons without a user"
REPEATED: Final[str] = "a choice that the same user made before"
EXCLUDED: Final = (NO_USER, IDENTICAL, REPEATED, CONTRADICTED)


@dataclass(frozen=True)
class Population:
    """The choices of all people of a data set."""

    # n choices with the stored features, without posts; ``items`` are equal for responses with equal texts
    choices: Choices
    # the distinct profiles, [P, M]; the features of a post are replaced by its row in ``posts``
    profiles: Posts
    posts: np.ndarray  # float32 [N, D], stored features of each distinct post
    profile_of: np.ndarray  # int32 [n], profile of each choice
    users: tuple[str, ...]  # name of each user
    # comparison of each choice; a comparison of K > 2 responses gives a choice for each response that is not among
    # the best
    ids: tuple[str, ...]
    subsets: tuple[str | None, ...]  # subset of each choice's comparison, or None
    texts: tuple[str, ...]  # [R] text of each row of features
    prompts: tuple[tuple[Message, ...], ...]  # [R] conversation before each text
    item_keys: np.ndarray  # uint8 [I, 16], digest of each item's text
    clusters: Clusters  # clusters of the choices
    excluded: Mapping[str, int]  # number of excluded choices, by reason

    __repr__ = short_repr


@dataclass(frozen=True)
class _Choice:
    comparison: Comparison
    sides: list[int]  # the chosen and the rejected response
    rows: list[int]  # their features

    @property
    def pair(self) -> tuple[str | None, frozenset[int]]:
        return self.comparison.user_id, frozenset(self.rows)


def read_population(comparisons: Sequence[Comparison], store: FeatureStore) -> Population:
    """Return the choices of people, with the features of a store.

    Raises:
      DataError: no comparison names a user, no choice is left, or a text has no features in the store.
    """
    texts, prompts = [""] * len(store.answers), [tuple[Message, ...]()] * len(store.answers)
    candidates = list[_Choice]()
    excluded: Counter[str] = Counter(dict.fromkeys(EXCLUDED, 0))
    for comparison in comparisons:
        rows = store.answer_rows(comparison)
        for row, text in zip(rows, comparison.responses, strict=True):
            texts[row], prompts[row] = text, comparison.prompt
        if comparison.user_id is None:
            excluded[NO_USER] += 1
            continue
        pairs = preferred_pairs(comparison)
        candidates += [_Choice(comparison, [*sides], [rows[side] for side in sides]) for sides in pairs]
    if not candidates:
        raise DataError(
            "no comparison names a user (field 'user_id'): methods of personalisation learn from the comparisons of "
            "each person"
        )
    preferred: dict[Any, set[int]] = {}
    for choice in candidates:
        preferred.setdefault(choice.pair, set()).add(choice.rows[0])
    first_of = dict[Any, _Choice]()
    for choice in candidates:
        pair = choice.pair
        if len(pair[1]) == 1:
            excluded[IDENTICAL] += 1
        elif len(preferred[pair]) > 1:
            excluded[CONTRADICTED] += 1
        elif first_of.setdefault(pair, choice) is not choice:
            excluded[REPEATED] += 1
    kept = list(first_of.values())
    if not kept:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in excluded.items() if count)
        raise DataError(f"no comparison is left to learn from ({reasons})")
    chosen_from = [choice.comparison for choice in kept]
    distinct = {id(one): one for one in chosen_from}
    place = {key: number for number, key in enumerate(distinct)}
    shown = {key: store.shown_rewards(one) for key, one in distinct.items()}
    in_context = [
        None if (rewards := shown[id(one.comparison)]) is None else rewards[one.sides] for one in kept
    ]
    users, user_of = _numbered(str(one.user_id) for one in chosen_from)
    prompt_texts = (transcript(one.prompt) for one in chosen_from)
    _, questions = _numbered(prompt_texts)
    profiles, profile_of = _numbered(one.profile for one in chosen_from)
    items, item_of = _numbered(post_key(text) for text in texts)
    every = range(len(store.answers))
    choices = Choices(
        features=store.answers.read(every),
        base_scores=None if store.rewards is None else store.rewards.read(every)[:, 0],
        in_context=None if store.shown is None else np.array(in_context, np.float32),
        chosen=np.array([choice.rows[0] for choice in kept], np.int32),
        rejected=np.array([choice.rows[1] for choice in kept], np.int32),
        users=user_of,
        questions=questions,
        number_of_users=len(users),
        items=item_of,
    )
    return Population(
        choices=choices,
        profiles=pad_posts(
            profiles,
            lambda post: store.post_rows([post])[0],
            {key: number for number, key in enumerate(items)},
            width=max(map(len, profiles)),
        ),
        posts=store.posts.read(range(len(store.posts))),
        profile_of=profile_of,
        users=tuple(users),
        ids=tuple(one.id for one in chosen_from),
        subsets=tuple(one.subset for one in chosen_from),
        texts=tuple(texts),
        prompts=tuple(prompts),
        item_keys=np.frombuffer(b"".join(items), np.uint8).reshape(len(items), -1),
        clusters=clusters_of([*distinct.values()]).take([place[id(one)] for one in chosen_from]),
        excluded=dict(excluded),
    )


def _numbered(values: Iterable[Hashable]) -> tuple[list[Any], np.ndarray]:
    """Return the distinct values in order of first occurrence, and the number of each value, int32."""
    numbers: dict[Any, int] = {}
    rows = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(rows, np.int32)
