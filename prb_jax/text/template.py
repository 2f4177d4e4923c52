"""Chat templates as text: which one is used, its identity, and the clock it must not read.

Some templates print today's date. A reward must not change with the day it is computed on, so a
template that reads the clock is given a fixed one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, short_repr

PLAIN = "plain"
"""Name of the built-in template for models that have none."""

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
    """A chat template ready for rendering.

    Attributes:
      text: the Jinja text that is rendered, with its clock fixed where it reads one.
      hash: "sha256:..." of `text`.
      reads_clock: whether the template asks for the current date (answered with FIXED_DATE).
    """

    text: str
    hash: str
    reads_clock: bool

    __repr__ = short_repr


def choose_template(tokenizer: Any, chat_template: str | None, *, where: str) -> Template:
    """The template to use: the tokenizer's own, or the one asked for.

    Args:
      tokenizer: a transformers tokenizer.
      chat_template: None for the tokenizer's own, "plain", the name of one of several that the
        tokenizer brings, a file, or the Jinja text itself.
      where: what error messages call the tokenizer.

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
    fixed = fix_clock(text, where=where)
    digest = hashlib.sha256(fixed.encode()).hexdigest()
    return Template(text=fixed, hash=f"sha256:{digest}", reads_clock=fixed != text)


def fix_clock(text: str, *, where: str, date: datetime = FIXED_DATE) -> str:
    """`text` with a macro in front that answers every call of `strftime_now` with `date`.

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
    cases = "".join(f"{{% if format == '{form}' %}}{date.strftime(form)}{{% endif %}}" for form in formats)
    # Templates are rendered with trim_blocks: the newline after a block tag vanishes, and what
    # follows still stands at the start of a line, where lstrip_blocks expects it.
    return f"{{% macro strftime_now(format) %}}{cases}{{% endmacro %}}\n{text}"
