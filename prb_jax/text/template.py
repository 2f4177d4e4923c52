"""Chat templates as text: which one is used, its identity, the clock it must not read, and rules beside it.

Some templates print today's date. A reward must not change with the day it is computed on, so a
template that reads the clock is given a fixed one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from prb_jax.errors import CheckpointError, quote, short_repr

PLAIN = "plain"  # name of the built-in template for models that have none

PLAIN_TEMPLATE = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% endfor %}"
    "{% if eos_token is defined and eos_token %}{{ eos_token }}{% endif %}"
)
"""`User: ...`, a blank line, `Assistant: ...`, between the tokenizer's BOS and EOS."""

FIXED_DATE = datetime(2024, 7, 26)
"""The day shown by templates that print one: the default date of the Llama 3.1 template."""

_CLOCK_CALL = re.compile(r"strftime_now\s*\(\s*(?P<quote>['\"])(?P<format>[^'\"]*)(?P=quote)\s*\)")


@dataclass(frozen=True)
class Template:
    """A chat template ready for rendering."""

    text: str  # the Jinja text that is rendered, with its clock fixed where it reads one
    hash: str  # "sha256:..." of `text`, and of the variables if there are any
    reads_clock: bool  # it asks for the current date (answered with FIXED_DATE)
    variables: tuple[
        tuple[str, Any], ...
    ] = ()  # that the template reads beside the messages, as enable_thinking

    __repr__ = short_repr

    def with_variables(self, variables: Mapping[str, Any], *, where: str) -> Template:
        """Return the template with values for variables that it reads.

        Raises:
          CheckpointError: the template does not read a variable of this name, so its value would change nothing; or it
            is one that every conversation has.
        """
        for name in variables:
            read = re.search(rf"(?<![\w.'\"-]){re.escape(name)}(?!\w)", self.text)
            if not read or name in ("messages", "tools", "documents", "add_generation_prompt"):
                raise CheckpointError(
                    f"{where}: the chat template reads no variable {quote(name)}: expected names that it reads, found "
                    f"{quote(dict(variables))}"
                )
        if not variables:
            return self
        told = json.dumps(dict(variables), sort_keys=True)
        digest = hashlib.sha256(f"{self.hash} {told}".encode()).hexdigest()
        return replace(self, hash=f"sha256:{digest}", variables=tuple(variables.items()))


def choose_template(tokenizer: Any, chat_template: str | None, *, where: str) -> Template:
    """The template to use: the tokenizer's own, or the one asked for.

    Args:
      chat_template: None for the tokenizer's own, "plain", the name of one of several that the
        tokenizer brings, a file, or the Jinja text itself.

    Raises:
      CheckpointError: no template, no such file, or one whose use of the clock cannot be fixed.
    """
    if chat_template is None:
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            raise CheckpointError(
                f"{where}: the tokenizer has no chat template to use; give one with --chat-template FILE,"
                f" or ask for the built-in format with --chat-template {PLAIN}"
            ) from error
    elif chat_template == PLAIN:
        text = PLAIN_TEMPLATE
    elif isinstance(tokenizer.chat_template, dict) and chat_template in tokenizer.chat_template:
        text = tokenizer.chat_template[chat_template]
    elif "{{" in chat_template or "{%" in chat_template:
        text = chat_template
    else:
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"chat template {chat_template}: cannot be read ({error}); expected {PLAIN!r} or a file"
            ) from error
    if not isinstance(text, str):
        raise CheckpointError(f"{where}: chat_template: expected a text, found {quote(text)}")
    fixed = fix_clock(text, where=where)
    try:
        digest = hashlib.sha256(fixed.encode()).hexdigest()
    except UnicodeEncodeError as error:
        lone = f"half of a surrogate pair at character {error.start + 1}"
        raise CheckpointError(f"{where}: chat_template: expected Unicode text, found {lone}") from error
    return Template(text=fixed, hash=f"sha256:{digest}", reads_clock=fixed != text)


def fix_clock(text: str, *, where: str) -> str:
    """`text` with a macro in front that answers every call of `strftime_now` with :data:`FIXED_DATE`.

    Templates reach the clock through this one function of the rendering environment; a macro of
    the same name hides it. The text is returned as it is when it does not mention the function.

    Raises:
      CheckpointError: the date format is computed by the template, so its answers cannot be listed.
    """
    if "strftime_now" not in text:
        return text
    formats = sorted({match["format"] for match in _CLOCK_CALL.finditer(text)})
    calls = len(re.findall(r"strftime_now\s*\(", text))
    if len(_CLOCK_CALL.findall(text)) != calls or any(set(form) & {"\\", "'"} for form in formats):
        raise CheckpointError(
            f"{where}: the chat template reads the clock with a computed format, so scores would change"
            " with the day; give a template without the date with --chat-template FILE"
        )
    cases = "".join(
        f"{{% if format == '{form}' %}}{FIXED_DATE.strftime(form)}{{% endif %}}" for form in formats
    )
    # Templates are rendered with trim_blocks: the newline after a block tag vanishes, and what
    # follows still stands at the start of a line, where lstrip_blocks expects it.
    return f"{{% macro strftime_now(format) %}}{cases}{{% endmacro %}}\n{text}"


PLACEHOLDERS = ("image_token_id", "video_token_id")
"""Fields of ``config.json`` with the ids that stand for what is not text."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What some reward models need beside their chat template: a last token, a mark after the response."""

    append: Literal["cls_token", "given"] | None = None
    """A token that ends every conversation, unless it does already: the ``cls_token`` of the tokenizer, or ``given``,
    which is `append_id`."""
    append_id: int | None = None  # the token's id; of the ``cls_token`` for tokenizers that have none
    suffix: str = ""  # text that ends every response, unless it does already
    suffix_id: int | None = None
    """The one id that the tokenizer must have for the suffix; without a text, the id of the suffix itself."""
    template: str | None = None  # chat template for tokenizers that bring none
    templates: tuple[tuple[str, str], ...] = ()  # further chat templates by name, to be asked for
    replaced: tuple[tuple[str, str], ...] = ()
    """Chat templates that stand in for a tokenizer's own, each after a mark that the own one holds: the tokenizer is
    borrowed from a language model, and the reward model was trained on another rendering."""

    def chat_template(self, tokenizer: Any, asked: str | None) -> str | None:
        """The chat template to use instead of the tokenizer's own; None for that one.

        Args:
          tokenizer: of transformers.
          asked: what the user names: one of ``templates``, else returned as it is.
        """
        if asked is not None:
            return dict(self.templates).get(asked, asked)
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            return self.template
        return next((text for mark, text in self.replaced if mark in str(template)), None)

    def last_token(self, tokenizer: Any, *, where: str) -> int | None:
        """Return the id of the token that ends every conversation, or None.

        Raises:
          CheckpointError: the tokenizer has no such token.
        """
        if self.append is None:
            return None
        classifier = getattr(tokenizer, "cls_token_id", None) if self.append == "cls_token" else None
        token = self.append_id if classifier is None else classifier
        if token is None or tokenizer.convert_ids_to_tokens(int(token)) is None:
            raise CheckpointError(
                f"{where}: this model reads its reward at a token (id {token}) that the tokenizer does not have: "
                "name the model's own with --tokenizer"
            )
        return int(token)

    def checked_suffix(self, tokenizer: Any, *, where: str) -> str:
        """Return the suffix that is put behind a conversation, checked against the tokenizer.

        Raises:
          CheckpointError: it is not the one token that the model was trained with, or is known by its id only and
            is no added token: such a token can merge with the text around it.
        """
        if not self.suffix and self.suffix_id is not None:
            texts = {number: text for text, number in tokenizer.get_added_vocab().items()}
            if (text := texts.get(self.suffix_id)) is None:
                found = quote(tokenizer.convert_ids_to_tokens(self.suffix_id))
                raise CheckpointError(
                    f"{where}: token {self.suffix_id} ends the steps of a response: expected an added token of "
                    f"this tokenizer, found {found}: it can merge with the text around it, and steps would be missed"
                )
            return replace(self, suffix=text).checked_suffix(tokenizer, where=where)
        if self.suffix and tokenizer.encode(self.suffix, add_special_tokens=False) != [self.suffix_id]:
            raise CheckpointError(
                f"{where}: this model reads its reward at {self.suffix!r} (id {self.suffix_id}), which is not one "
                "token of this tokenizer: name the model's own with --tokenizer"
            )
        return self.suffix


PLAIN_RULES = TextRules()  # the chat template alone
