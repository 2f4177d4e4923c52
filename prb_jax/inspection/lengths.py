"""What a length limit does to given comparisons, before anything is scored: what is cut, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import counted, listed, quote
from prb_jax.scoring.reader import Reader
from prb_jax.text.protocol import FACTS, TextProtocol
from prb_jax.text.view import View
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import Tree

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Comparisons under one protocol and one limit.

    Attributes:
      view, limit: what was asked, and the most tokens that it means for this model.
      whole: tokens of each comparison's longest conversation if nothing were cut, ascending.
      posts, posts_dropped: comparisons that lose posts of the profile, and how many posts they lose in all.
      prompts, prompt_tokens: comparisons whose prompt is shortened, and the tokens that it loses.
      responses, response_tokens: comparisons with a response that is cut (the paper protocol), and the tokens.
      refused: ids of the comparisons with a response that leaves no room for the prompt.
    """

    view: View
    limit: int
    whole: Sequence[int]
    posts: int
    posts_dropped: int
    prompts: int
    prompt_tokens: int
    responses: int
    response_tokens: int
    refused: Sequence[str]

    @property
    def lengths(self) -> str:
        """The lengths in words."""
        middle, high = (int(np.percentile(self.whole, q, method="higher")) for q in (50, 95))
        return (
            f"{len(self.whole):,} comparisons, {counted(self.view.profile_posts, 'post')}: {middle:,} tokens in the "
            f"middle, 95 % up to {high:,}, longest {self.whole[-1]:,} (prompt and longest response, nothing cut)"
        )

    @property
    def effect(self) -> str:
        """What the limit does, in words."""
        said = []
        if self.posts:
            said.append(f"{self.posts:,} lose posts of the profile ({counted(self.posts_dropped, 'post')})")
        if self.prompts:
            side = (
                "the prompt's end" if FACTS[self.view.protocol].cuts_responses else "the start of the prompt"
            )
            said.append(f"{self.prompts:,} lose {side} ({self.prompt_tokens:,} tokens)")
        if self.responses:
            said.append(
                f"{self.responses:,} lose the end of a response and its end of turn ({self.response_tokens:,} tokens)"
            )
        if self.refused:
            named = listed(list(map(repr, self.refused)), most=5)
            said.append(
                f"{len(self.refused):,} are refused (--too-long skip leaves them out), as a response leaves no room "
                f"for the prompt: {named}"
            )
        return "\n".join(said) or "nothing is cut"


def length_report(comparisons: Sequence[Comparison], reader: Reader, *, view: View) -> LengthReport:
    """Encodes the comparisons as scoring would, and counts.

    Args:
      comparisons: at least one.
      reader: of the model.
      view: what scoring would show.

    Raises:
      DataError: what scoring would raise, but for responses that are too long.
    """
    limit = reader.limit(view)
    whole = [
        len(tree.prefix) + max(len(response) for response in tree.responses)
        for tree in reader.encode_each(comparisons, view=view, limit=_NO_LIMIT)
        if isinstance(tree, Tree)
    ]
    cuts, refused = [], []
    for comparison, tree in zip(comparisons, reader.encode_each(comparisons, view=view), strict=True):
        if isinstance(tree, TooLongError):
            refused.append(comparison.id)
        else:
            reader.check_readable(f"comparison {quote(comparison.id)}", tree)
            cuts.append(tree.truncation)
    return LengthReport(
        view=view,
        limit=limit,
        whole=sorted(whole),
        posts=sum(cut.posts_dropped > 0 for cut in cuts),
        posts_dropped=sum(cut.posts_dropped for cut in cuts),
        prompts=sum(cut.prompt_tokens_dropped > 0 for cut in cuts),
        prompt_tokens=sum(cut.prompt_tokens_dropped for cut in cuts),
        responses=sum(cut.response_tokens_dropped > 0 for cut in cuts),
        response_tokens=sum(cut.response_tokens_dropped for cut in cuts),
        refused=refused,
    )


def length_rule(protocol: TextProtocol, *, limit: int) -> str:
    """What the protocol does with a conversation of more tokens than the limit, in words."""
    if FACTS[protocol].cuts_responses:
        return f"more than {limit:,} tokens: the end is cut, response and end of turn first"
    return (
        f"more than {limit:,} tokens: posts of the profile go, last first, then the start of the prompt; a response "
        "that leaves no room for the prompt is refused (--too-long skip)"
    )
