"""Read comparisons for a model: what it is shown of them, as trees of token ids, without any weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.models.readouts.rules import choose_readout
from prb_jax.personal import has_soft_prompts
from prb_jax.records.comparison import Comparison
from prb_jax.seams import get
from prb_jax.text.template import PLACEHOLDERS
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import (
    ChosenView,
    TrainedView,
    View,
    ViewOptions,
    choose_view,
    length_limit,
    read_trained_view,
)
from prb_jax.text.visible import TextProtocol
from prb_jax.trees.encode import TooLongError, encode_comparisons, encode_each
from prb_jax.trees.tree import TokenisedComparison, Tree, build_tree

if TYPE_CHECKING:
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.config.encoder import EncoderConfig
    from prb_jax.models.readouts.open_model import OpenedModel
    from prb_jax.models.readouts.user_module import ModuleConfig
    from prb_jax.personal.method import OfUser, UserTokens
    from prb_jax.personal.prompts import SavedPrompts
    from prb_jax.text.pair_tokenizer import PairTokenizer

Encode = Callable[[Sequence[Comparison]], list[Tree]]


class IdsTooLongError(DataError):
    """A conversation in token ids is longer than the limit."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How comparisons are read for one model."""

    name: str
    config: DecoderConfig | EncoderConfig | ModuleConfig
    # tokenizer and chat template; of an encoder, which reads prompt and response as a pair of texts, the
    # tokenizer of pairs
    tokenizer: ChatTokenizer | PairTokenizer
    # False for a head with several labels where nobody named the one that is the reward: the default protocol
    # is refused, and the paper protocol has a rule
    labels_named: bool = True
    # what stands for users in front of their trees, where the model has soft prompts of them
    prompts: UserTokens | None = None
    # the view that the model was trained with, where its files say; what a call does not say is taken from
    # it, and a call that says otherwise is warned of (:class:`prb_jax.PrbWarning`)
    trained: TrainedView | None = None

    __repr__ = short_repr

    def choose_view(self, options: ViewOptions) -> ChosenView:
        """Return what the model is shown where this is asked for, and where that is not as in training; raises
        DataError for a choice that cannot be."""
        return choose_view(self.trained, options, context=self.config.max_position_embeddings)

    def view(self, options: ViewOptions) -> View:
        """As :meth:`choose_view`, with a warning of what is not as in training."""
        chosen = self.choose_view(options)
        chosen.warn(self.name)
        return chosen.view

    def limit(self, view: View) -> int:
        """Return the most tokens that the text of a conversation may have.

        Raises:
          DataError: more than the model was made for, or nothing beside the soft prompts.
        """
        return length_limit(
            view,
            context=self.config.max_position_embeddings,
            reserved=0 if self.prompts is None else self.prompts.tokens,
            where=self.name,
        )

    def encode(self, comparisons: Sequence[Comparison | TokenisedComparison], *, view: View) -> list[Tree]:
        """Return what the model sees of each comparison, as trees of token ids (of its text, or prepared ones).

        Raises:
          DataError: a comparison that cannot be shown to this model; the message names it.
          CheckpointError: nothing says which of the head's labels is the reward.
        """
        self._check_labels(view.protocol)
        texts = [one for one in comparisons if isinstance(one, Comparison)]
        encoded = iter(self.encode_text(texts, view=view) if texts else ())
        trees = [next(encoded) if isinstance(one, Comparison) else one.tree() for one in comparisons]
        for comparison, tree in zip(comparisons, trees, strict=True):
            self.check_readable(f"comparison {quote(comparison.id)}", tree)
        return trees if self.prompts is None else self.prompts.encode(trees, comparisons)

    def encode_ids(
        self, sequences: Sequence[np.ndarray], *, user_id: str | None = None, view: View, name: str
    ) -> Tree:
        """Return the tree of K whole conversations that are int32 token ids already, each read at its last token.

        Raises:
          DataError: as :meth:`encode`, with `name` in the message; IdsTooLongError for more ids than the limit.
          CheckpointError: as :meth:`encode`.
        """
        self._check_labels(view.protocol)
        limit = self.limit(view)
        for ids in sequences:
            if len(ids) > limit:
                raise IdsTooLongError(f"{name}: {len(ids):,} tokens, more than the limit of {limit:,}")
            if len(ids) and int(ids.min()) < 0:
                raise DataError(f"{name}: token ids: expected 0 or more, found {int(ids.min())}")
        tree = build_tree(sequences)
        self.check_readable(name, tree)
        if self.prompts is None:
            return tree
        return self.prompts.encode([tree], [TokenisedComparison(name, user_id, lambda: tree)])[0]

    def encode_text(self, comparisons: Sequence[Comparison], *, view: View) -> list[Tree]:
        """Return the trees of the text alone: without soft prompts, and not checked against the model's embeddings."""
        shown = replace(view, max_length=self.limit(view))
        return encode_comparisons(
            comparisons, self.tokenizer, view=shown, pad_token_id=self.config.pad_token_id
        )

    def encode_each(
        self, comparisons: Sequence[Comparison], *, view: View, limit: int | None = None
    ) -> list[Tree | TooLongError]:
        """As :meth:`encode_text`, with the error of each comparison that is too long in its place; `limit` takes the
        place of the view's own."""
        shown = replace(view, max_length=limit or self.limit(view))
        pad = self.config.pad_token_id
        return list(encode_each(comparisons, self.tokenizer, view=shown, pad_token_id=pad))

    def too_long(self, comparisons: Sequence[Comparison], *, view: View) -> list[TooLongError]:
        """Return why each of those comparisons cannot be scored that have a response longer than the limit allows.

        Profiles are not read: they are cut before anything else.
        """
        encoded = self.encode_each(comparisons, view=replace(view, profile_posts=0))
        return [tree for tree in encoded if isinstance(tree, TooLongError)]

    def unknown_users(self, comparisons: Iterable[OfUser]) -> set[str] | None:
        """Return the users of the comparisons who get the generic soft prompt because the model was not trained on
        them; None for a model without soft prompts."""
        return None if self.prompts is None else self.prompts.unknown(comparisons)

    def remarks(self, protocol: TextProtocol) -> list[str]:
        """Return sentences about the way in which this protocol reads this model, where its files do not say it; raises
        CheckpointError where nothing says which of the head's labels is the reward."""
        self._check_labels(protocol)
        remarks: list[str] = []
        if protocol is not TextProtocol.PAPER or not isinstance(self.tokenizer, ChatTokenizer):
            return remarks
        if not self.labels_named:
            remarks.append(
                f"protocol paper: the score head has {self.config.num_labels} labels; the reward is the last of their "
                "softmax, as in the scripts of the paper"
            )
        if self.config.pad_token_id is None and self.tokenizer.pad_token_id is None:
            remarks.append(
                "protocol paper: neither config.json nor the tokenizer names a padding token, without which the "
                "scripts of the paper refuse batches; the score is read at the last token"
            )
        return remarks

    def _check_labels(self, protocol: TextProtocol) -> None:
        if not (self.labels_named or protocol is TextProtocol.PAPER):
            choose_readout(None, num_labels=self.config.num_labels, where=self.name)

    def check_readable(self, what: str, tree: Tree) -> None:
        """Refuse a tree (without soft prompts) that would not be scored as it reads.

        Raises:
          DataError: an id without an embedding, one that stands for an image, or a conversation without the ids at
            which the head reads.
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
    """Return how comparisons are read for an opened model, and the soft prompts of users beside it, if there are any;
    raises CheckpointError where they or the tokenizer cannot be used."""
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
        trained=read_trained_view(folder),
    )
    return reader, prompts
