"""Where a text can be cut so that its two parts, tokenised apart, give the ids of the whole.

A tokenizer first looks for its added tokens and then normalises, splits and encodes what stands
between them, each stretch by itself. So the ids before and after a special token do not depend on
each other, and the K conversations of a comparison, which share thousands of tokens of prompt, need
those tokenised only once. This holds for tokens that

* match the text as it stands (`special`, not `normalized`, not `single_word`),
* take no neighbouring blanks with them (neither `lstrip` nor `rstrip`), and
* cannot be hidden by an overlapping added token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def independent_tokens(tokenizer: Any, probe: str) -> tuple[str, ...]:
    """The tokens occurring in the rendered text `probe` before which a text may be cut.

    Empty where the tokenizer is not one of the `tokenizers` library, whose rules these are.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens:
        return ()
    added = list(backend.get_added_tokens_decoder().values())
    contents = [token.content for token in added if token.content]
    return tuple(
        sorted(
            token.content
            for token in added
            if token.content
            and token.content in probe
            and token.special
            and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
            and not any(_may_hide(other, token.content) for other in contents if other != token.content)
        )
    )


def _may_hide(other: str, token: str) -> bool:
    """Whether an occurrence of `other` can cover the start of an occurrence of `token`."""
    return any(
        other[start:].startswith(token) or token.startswith(other[start:]) for start in range(len(other))
    )


def shared_run(texts: Sequence[str], cut_tokens: Sequence[str]) -> int:
    """The last position before one of `cut_tokens` within the text that all `texts` start with.

    0 where there is none, or nothing to share.
    """
    if len(texts) < 2 or not cut_tokens:
        return 0
    first = texts[0]
    run = min(common_start(first, other) for other in texts[1:])
    return max(0, *(first.rfind(token, 0, run) for token in cut_tokens))


def common_start(a: str, b: str) -> int:
    """Number of leading characters in which `a` and `b` agree."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
