"""A model as a source of features: the state at each response and at each post, without any profile.

A decoder is asked for the state at the position where a reward would be read; its scorer of trees is used, with a head
that gives the state itself, and for a reward model its reward too. An encoder of single texts gives its vector of the
text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, RunError
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import is_encoder
from prb_jax.readouts.heads import Pooled
from prb_jax.readouts.language_model import open_language_model
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.readouts.registry import REGISTRY
from prb_jax.readouts.resolve import is_plain_language_model
from prb_jax.readouts.score_fn import StateFns, make_state_fns
from prb_jax.readouts.text_encoder import TextEncoder, load_text_encoder
from prb_jax.runs.progress import compiling
from prb_jax.scoring.dealing import Batch
from prb_jax.scoring.load_opened import load_opened
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.scored import ScoredBatch
from prb_jax.scoring.stream import stream_scores
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.view import View, ViewOptions
from prb_jax.text.visible import visible
from prb_jax.trees.batches import TreeBatch

POST_PROMPT: Final = "Write something that is typical of you."
"""What a post answers to where a model reads conversations: a post then stands in the place of a response."""

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


@dataclass(frozen=True, eq=False)
class StateFeatures:
    """Features of a model of conversations: the state at the read position, after the last norm."""

    model: RewardModel
    fns: StateFns
    view: View
    gives_rewards: bool

    @property
    def name(self) -> str:
        """The folder or hub id of the model."""
        return self.model.name

    @property
    def width(self) -> int:
        """D."""
        return self.model.config.hidden_size

    def identity(self) -> dict[str, Any]:
        """As of :class:`Embedder`."""
        known = {key: value for key, value in self.model.identity().items() if key not in ("name", "readout")}
        return {
            **known,
            "reads": "the state at the read position of a conversation",
            "protocol": self.view.protocol.value,
            "max_length": self.model.reader.limit(self.view),
        }

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`."""
        found = np.empty((len(comparisons), self.width + self.gives_rewards), np.float32)
        truncated = 0
        for batch in stream_scores(
            comparisons,
            encode=functools.partial(self.model.reader.encode, view=self.view),
            dispatch=self._dispatch,
            options=self.model.batch_options(),
        ):
            for index, states in zip(batch.indices, batch.scores, strict=True):
                found[index] = states[0]
            truncated += _cut(batch)
            advance(len(batch.indices), sum(batch.tokens))
        rewards = found[:, self.width] if self.gives_rewards else None
        return Embedded(found[:, : self.width], truncated, rewards)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`."""
        as_answers = [
            Comparison(id=f"post {number}", prompt=POST_PROMPT, responses=[text])
            for number, text in enumerate(texts)
        ]
        return self.answers(as_answers, advance=advance)

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        """As of :class:`Embedder`."""
        if not self.gives_rewards:
            raise RunError(
                f"{self.name}: gives no reward; features of rewards with a profile need a reward model"
            )
        found, truncated = np.empty(len(comparisons), np.float32), 0
        view = ViewOptions(
            profile_posts=profile_posts, protocol=self.view.protocol.value, max_length=self.view.max_length
        )
        for batch in self.model.stream(comparisons, **asdict(view)):
            found[list(batch.indices)] = [rewards[0] for rewards in batch.scores]
            truncated += _cut(batch)
            advance(len(batch.indices), sum(batch.tokens))
        return found, truncated

    def _dispatch(self, batch: Batch) -> jax.Array:
        placed = self.model.place(batch)
        if isinstance(placed, TreeBatch):
            with compiling(self.fns.tree, placed.prefix.shape, placed.responses.shape):
                return self.fns.tree(self.model.params, placed)
        assert self.fns.stream is not None
        with compiling(self.fns.stream, placed.tokens.shape, placed.reads.shape):
            return self.fns.stream(self.model.params, placed)


def open_embedder(
    model: str | Path,
    options: LoadOptions,
    *,
    view: ViewOptions,
    responses_alone: bool = False,
) -> Embedder:
    """Load a model as a source of features.

    Args:
      model: a folder or hub id of a reward model, a causal language model, or an encoder of texts.
      options: how it is opened.
      view: protocol and length limit; profiles are never shown.
      responses_alone: an encoder of texts reads each response without its prompt.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: a length limit that the model was not made for.
      RunError: a baseline, or an option that means nothing to this model.
    """
    if str(model).startswith("baseline:"):
        raise RunError(f"{model}: has no features; expected the folder or hub id of a model")
    folder = locate(model, revision=options.revision)
    if is_encoder(raw := read_raw_config(folder.path)) and not _reads_pairs(raw):
        return _text_features(folder, options, view=view, responses_alone=responses_alone)
    if responses_alone:
        raise RunError(
            f"responses_alone: for encoders of single texts; {folder.name} reads a response with its prompt"
        )
    plain = options.readout is None and not is_encoder(raw)
    plain = plain and is_plain_language_model(folder.path, name=folder.name)
    opened = open_language_model(folder, options) if plain else open_model(folder, options)
    loaded = load_opened(opened)
    chosen = loaded.reader.choose_view(
        ViewOptions(profile_posts=0, protocol=view.protocol, max_length=view.max_length)
    ).view
    named = opened.labels_named or chosen.protocol is TextProtocol.PAPER
    readout = opened.labels if named and not plain else None
    fns = make_state_fns(
        loaded.config,
        mesh=loaded.mesh,
        dtype=jnp.dtype(loaded.dtype),
        readout=readout,
        quantize=loaded.quantize,
        attention=options.attention,
    )
    return StateFeatures(loaded, fns, chosen, readout is not None)


def _cut(batch: ScoredBatch) -> int:
    """How many texts of a batch lost a part."""
    return sum(
        bool(each.posts_dropped or each.prompt_tokens_dropped or each.response_tokens_dropped)
        for each in batch.truncation
    )


def _reads_pairs(raw: Mapping[str, Any]) -> bool:
    """Whether an encoder is a reward model, which reads a prompt and a response as a pair of texts."""
    named = set(raw.get("architectures") or ())
    return any(isinstance(row.head, Pooled) and named & set(row.classes) for row in REGISTRY)


def _text_features(
    folder: ModelFolder, options: LoadOptions, *, view: ViewOptions, responses_alone: bool
) -> TextFeatures:
    given = options.given
    unused = [name for name in given if name not in ("mesh", "dtype", "revision")]
    if view.protocol not in (None, TextProtocol.DEFAULT):
        unused.append("protocol")
    if unused:
        raise DataError(f"{', '.join(unused)}: not for {folder.name}, an encoder of single texts")
    encoder = load_text_encoder(
        folder.path if folder.revision is None else folder.name,
        mesh=options.mesh,
        dtype=options.dtype,
        max_length=view.max_length,
        revision=options.revision,
    )
    return TextFeatures(encoder, describe(folder), responses_alone)
