"""A source of features: the state of a model at each response and at each post, without any profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError
from prb_jax.readouts.text_encoder import TextEncoder
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.visible import visible

Advance = Callable[[int, int], object]


@dataclass(frozen=True)
class Embedded:
    """Features of texts.

    Attributes:
      features: float32 [n, D].
      truncated: how many texts lost a part because they are too long for the model.
      rewards: float32 [n], the model's own reward of each text; None for a model that gives none.
    """

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
          comparisons: with one response each; profiles are not looked at.
          advance: is told of texts and tokens done.
        """
        ...

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """Return the features of texts that a user wrote; arguments as of :meth:`answers`."""
        ...

    @property
    def gives_rewards(self) -> bool:
        """Whether the model is a reward model, so that :meth:`answers` and :meth:`shown` know rewards."""
        ...

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        """Return the reward of the one response of each comparison when the profile stands in the prompt, float32 [n],
        and how many comparisons were cut.

        Args:
          comparisons: with one response each.
          profile_posts: at most so many posts of each profile are shown.
          advance: as of :meth:`answers`.
        """
        ...


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """Features of an encoder of single texts."""

    encoder: TextEncoder
    source: Mapping[str, Any]
    responses_alone: bool

    @property
    def name(self) -> str:
        """The folder or hub id of the model."""
        return self.encoder.name

    @property
    def width(self) -> int:
        """D."""
        return self.encoder.config.hidden_size

    def identity(self) -> dict[str, Any]:
        """As of :class:`Embedder`."""
        return {
            **self.source,
            "reads": "the response alone" if self.responses_alone else "prompt and response as one text",
            "max_length": self.encoder.max_length,
            "dtype": self.encoder.dtype,
        }

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`."""
        texts = []
        for comparison in comparisons:
            shown = visible(comparison, profile_posts=0, protocol=TextProtocol.DEFAULT)
            before = [] if self.responses_alone else [m.content for m in shown.prefix_messages]
            texts.append("\n\n".join([*before, shown.responses[0]]))
        return self.posts(texts, advance=advance)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`."""
        found = self.encoder.embed(texts, advance=advance)
        return Embedded(found.vectors, int(found.truncated.sum()))

    gives_rewards = False

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        """Refused: an encoder of texts gives no reward."""
        raise RunError(f"{self.name}: an encoder of single texts gives no reward, with or without a profile")
