"""Trees of the paper protocol: a conversation that is too long loses its end, response first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.trees.tree import Tree, Truncation, build_tree

if TYPE_CHECKING:
    from prb_jax.scoring.reader import Encoder


def encode_paper(encoder: Encoder, comparisons: Sequence[Comparison], pad_token_id: int | None) -> list[Tree]:
    """Return the trees of comparisons, each conversation cut at its end; arguments as in `encode_comparisons`."""
    chat = encoder.tokenizer
    if not isinstance(chat, ChatTokenizer):
        raise DataError(
            f"protocol {encoder.view.protocol}: its scripts put every conversation through a chat template, which "
            f"{chat.name}, an encoder of pairs, does not have: use the default protocol"
        )
    pad = chat.pad_token_id if pad_token_id is None else pad_token_id
    seen = [encoder.visible(comparison, encoder.view.profile_posts) for comparison in comparisons]
    encoded = encoder.encode(comparisons, seen)
    return [_cut_ends(sequences, chat, encoder.limit, pad) for sequences in encoded]


def _cut_ends(
    sequences: list[np.ndarray], chat: ChatTokenizer, limit: int | None, pad_token_id: int | None
) -> Tree:
    whole = [with_special_tokens(chat, ids, max_length=None) for ids in sequences]
    cut = [with_special_tokens(chat, ids, max_length=limit) for ids in sequences]
    lost = [len(before) - len(after) for before, after in zip(whole, cut, strict=True)]
    responses = [len(response) for response in build_tree(whole).responses]
    of_responses = [min(n, r) for n, r in zip(lost, responses, strict=True)]
    if chat.tokenizer.truncation_side == "left":
        prompts = [len(ids) - r for ids, r in zip(whole, responses, strict=True)]
        of_responses = [max(n - p, 0) for n, p in zip(lost, prompts, strict=True)]
    truncation = Truncation(
        prompt_tokens_dropped=max(n - r for n, r in zip(lost, of_responses, strict=True)),
        response_tokens_dropped=sum(of_responses),
    )
    return build_tree(cut, read=[last_non_pad(ids, pad_token_id) for ids in cut], truncation=truncation)


def with_special_tokens(chat: ChatTokenizer, ids: np.ndarray, *, max_length: int | None) -> np.ndarray:
    """Return `ids`, cut to `max_length` with the tokens around them that the tokenizer adds."""
    if max_length is not None:
        room = max(max_length - len(chat.added_before) - len(chat.added_after), 0)
        if len(ids) > room:
            left = chat.tokenizer.truncation_side == "left"
            ids = ids[len(ids) - room :] if left else ids[:room]
    before, after = np.asarray(chat.added_before, np.int32), np.asarray(chat.added_after, np.int32)
    return np.concatenate([before, ids, after])


def last_non_pad(ids: np.ndarray, pad_token_id: int | None) -> int:
    """Return the position at which transformers reads a score: the rightmost id that is not padding, or 0."""
    if pad_token_id is None:
        return len(ids) - 1
    positions = np.flatnonzero(ids != pad_token_id)
    return int(positions[-1]) if len(positions) else 0


def paper_remarks(*, labels: int | None, pads: bool) -> list[str]:
    """Return remarks on choices that the protocol makes and the model's files do not.

    Args:
      labels: Number of labels of the head if none is named as the reward; else None.
      pads: True if `config.json` or the tokenizer names a padding token.
    """
    remarks: list[str] = []
    if labels is not None:
        remarks.append(
            f"protocol paper: the score head has {labels} labels; the reward is the last of their softmax, as in the "
            "scripts of the paper"
        )
    if not pads:
        remarks.append(
            "protocol paper: neither config.json nor the tokenizer names a padding token, without which the scripts "
            "of the paper refuse batches; the score is read at the last token"
        )
    return remarks
