"""Sources of features: the state of a model at each response and each post, without any profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from prb_jax.models.readouts.text_encoder import TextEncoder
from prb_jax.personal.features import answer_key, post_key, read_post
from prb_jax.personal.few_shot.choices import Context, Posts, Responses
from prb_jax.personal.few_shot.protocol import next_power
from prb_jax.personal.history import preferred_pairs
from prb_jax.records.comparison import Comparison, Post
from prb_jax.text.view import TextProtocol, visible

Advance = Callable[[int, int], object]


@dataclass(frozen=True)
class Embedded:
    """The features of texts, float32 [n, D], and the model's own rewards, float32 [n], if it is a reward model.
    ``truncated`` is the number of texts that were cut because they are too long for the model."""

    features: np.ndarray
    truncated: int
    rewards: np.ndarray | None = None


class Embedder(Protocol):
    """A source of features."""

    @property
    def name(self) -> str:
        """The folder or hub id of the model."""
        ...

    @property
    def width(self) -> int:
        """D, the length of a row."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return everything about the model and its reading that decides the features, JSON-ready."""
        ...

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        """Return the features of the one response of each comparison, with its prompt.

        Args:
          comparisons: Comparisons with one response each; profiles are ignored.
          advance: Callback for the numbers of texts and tokens done.
        """
        ...

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """Return the features of texts that a user wrote; for ``advance`` see :meth:`answers`."""
        ...

    @property
    def gives_rewards(self) -> bool:
        """Whether the model is a reward model (:class:`RewardEmbedder`), whose :meth:`answers` include rewards."""
        ...


class RewardEmbedder(Embedder, Protocol):
    """A source of features that is a reward model."""

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        """Return the rewards of responses with the profile in the prompt, float32 [n], and the number of cut
        comparisons.

        Args:
          comparisons: Comparisons with one response each.
          profile_posts: Maximum number of posts shown from each profile.
          advance: See :meth:`answers`.
        """
        ...


NEW_ITEM: Final = 1 << 30  # number of every text that was not judged when the method was fitted


@dataclass(frozen=True, eq=False)
class EmbeddedTexts:
    """The standardised features of comparisons and posts, in the form that methods read; each text runs once."""

    embedder: Embedder  # the source of the features
    standard: Callable[[np.ndarray], np.ndarray]  # standardises by the features of the fit
    items: Mapping[bytes, int]  # number of each text judged in the fit, by its digest
    features: dict[bytes, np.ndarray] = field(default_factory=dict)  # float32 [D] of each text, by its digest

    def embed(self, comparisons: Sequence[Comparison]) -> None:
        """Compute the missing features of texts."""
        answers: dict[bytes, Comparison] = {}
        posts: dict[bytes, str] = {}
        for comparison in {id(one): one for one in comparisons}.values():
            for text in comparison.responses:
                if (key := answer_key(comparison.prompt, text)) not in self.features:
                    answers[key] = Comparison(id=comparison.id, prompt=comparison.prompt, responses=[text])
            for post in comparison.profile:
                text = read_post(post).text
                if (key := b"post" + post_key(text)) not in self.features:
                    posts[key] = text
        for texts, compute in ((answers, self.embedder.answers), (posts, self.embedder.posts)):
            if texts:
                rows = compute(list(texts.values()), advance=lambda done, tokens: None).features  # pyright: ignore[reportArgumentType]
                self.features.update(zip(texts, self.standard(rows), strict=True))

    def responses(self, rows: Sequence[Sequence[tuple[Comparison, int]]]) -> Responses:
        """Return the responses at these indices of comparisons, [n, K]."""
        keys = [[answer_key(one.prompt, one.responses[k]) for one, k in row] for row in rows]
        features = np.stack([np.stack([self.features[key] for key in row]) for row in keys])
        items = [[self.items.get(post_key(one.responses[k]), NEW_ITEM) for one, k in row] for row in rows]
        return Responses(features, np.array(items, np.int32))

    def posts(self, profiles: Sequence[tuple[Post, ...]]) -> Posts | None:
        """Return the posts of profiles, padded; None if all profiles are empty."""
        most, rows = max(map(len, profiles)), dict[bytes, int]()
        if not most:
            return None

        def row_of(post: Post) -> int:
            return rows.setdefault(b"post" + post_key(read_post(post).text), len(rows))

        padded = pad_posts(profiles, row_of, self.items, width=next_power(most))
        features = np.stack([self.features[key] for key in rows])[padded.features]
        return replace(padded, features=np.where(padded.mask[..., None], features, 0))

    def contexts(
        self, known: Sequence[tuple[tuple[Comparison, ...], tuple[Post, ...]]], *, most: int
    ) -> Context:
        """Return the padded contexts of people: their latest ``most`` pairs of comparisons, and their posts."""
        pairs = [
            [
                ((one, better), (one, worse))
                for one in context
                for better, worse in preferred_pairs(one)
                if one.responses[better] != one.responses[worse]  # equal texts carry no preference
            ][-most:]
            for context, _ in known
        ]
        width = next_power(max(1, *map(len, pairs)))
        mask = np.array([[place < len(row) for place in range(width)] for row in pairs])
        filler = next((row[0] for row in pairs if row), None)
        posts = self.posts([posts for _, posts in known])
        if filler is None:
            none = np.zeros((*mask.shape, self.embedder.width), np.float32)
            nothing = Responses(none, np.full(mask.shape, NEW_ITEM, np.int32))
            return Context(nothing, nothing, mask, posts)
        full = [[*row, *([filler] * (width - len(row)))] for row in pairs]
        chosen, rejected = (self.responses([[pair[side] for pair in row] for row in full]) for side in (0, 1))
        return Context(chosen, rejected, mask, posts)


def pad_posts(
    profiles: Sequence[Sequence[Post]],
    row_of: Callable[[Post], int],
    items: Mapping[bytes, int],
    *,
    width: int,
) -> Posts:
    """Return the posts of P profiles, padded to a width. Instead of features, a post has its row by ``row_of``, int32;
    its number comes from ``items``."""
    shape = (len(profiles), width)
    rows, known = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    mask, signs = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, posts in enumerate(profiles):
        for place, post in enumerate(posts):
            judged = read_post(post)
            rows[number, place], mask[number, place] = row_of(post), True
            signs[number, place] = judged.sign
            known[number, place] = items.get(post_key(judged.text), -1)
    return Posts(rows, mask, signs, known)


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """An :class:`Embedder` that is an encoder of single texts."""

    encoder: TextEncoder
    source: Mapping[str, Any]
    responses_alone: bool

    gives_rewards = False

    @property
    def name(self) -> str:
        return self.encoder.name

    @property
    def width(self) -> int:
        return self.encoder.config.hidden_size

    def identity(self) -> dict[str, Any]:
        return {
            **self.source,
            "reads": "the response alone" if self.responses_alone else "prompt and response as one text",
            "max_length": self.encoder.max_length,
            "dtype": self.encoder.dtype,
        }

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        texts = []
        for comparison in comparisons:
            shown = visible(comparison, profile_posts=0, protocol=TextProtocol.DEFAULT)
            messages = () if self.responses_alone else shown.prefix_messages
            before = [text for turn in messages for text in (turn.context, turn.content) if text]
            texts.append("\n\n".join([*before, shown.responses[0]]))
        return self.posts(texts, advance=advance)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        embedded = self.encoder.embed(texts, advance=advance)
        return Embedded(embedded.vectors, int(embedded.truncated.sum()))
