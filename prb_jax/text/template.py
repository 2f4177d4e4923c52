"""Chat templates: choice, fingerprint, and additional rules of reward models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prb_jax.errors import CheckpointError, listed, quote, short_repr
from prb_jax.seams import get

PLAIN = "plain"  # name of the built-in template, for models without one

PLAIN_TEMPLATE = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% endfor %}"
    "{% if eos_token is defined and eos_token %}{{ eos_token }}{% endif %}"
)
"""`User: ...`, a blank line, `Assistant: ...`, between the tokenizer's BOS and EOS."""

_FOR_TOOLS = "tool_use"  # name of the template that transformers takes for conversations with tools


@dataclass(frozen=True)
class Template:
    """A chat template ready for rendering."""

    text: str  # Jinja text, with a fixed date if it reads the clock
    hash: str  # "sha256:..." of `text`, and of the variables if there are any
    reads_clock: bool  # True if it asks for the current date and gets a fixed date (:mod:`prb_jax.text.template_clock`)
    variables: tuple[tuple[str, Any], ...] = ()  # further inputs of the template, e.g. enable_thinking
    tools_text: str | None = None  # Jinja text for conversations with tools, if the tokenizer has another one

    __repr__ = short_repr

    def with_variables(self, variables: Mapping[str, Any], *, where: str) -> Template:
        """Return the template with values for variables that it reads.

        Raises:
          CheckpointError: The template does not read a variable, so the value would have no effect; or every
            conversation sets the variable.
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
    """Return the requested template, or the tokenizer's own.

    Args:
      tokenizer: A transformers tokenizer.
      chat_template: None for the tokenizer's own template, "plain", the name of one of the tokenizer's templates, a
        file, or the Jinja text.
      where: Start of error messages.

    Raises:
      CheckpointError: There is no template or no such file, or the template's use of the clock cannot be fixed.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if chat_template is None:
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            found = "has no chat template to use; give one with --chat-template FILE"
            if named:
                names = listed(sorted(map(quote, named)))
                found = f"names its chat templates {names}, and none 'default': choose one with --chat-template NAME"
            raise CheckpointError(
                f"{where}: the tokenizer {found}, or ask for the built-in format with --chat-template {PLAIN}"
            ) from error
    elif chat_template == PLAIN:
        text = PLAIN_TEMPLATE
    elif chat_template in named:
        text = named[chat_template]
    elif "{{" in chat_template or "{%" in chat_template:
        text = chat_template
    else:
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"chat template {chat_template}: cannot be read ({error}); expected "
                f"{listed([quote(PLAIN), *sorted(map(quote, named))])} or a file"
            ) from error
    if not isinstance(text, str):
        raise CheckpointError(f"{where}: chat_template: expected a text, found {quote(text)}")
    fixed = _with_fixed_date(text, where)
    try:
        digest = hashlib.sha256(fixed.encode()).hexdigest()
    except UnicodeEncodeError as error:
        lone = f"half of a surrogate pair at character {error.start + 1}"
        raise CheckpointError(f"{where}: chat_template: expected Unicode text, found {lone}") from error
    template = Template(text=fixed, hash=f"sha256:{digest}", reads_clock=fixed != text)
    with_tools = named.get(_FOR_TOOLS) if chat_template is None else None
    if not isinstance(with_tools, str) or with_tools == text:
        return template
    fixed_tools = (
        get("templates", "clock").value(with_tools, where=where)
        if "strftime_now" in with_tools
        else with_tools
    )
    both = hashlib.sha256(f"{digest} {fixed_tools}".encode()).hexdigest()
    return replace(template, tools_text=fixed_tools, hash=f"sha256:{both}")


def _with_fixed_date(text: str, where: str) -> str:
    return get("templates", "clock").value(text, where=where) if "strftime_now" in text else text


PLACEHOLDERS = ("image_token_id", "video_token_id")
"""Fields of ``config.json`` with placeholder ids for images and videos."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """Rules that some reward models need beyond their chat template: a last token, or a suffix of the response."""

    append: Literal["cls_token", "given"] | None = None
    """Last token of every conversation, appended if missing: the tokenizer's ``cls_token``, or `append_id` if "given".
    """
    append_id: int | None = None  # id of the last token; fallback for a tokenizer without ``cls_token``
    suffix: str = ""  # last text of every response, appended if missing
    suffix_id: int | None = None
    """The single id that the tokenizer must have for the suffix; without a text, the id of the suffix itself."""
    template: str | None = None  # chat template for tokenizers without one
    templates: tuple[tuple[str, str], ...] = ()  # further chat templates that a user can choose by name
    replaced: tuple[tuple[str, str], ...] = ()
    """(mark, template) pairs: the template replaces a tokenizer's own template that contains the mark. The tokenizer
    comes from a language model, and the reward model was trained with another template."""

    def chat_template(self, tokenizer: Any, asked: str | None) -> str | None:
        """Return the chat template that replaces the tokenizer's own; None to keep it.

        Args:
          tokenizer: A transformers tokenizer.
          asked: The user's choice: a name in ``templates``; any other value is returned unchanged.
        """
        if asked is not None:
            return dict(self.templates).get(asked, asked)
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            return self.template
        return next((text for mark, text in self.replaced if mark in str(template)), None)


PLAIN_RULES = TextRules()  # only the chat template
