"""Whether a model can score a comparison in tokens: ids that it has, and the marks at which its head reads."""

from __future__ import annotations

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.readouts.registry import PLACEHOLDERS
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.trees.tree import Tree


def paper_remarks(chat: ChatTokenizer, config: DecoderConfig, *, named: bool) -> list[str]:
    """Sentences about places where the paper protocol finds nothing in a model's files, and how it goes on.

    Args:
      chat: tokenizer of the model.
      config: of the model.
      named: whether the rule for the labels of the score head was named.
    """
    said = []
    if not named:
        said.append(
            f"protocol paper: the score head has {config.num_labels} labels; the reward is the last of their softmax, "
            "as in the scripts of the paper"
        )
    if config.pad_token_id is None and chat.pad_token_id is None:
        said.append(
            "protocol paper: neither config.json nor the tokenizer names a padding token, without which the scripts of "
            "the paper refuse batches; the score is read at the last token"
        )
    return said


def check_readable(
    comparison: Comparison, tree: Tree, config: DecoderConfig | EncoderConfig, *, name: str
) -> None:
    """Refuses a tree that would not be scored as it reads.

    Args:
      comparison: named in messages.
      tree: its tokens, without soft prompts.
      config: of the model.
      name: of the model, for messages.

    Raises:
      DataError: an id without an embedding, one that stands for an image, or a conversation without the ids at
        which the head reads.
    """
    top = max(int(ids.max(initial=0)) for ids in (tree.prefix, *tree.responses))
    if top >= config.vocab_size:
        raise DataError(
            f"comparison {quote(comparison.id)}: token id {top}, but {name} has only {config.vocab_size} embeddings: "
            "this is not the tokenizer of this model"
        )
    if isinstance(config, EncoderConfig):  # its read-out is that of the first token
        return
    for field in PLACEHOLDERS:
        mark = config.original.get(field)
        if mark is not None and any((ids == mark).any() for ids in (tree.prefix, *tree.responses)):
            raise DataError(
                f"comparison {quote(comparison.id)}: its text holds the token {mark} ({field} of {name}), which stands "
                "for an image or a video: only text can be scored"
            )
    needs = config.head.needs
    if not needs:
        return
    for k in range(len(tree.responses)):
        ids = np.pad(tree.sequence(k), (0, len(needs)), constant_values=-1)
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(needs))
        if not (windows == np.asarray(needs)).all(axis=1).any():
            raise DataError(
                f"comparison {quote(comparison.id)}: response {k}: the ids {list(needs)}, at which {name} is read, do "
                "not occur: the chat template or the tokenizer is not the model's own, or the end was cut off"
            )
