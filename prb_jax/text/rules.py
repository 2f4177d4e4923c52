"""What some reward models need beside their chat template: a last token, a mark after the response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prb_jax.errors import CheckpointError

PLACEHOLDERS = ("image_token_id", "video_token_id")
"""Fields of ``config.json`` with the ids that stand for what is not text."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """Rules beside the chat template.

    Attributes:
      append: a token that ends every conversation, unless it does already: the ``cls_token`` of the tokenizer,
        or ``given``, which is ``append_id``.
      append_id: the token's id; of the ``cls_token`` for tokenizers that have none.
      suffix: text that ends every response, unless it does already.
      suffix_id: the one id that the tokenizer must have for it.
      template: chat template for tokenizers that bring none.
      templates: further chat templates by name, to be asked for.
      replaced: chat templates that stand in for a tokenizer's own, each after a mark that the own one holds: the
        tokenizer is borrowed from a language model, and the reward model was trained on another rendering.
    """

    append: Literal["cls_token", "given"] | None = None
    append_id: int | None = None
    suffix: str = ""
    suffix_id: int | None = None
    template: str | None = None
    templates: tuple[tuple[str, str], ...] = ()
    replaced: tuple[tuple[str, str], ...] = ()

    def chat_template(self, tokenizer: Any, asked: str | None) -> str | None:
        """The chat template to use instead of the tokenizer's own; None for that one.

        Args:
          tokenizer: of transformers.
          asked: what the user names: one of ``templates``, else returned as it is.
        """
        if asked is not None:
            return dict(self.templates).get(asked, asked)
        own = getattr(tokenizer, "chat_template", None)
        if not own:
            return self.template
        return next((text for mark, text in self.replaced if mark in str(own)), None)

    def last_token(self, tokenizer: Any, *, where: str) -> int | None:
        """The id that ends every conversation, or None.

        Raises:
          CheckpointError: the tokenizer has no such token.
        """
        if self.append is None:
            return None
        found = getattr(tokenizer, "cls_token_id", None) if self.append == "cls_token" else None
        token = self.append_id if found is None else found
        if token is None or tokenizer.convert_ids_to_tokens(int(token)) is None:
            raise CheckpointError(
                f"{where}: this model reads its reward at a token (id {token}) that the tokenizer does not have: "
                "name the model's own with --tokenizer"
            )
        return int(token)

    def checked_suffix(self, tokenizer: Any, *, where: str) -> str:
        """The suffix.

        Raises:
          CheckpointError: it is not the one token that the model was trained with.
        """
        if self.suffix and tokenizer.encode(self.suffix, add_special_tokens=False) != [self.suffix_id]:
            raise CheckpointError(
                f"{where}: this model reads its reward at {self.suffix!r} (id {self.suffix_id}), which is not one "
                "token of this tokenizer: name the model's own with --tokenizer"
            )
        return self.suffix


PLAIN_RULES = TextRules()
"""The chat template alone."""
