"""What chat templates write around the turns of a conversation, by which a text that is rendered already is known."""

from __future__ import annotations

import re

TEMPLATE_MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "[INST]", "<|user|>", "<|User|>",
    "<｜User｜>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|start|>user", "[|user|]", "<|turn>", "<|im_user|>",
    "<|prompter|>", "<|begin_of_text|>",
)  # fmt: skip
"""What chat templates put before a turn or a conversation."""

_OPENINGS = ("Assistant:", "ASSISTANT:", "### Response:")
"""What templates of plain text put before the answer, each behind what they put before a user's turn."""
_TURNS = ("Human:", "USER:", "User:", "### Instruction:")

END_MARKS = (
    "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<|end|>", "<|end_of_text|>", "<eos>",
    "<|eot|>", "<|return|>", "<｜end▁of▁sentence｜>", "<turn|>",
)  # fmt: skip
"""End-of-text tokens, with which a decoded completion may end."""


def template_mark(text: str) -> str | None:
    """Return the mark of a chat template that a text holds, such as a token before a turn; None where it holds none.

    A template of plain text opens the answer at the end: "Human: ... Assistant:".
    """
    if "<" in text or "[" in text:
        for mark in TEMPLATE_MARKS:
            if mark in text:
                return mark
    end = text[-40:].rstrip()
    opening = next((mark for mark in _OPENINGS if end.endswith(mark)), None)
    asked = opening and next(
        (mark for mark in _TURNS if re.search(rf"(?:^|\n|\. ){re.escape(mark)}", text)), None
    )
    return f"{asked} ... {opening}" if asked else None


def without_end_marks(text: str) -> str:
    """Return a decoded completion without the end-of-text tokens, and the blanks between them, that it ends with."""
    end, kept = len(text), len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        mark = next((mark for mark in END_MARKS if text.endswith(mark, 0, end)), None)
        if mark is None:
            return text[:kept]
        kept = end = end - len(mark)
