"""Turn comparisons into a model's inputs, trees of token ids; no weights are needed.

A :class:`Reader` has the tokenizer, view and limits of one model. The length limit holds for each whole conversation
(prompt and one response), as if it were scored alone. The default protocol removes text from conversations that are too
long (`prb_jax.scoring.shorten`), and counts it. A response is never cut, and the conversation stays a valid rendering
of the chat template. The `paper` protocol instead cuts the end of each conversation, response first
(`prb_jax.scoring.paper`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.models.head import choose_readout
from prb_jax.personal import has_soft_prompts
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import conversations
from prb_jax.seams import get
from prb_jax.text.template import PLACEHOLDERS
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.view import (
    TRAINED_VIEW,
    ChosenView,
    TextProtocol,
    View,
    ViewOptions,
    Visible,
    choose_view,
    length_limit,
    visible,
)
from prb_jax.trees.tree import TokenisedComparison, TooLongError, Tree, Truncation, build_tree

if TYPE_CHECKING:
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.config.encoder import EncoderConfig
    from prb_jax.models.readouts.open_model import OpenedModel
    from prb_jax.models.readouts.user_module import ModuleConfig
    from prb_jax.personal.method import OfUser, UserTokens
    from prb_jax.personal.prompts import SavedPrompts
    from prb_jax.text.pair_tokenizer import PairTokenizer
    from prb_jax.text.trained_view import TrainedView

Encode = Callable[[Sequence[Comparison]], list[Tree]]

CHUNK_ROWS = 64
"""Comparisons tokenised in one call: enough to keep the tokenizer's threads busy, few enough to keep its intermediate
results small."""


def encode_comparisons(
    comparisons: Sequence[Comparison],
    tokenizer: ChatTokenizer | PairTokenizer,
    *,
    view: View,
    pad_token_id: int | None = None,
) -> list[Tree]:
    """Return the trees of `comparisons`, in their order. Each depends only on its comparison.

    Args:
      comparisons: Comparisons to encode.
      tokenizer: Tokenizer of the model.
      view: View of the model. If it has no length limit, the protocol's limit counts (none for default, 8,192 for
        paper).
      pad_token_id: Padding id of the model's configuration, for the read position of the paper protocol; the
        tokenizer's if not given. Without either, the last token is read.

    Raises:
      DataError: The template refuses a comparison, a response leaves no room for its prompt (`TooLongError`), or two
        different responses have the same tokens (the last two not in the paper protocol). The message names the
        comparison.
    """
    trees: list[Tree] = []
    for tree in encode_each(comparisons, tokenizer, view=view, pad_token_id=pad_token_id):
        if isinstance(tree, TooLongError):
            raise tree
        trees.append(tree)
    return trees


def encode_each(
    comparisons: Sequence[Comparison],
    tokenizer: ChatTokenizer | PairTokenizer,
    *,
    view: View,
    pad_token_id: int | None = None,
) -> Iterator[Tree | TooLongError]:
    """Yield the trees of `encode_comparisons` one by one, or the error of a comparison that is too long in its place.

    Raises:
      DataError: Errors of `encode_comparisons`, except `TooLongError`.
    """
    encoder = Encoder(tokenizer, view, view.max_length or view.protocol.max_length)
    for start in range(0, len(comparisons), CHUNK_ROWS):
        chunk = comparisons[start : start + CHUNK_ROWS]
        if view.protocol is TextProtocol.PAPER:
            yield from get("protocols", "paper").value(encoder, chunk, pad_token_id)
        else:
            yield from encoder.default(chunk)


@dataclass(frozen=True)
class Encoder:
    """Turns comparisons into trees, for one tokenizer and one view."""

    tokenizer: ChatTokenizer | PairTokenizer
    view: View
    limit: int | None

    def default(self, comparisons: Sequence[Comparison]) -> list[Tree | TooLongError]:
        """Return the trees of comparisons in the default protocol, with as many posts as fit."""
        shown = [min(len(comparison.profile), self.view.profile_posts) for comparison in comparisons]
        encoded = self.encode(comparisons, map(self.visible, comparisons, shown))
        long = [place for place, sequences in enumerate(encoded) if not self.fits(sequences)]
        shorter: dict[int, Tree | TooLongError] = {}
        if long:
            shorten = get("protocols", "shorten").value
            of_long = ([values[place] for place in long] for values in (comparisons, shown, encoded))
            shorter = dict(zip(long, shorten(self, *of_long), strict=True))
        return [
            shorter[place] if place in shorter else self.tree(comparison, encoded[place])
            for place, comparison in enumerate(comparisons)
        ]

    def fits(self, sequences: Sequence[np.ndarray]) -> bool:
        """Return True if each conversation of a comparison is within the limit."""
        return self.limit is None or longest(sequences) <= self.limit

    def visible(self, comparison: Comparison, posts: int) -> Visible:
        """Return the visible parts of a comparison with `posts` posts."""
        return visible(
            comparison, profile_posts=posts, protocol=self.view.protocol, order_claim=self.view.order_claim
        )

    def encode(self, comparisons: Sequence[Comparison], seen: Iterable[Visible]) -> list[list[np.ndarray]]:
        """Return the ids of the K conversations of each comparison; DataError if the template refuses one."""
        groups = [conversations(shown.prefix_messages, shown.responses) for shown in seen]
        try:
            return self.tokenizer.encode_together(groups)
        except RenderError as error:
            number = error.conversation
            for comparison, group in zip(comparisons, groups, strict=True):
                if number < len(group):
                    raise DataError(f"comparison {quote(comparison.id)}: {error.reason}") from error
                number -= len(group)
            raise

    def tree(
        self, comparison: Comparison, sequences: Sequence[np.ndarray], truncation: Truncation | None = None
    ) -> Tree:
        """Return the tree of K conversations; DataError if two different responses have the same tokens."""
        tree = build_tree(sequences, truncation=truncation)
        refuse_merged_responses(comparison, tree)
        return tree


def longest(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the longest sequence."""
    return max(len(sequence) for sequence in sequences)


def refuse_merged_responses(comparison: Comparison, tree: Tree) -> None:
    """Raise DataError if two different responses have the same tokens.

    Many templates and tokenizers drop some differences on purpose: surrounding blanks, the form of a Unicode character,
    or thoughts before `</think>`. Such responses count as equal: they tie, and are counted.
    """
    first: dict[bytes, int] = {}
    for k, ids in enumerate(tree.responses):
        other = first.setdefault(ids.tobytes(), k)
        if other == k:
            continue
        a, b = comparison.responses[other], comparison.responses[k]
        if a != b and _plain(a) != _plain(b):
            raise DataError(
                f"comparison {quote(comparison.id)}: responses[{other}] and responses[{k}] differ as text but have the"
                " same tokens; the chat template or the tokenizer drops the difference"
            )


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text.rpartition("</think>")[2]).split())


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Tokenizer, view and limits of one model."""

    name: str
    config: DecoderConfig | EncoderConfig | ModuleConfig
    # tokenizer with chat template; for an encoder, which reads prompt and response as two texts, the pair
    # tokenizer
    tokenizer: ChatTokenizer | PairTokenizer
    # False for a head with several labels if none is named as the reward: only the paper protocol, which has a
    # rule, is allowed
    labels_named: bool = True
    # tokens of the users' soft prompts, which precede the trees, if the model has soft prompts
    prompts: UserTokens | None = None
    # view of the training, if the model's files record it: the default of every call; other choices give a
    # warning (:class:`prb_jax.PrbWarning`)
    trained: TrainedView | None = None

    __repr__ = short_repr

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return the view for these options, and its differences from training; DataError for an impossible choice."""
        return choose_view(self.trained, options, context=self.config.max_position_embeddings)

    def view(self, options: ViewOptions) -> View:
        """Return the view for these options, and warn of differences from training."""
        chosen = self.choose_view(options)
        chosen.warn(self.name)
        return chosen.view

    def limit(self, view: View) -> int:
        """Return the maximum length of a conversation's text in tokens.

        Raises:
          DataError: The view's limit exceeds the model's context, or soft prompts leave no room.
        """
        return length_limit(
            view,
            context=self.config.max_position_embeddings,
            reserved=0 if self.prompts is None else self.prompts.tokens,
            where=self.name,
        )

    def encode(self, comparisons: Sequence[Comparison | TokenisedComparison], *, view: View) -> list[Tree]:
        """Return each comparison as the model sees it, a tree of token ids (from text, or prepared).

        Raises:
          DataError: The model cannot read a comparison; the message names it.
          CheckpointError: The head has several labels, and none is named as the reward.
        """
        self.check_labels(view.protocol)
        texts = [one for one in comparisons if isinstance(one, Comparison)]
        encoded = iter(self.encode_text(texts, view=view) if texts else ())
        trees = [next(encoded) if isinstance(one, Comparison) else one.tree() for one in comparisons]
        for comparison, tree in zip(comparisons, trees, strict=True):
            self.check_readable(f"comparison {quote(comparison.id)}", tree)
        return trees if self.prompts is None else self.prompts.encode(trees, comparisons)

    def encode_text(self, comparisons: Sequence[Comparison], *, view: View) -> list[Tree]:
        """Return the trees of the text, without soft prompts and without :meth:`check_readable`."""
        shown = replace(view, max_length=self.limit(view))
        return encode_comparisons(
            comparisons, self.tokenizer, view=shown, pad_token_id=self.config.pad_token_id
        )

    def encode_each(
        self, comparisons: Sequence[Comparison], *, view: View, limit: int | None = None
    ) -> list[Tree | TooLongError]:
        """Like :meth:`encode_text`, but return the error of a comparison that is too long in place of its tree.

        `limit` replaces the limit of the view.
        """
        shown = replace(view, max_length=limit or self.limit(view))
        pad = self.config.pad_token_id
        return list(encode_each(comparisons, self.tokenizer, view=shown, pad_token_id=pad))

    def unknown_users(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """Return the users that the model was not trained on, who get the generic soft prompt.

        The result is None for a model without soft prompts.
        """
        return None if self.prompts is None else self.prompts.unknown(comparisons)

    def remarks(self, protocol: TextProtocol) -> list[str]:
        """Return remarks on choices that this protocol makes and the model's files do not.

        Raises:
          CheckpointError: The head has several labels, and none is named as the reward.
        """
        self.check_labels(protocol)
        if protocol is not TextProtocol.PAPER or not isinstance(self.tokenizer, ChatTokenizer):
            return []
        labels = None if self.labels_named else self.config.num_labels
        pads = (self.config.pad_token_id, self.tokenizer.pad_token_id) != (None, None)
        return get("protocols", "paper remarks").value(labels=labels, pads=pads)

    def check_labels(self, protocol: TextProtocol) -> None:
        """Raise CheckpointError if the head has several labels and none is named as the reward."""
        if not (self.labels_named or protocol is TextProtocol.PAPER):
            choose_readout(None, num_labels=self.config.num_labels, where=self.name)

    def check_readable(self, what: str, tree: Tree) -> None:
        """Check that the model can score a tree (without soft prompts); `what` names it in messages.

        Raises:
          DataError: An id has no embedding or is a placeholder for an image, or a conversation does not contain the ids
            at which the head reads.
        """
        config, parts = self.config, (tree.prefix, *tree.responses)
        top = max(int(ids.max(initial=0)) for ids in parts)
        if top >= config.vocab_size:
            raise DataError(
                f"{what}: token id {top}, but {self.name} has only {config.vocab_size} embeddings: "
                "this is not the tokenizer of this model"
            )
        for field in PLACEHOLDERS:
            mark = config.original.get(field)
            if mark is not None and any((ids == mark).any() for ids in parts):
                raise DataError(
                    f"{what}: its text holds the token {mark} ({field} of {self.name}), which stands for an image or "
                    "a video: only text can be scored"
                )
        needs = config.head.needs if config.head else ()
        for k in range(len(tree.responses) if needs else 0):
            ids = np.pad(tree.sequence(k), (0, len(needs)), constant_values=-1)
            runs = np.lib.stride_tricks.sliding_window_view(ids, len(needs))
            if not (runs == needs).all(axis=1).any():
                raise DataError(
                    f"{what}: response {k}: the ids {list(needs)}, at which {self.name} is read, do not occur: the "
                    "chat template or the tokenizer is not the model's own, or the end was cut off"
                )


def open_reader(opened: OpenedModel) -> tuple[Reader, SavedPrompts | None]:
    """Return the reader of an opened model, and its soft prompts of users, if any.

    Raises:
      CheckpointError: The soft prompts or the tokenizer cannot be used.
    """
    config, folder, tokenizer = opened.config, opened.folder.path, opened.tokenizer()
    prompts = None
    if isinstance(tokenizer, ChatTokenizer) and has_soft_prompts(folder):
        prompts = get("models", "soft prompts").value(folder, width=config.hidden_size)
    reader = Reader(
        name=opened.name,
        config=config,
        tokenizer=tokenizer,
        labels_named=opened.labels_named,
        prompts=None if prompts is None else prompts.prompts(first_id=config.vocab_size),
        trained=get("views", "trained").value(folder) if (folder / TRAINED_VIEW).exists() else None,
    )
    return reader, prompts
