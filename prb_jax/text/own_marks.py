"""Marks of one chat template, which show that it has rendered a text already."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from prb_jax.text.tokenizer import PROBE, ChatTokenizer, RenderError


def own_mark(chat: ChatTokenizer, text: str) -> str | None:
    """Return the mark that shows that the template of a tokenizer has rendered a text; None for an ordinary text."""
    return own_marks(chat).find(text)


@lru_cache(maxsize=8)
def own_marks(chat: ChatTokenizer) -> OwnMarks:
    """Return the marks of the template of a tokenizer."""
    text = chat.render([PROBE])[0]
    try:
        opened = chat.render([PROBE], generation_prompt=True)[0].removeprefix(text)
    except RenderError:
        opened = ""
    edges = {chat.tokenizer.bos_token, chat.tokenizer.eos_token, chat.tokenizer.pad_token}
    return OwnMarks(
        head=text[: text.index(PROBE[0].content)],
        tokens=tuple(token for token in chat.tokenizer.get_added_vocab() if token not in edges),
        bos=chat.tokenizer.bos_token or "",
        opened=opened.strip(),
    )


@dataclass(frozen=True)
class OwnMarks:
    """The marks of one chat template.

    Attributes:
      head: Text that the template writes before a user's message.
      tokens: Special tokens of the tokenizer, without BOS, end and padding.
      bos: BOS token; empty if there is none.
      opened: Text that opens the assistant's turn; empty if the template has none.
    """

    head: str
    tokens: tuple[str, ...]
    bos: str
    opened: str

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the template writes before a user's message."""
        return tuple(token for token in self.tokens if token in self.head)

    @cached_property
    def _turn(self) -> str:
        """The shortest end of the head with a mark and a role; empty if no mark has a role."""
        marks = re.compile("|".join(map(re.escape, self.marks)))
        tails = [self.head[found.start() :].rstrip() for found in marks.finditer(self.head)]
        return next((tail for tail in reversed(tails) if marks.sub("", tail).strip()), "")

    def find(self, text: str) -> str | None:
        """Return the mark that shows that the template has rendered a text; None for an ordinary text.

        A rendered text begins with a mark or BOS, contains a mark with the role of the user, or ends with the beginning
        of the assistant's turn. A question that quotes a mark does none of these.
        """
        mark = next((mark for mark in self.marks if mark in text), None)
        if mark is None:
            return None
        starts = text.lstrip().startswith((*self.marks, *filter(None, [self.bos])))
        ends = bool(self.opened) and text.rstrip().endswith(self.opened)
        return mark if starts or ends or (self._turn and self._turn in text) else None
