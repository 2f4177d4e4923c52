"""Last token and suffix of conversations that some reward models need, checked against their tokenizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prb_jax.errors import CheckpointError, quote
from prb_jax.text.template import TextRules


def last_token(rules: TextRules, tokenizer: Any, *, where: str) -> int:
    """Return the id of the last token of every conversation.

    Raises:
      CheckpointError: The token is missing from the tokenizer.
    """
    classifier = getattr(tokenizer, "cls_token_id", None) if rules.append == "cls_token" else None
    token = rules.append_id if classifier is None else classifier
    if token is None or tokenizer.convert_ids_to_tokens(int(token)) is None:
        raise CheckpointError(
            f"{where}: this model reads its reward at a token (id {token}) that the tokenizer does not have: "
            "name the model's own with --tokenizer"
        )
    return int(token)


def checked_suffix(rules: TextRules, tokenizer: Any, *, where: str) -> str:
    """Return the suffix of responses after checking that it is one token of the tokenizer.

    Raises:
      CheckpointError: The tokenizer does not encode the suffix as the token that the model was trained with, or
        the token is known only by its id and is not an added token, so it can merge with the text around it.
    """
    if not rules.suffix and rules.suffix_id is not None:
        texts = {number: text for text, number in tokenizer.get_added_vocab().items()}
        if (text := texts.get(rules.suffix_id)) is None:
            found = quote(tokenizer.convert_ids_to_tokens(rules.suffix_id))
            raise CheckpointError(
                f"{where}: token {rules.suffix_id} ends the steps of a response: expected an added token of "
                f"this tokenizer, found {found}: it can merge with the text around it, and steps would be missed"
            )
        return checked_suffix(replace(rules, suffix=text), tokenizer, where=where)
    if rules.suffix and tokenizer.encode(rules.suffix, add_special_tokens=False) != [rules.suffix_id]:
        raise CheckpointError(
            f"{where}: this model reads its reward at {rules.suffix!r} (id {rules.suffix_id}), which is not one "
            "token of this tokenizer: name the model's own with --tokenizer"
        )
    return rules.suffix
