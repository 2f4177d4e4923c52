"""Marks of chat templates around turns, which show that a text is already rendered."""

from __future__ import annotations

import re

TEMPLATE_MARKS = (
    "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "[INST]", "<|user|>", "<|User|>",
    "<｜User｜>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|start|>user", "[|user|]", "<|turn>", "<|im_user|>",
    "<|prompter|>", "<|begin_of_text|>", "GPT4 Correct User:", "<reserved_106>",
)  # fmt: skip
"""Marks before a turn or a conversation."""

_TURN = re.compile(
    r"""
    <[|｜][\w-]*?(?:user|human)[\w-]*[|｜]?>                       # the role within a token: <|user|>, <|im_user|>
    | (?:<[|｜][^<>\s]{1,40}>|<[a-z]+:[a-z]+>|<SPECIAL_\d+>|<extra_id_\d+>|<start_of_turn>|\]~!?b[\]\[])\s*
      (?:user|human)\b                                            # or behind a token: <|turn>user, ]~b]user
    | <role>\s*(?:user|human)\s*</role>
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""A special token and the role of the user, as templates write them before a turn."""

_ASKED = re.compile(
    r"\s*(?:(?:A chat between|Below is an instruction)[^\n]*?[.\n]\s*)*(Human|USER|User|### Instruction):"
)
_ANSWERED = re.compile(r"(Assistant|ASSISTANT|### Response):\s*\Z")
"""Beginning and end of a conversation in a plain text template."""

END_MARKS = (
    "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<|end|>", "<|end_of_text|>", "<eos>",
    "<|eot|>", "<|return|>", "<｜end▁of▁sentence｜>", "<turn|>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<seed:eos>",
    "<SPECIAL_12>", "<extra_id_1>", "<|role_end|>", "<|call|>",
)  # fmt: skip
"""End-of-text tokens that can end a decoded completion."""


def template_mark(text: str) -> str | None:
    """Return the first mark of a chat template in a text; None if there is none.

    A template of plain text begins with a turn and ends before the answer: "Human: ... Assistant:".
    """
    if "<" in text or "[" in text or "]" in text or text.startswith("GPT4"):
        for mark in TEMPLATE_MARKS:
            if mark in text:
                return mark
        if found := _TURN.search(text):
            return found[0]
    answered = _ANSWERED.search(text, max(len(text) - 40, 0))
    asked = answered and _ASKED.match(text)
    return f"{asked[1]}: ... {answered[1]}:" if answered and asked else None


def without_end_marks(text: str) -> str:
    """Return a decoded completion without end-of-text tokens, and blanks between them, at its end."""
    end, kept = len(text), len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        mark = next((mark for mark in END_MARKS if text.endswith(mark, 0, end)), None)
        if mark is None:
            return text[:kept]
        kept = end = end - len(mark)
