"""Conversion of linear heads between layouts, for training and `prb convert`.

The layout ``standard`` is a ``*ForSequenceClassification`` of transformers. The layout ``value-head`` is a language
model with TRL's ``v_head.summary``, which TRL and LLaMA-Factory read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.decoder import STANDARD, DecoderConfig
from prb_jax.models.head import LINEAR, Linear
from prb_jax.models.readouts.open_model import OpenedModel, ResolvedModel
from prb_jax.models.vocabulary_heads import is_one_row
from prb_jax.records.comparison import Message
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer

VALUE_HEAD = Linear(("v_head.summary.weight",), with_bias=True, bias=True)

_PROBE = (Message("user", "Is this a question?"), Message("assistant", "It is an answer."))


@dataclass(frozen=True)
class ConvertedModel:
    """Configuration and parameters in another layout."""

    config: DecoderConfig
    params: dict[str, Any]


def check_convertible(model: ResolvedModel, *, where: str) -> None:
    """Raise CheckpointError unless the read-out is linear at the last token, as transformers' classes require."""
    if not is_one_row(model.config.head):
        raise CheckpointError(
            f"{where}: the read-out '{model.row.name}' is not a linear head at the last token, so no "
            "*ForSequenceClassification has the same scores; `prb evaluate` scores with the checkpoint as it is, and "
            "`prb train ... init_head=true` trains a new head"
        )


def as_standard(
    model: ResolvedModel, params: dict[str, Any], *, drop_bias: bool, where: str
) -> ConvertedModel:
    """Convert a model to a head without bias under ``score``.

    Raises:
      CheckpointError: The head has a nonzero bias, which the standard class cannot store.
    """
    params = dict(params)
    bias = params.pop("score_bias", None)
    if bias is not None and bool(jnp.any(bias != 0)) and not drop_bias:
        raise CheckpointError(
            f"{where}: the head has a bias of {np.asarray(bias, np.float32).tolist()}, which no "
            "*ForSequenceClassification has; `prb convert --drop-bias` leaves it out: every reward changes by that "
            "much, no difference between responses does"
        )
    return ConvertedModel(replace(model.config, head=LINEAR, layout=STANDARD), params)


def as_value_head(
    model: ResolvedModel, params: dict[str, Any], *, drop_bias: bool, where: str
) -> ConvertedModel:
    """Convert a model to a head under ``v_head.summary``; a head without bias gets a zero bias.

    Raises:
      CheckpointError: The head has several outputs, but a value head has one.
    """
    if model.config.num_labels != 1:
        raise CheckpointError(
            f"{where}: the head has {model.config.num_labels} outputs, a value head one: leave out --layout value-head"
        )
    bias = params.get("score_bias")
    if bias is None or drop_bias:
        bias = jnp.zeros((1,), params["score"].dtype)
    config = replace(model.config, head=VALUE_HEAD, layout=STANDARD)
    return ConvertedModel(config, {**params, "score_bias": bias})


def standard_tokenizer(opened: OpenedModel) -> ChatTokenizer:
    """Return the model's tokenizer with its text rules in the chat template; CheckpointError if a template cannot
    express them."""
    chat = opened.chat()
    if chat.ends_with is None:
        return chat
    place, rules = opened.tokenizer_folder.path, replace(opened.decoder.text, append=None)
    plain = load_tokenizer(place, chat_template=opened.options.chat_template, rules=rules)
    if plain.encode(_PROBE) == chat.encode(_PROBE):  # the template writes it already
        return plain
    token = chat.tokenizer.convert_ids_to_tokens(chat.ends_with)
    quoted = token.replace("\\", "\\\\").replace("'", "\\'")
    # Jinja drops one newline at the end of a template; it must not appear before the appended token.
    text = chat.template.text.removesuffix("\n") + f"{{{{ '{quoted}' }}}}"
    written = load_tokenizer(place, chat_template=text)
    if written.encode(_PROBE) != chat.encode(_PROBE):
        raise CheckpointError(
            f"{opened.name}: its conversations end in {quote(token)} (id {chat.ends_with}), which its tokenizer does "
            "not read as one token in a text, so no chat template can write it: `prb evaluate` scores with the "
            "checkpoint as it is"
        )
    return written


def refuse_other_ids(tokenizer: ChatTokenizer, folder: Path) -> None:
    """Reject a tokenizer of another model: one that gives the checkpoint's tokens other ids."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    vocabulary = load_tokenizer(folder, chat_template="plain").tokenizer.get_vocab()
    other = tokenizer.tokenizer.get_vocab()
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if other.get(token, number) != number:
            raise CheckpointError(
                f"{tokenizer.name}: token {quote(token)} has id {other[token]}, but {number} in the tokenizer of "
                f"{folder}: this is not the tokenizer of this model"
            )
    shared = len(vocabulary.keys() & other.keys())
    if shared < 0.9 * len(vocabulary):
        raise CheckpointError(
            f"{tokenizer.name}: has only {shared} of the {len(vocabulary)} tokens of the tokenizer of {folder}: "
            "this is not the tokenizer of this model"
        )
