"""The leak guard: the one place that decides which parts of a comparison a scored model can see.

`visible` passes on only the prompt, the responses, the text and category of the first profile posts, a heading about
their order, and the hints that a caller asked for. It never passes on rubric aspects, narrative, labels, margin, ids,
user, subset or the category of the record. All later steps work on its result, not on the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.conversation import Message, Messages, Turns, is_rendered, turns_of

RECENCY = "recency"  # profile order with the newest post first

QUESTION_HEADING = "What the user asks now:"

_HEADING = "What this user wrote before{}:"
_RELEVANT, _NEWEST = ", most relevant first", ", newest first"
PROFILE_HEADINGS = tuple(map(_HEADING.format, ("", _RELEVANT, _NEWEST)))  # all possible headings of a profile


class TextProtocol(StrEnum):
    """Rules that turn a comparison into the model's text and tokens.

    DEFAULT: One tokenisation through the chat template (one BOS). The profile precedes the question, truncation never
      cuts a response, and the score is read at the last token.
    PAPER: The rules of the scripts released with Personalised RewardBench (arXiv 2604.07343): the pointwise script
      without a profile, the best-of-N script with one. The rendered template is tokenised with special tokens added
      again, and the end of a long conversation is cut off. The score is read at the last token that is not padding; for
      several labels it is the last value of the softmax.
    """

    DEFAULT = "default"
    PAPER = "paper"

    @property
    def max_length(self) -> int | None:
        """Default limit of a conversation in tokens; None for the model's context length."""
        return 8192 if self is TextProtocol.PAPER else None

    @property
    def cuts_responses(self) -> bool:
        """True if a conversation over the limit loses its end (end of the response, end-of-turn token) instead of
        profile posts and prompt."""
        return self is TextProtocol.PAPER


PROTOCOLS = tuple(map(str, TextProtocol))


def parse_protocol(name: str) -> TextProtocol:
    """Return the protocol called `name`.

    Raises:
      DataError: The name is unknown.
    """
    if name not in PROTOCOLS:
        known = ", ".join(map(repr, PROTOCOLS))
        raise DataError(f"protocol: expected one of {known}, found {quote(name)}")
    return TextProtocol(name)


class OrderClaim(StrEnum):
    """Claim about the order of posts in the heading of a profile.

    RECORDED: The record's own order (`profile_order`): most relevant first, newest first, or no claim.
    ALWAYS: "Most relevant first", whatever the order is; for models that were trained with this claim.
    """

    RECORDED = "recorded"
    ALWAYS = "always"


@dataclass(frozen=True)
class Visible:
    """The parts of one comparison that the model sees."""

    # conversation before the responses; its last message is from the user or a tool
    prefix_messages: tuple[Message, ...]
    responses: tuple[str, ...]  # the K responses, in the order of the comparison


def render_profile(
    posts: Sequence[Post], count: int, *, protocol: TextProtocol = TextProtocol.DEFAULT
) -> str:
    """Return the first `count` posts as text, in the format of the paper.

    Each post is `Post {i} (Category: {category}):`, a newline and its text, numbered from 1. For a post without a
    category the default protocol omits the parenthesis, and the paper's format keeps it.
    """
    blocks = []
    for i, post in enumerate(posts[:count], start=1):
        named = post.category or protocol is TextProtocol.PAPER
        header = f"Post {i} (Category: {post.category}):" if named else f"Post {i}:"
        blocks.append(f"{header}\n{post.text}")
    return "\n".join(blocks)


def profile_heading(order: str | None, claim: OrderClaim) -> str:
    """Return the heading of a profile with the recorded order `order`."""
    if claim is OrderClaim.ALWAYS:
        return _HEADING.format(_RELEVANT)
    return _HEADING.format("" if order is None else _NEWEST if order == RECENCY else _RELEVANT)


def visible(
    comparison: Comparison,
    *,
    profile_posts: int,
    protocol: TextProtocol,
    order_claim: OrderClaim = OrderClaim.RECORDED,
) -> Visible:
    """Return the parts of `comparison` that a model can see with at most `profile_posts` posts.

    default: the posts and then the hints precede the question, under headings, in the first user turn.
    paper: the posts follow the question without a separator, as in the best-of-N script; without posts the prompt is
    only the question, as in the pointwise script.

    Raises:
      DataError: `profile_posts` is negative; the paper protocol has hints, or its prompt does not end with a user
        message to extend; or a rendered text has a profile or hints.
    """
    if profile_posts < 0:
        raise DataError(f"profile_posts: expected 0 or more, found {profile_posts}")
    if comparison.hints and protocol is TextProtocol.PAPER:
        raise DataError(
            "protocol paper: shows no aspects, persona or earlier choices: use the default protocol"
        )
    profile = render_profile(comparison.profile, profile_posts, protocol=protocol)
    if is_rendered(comparison.prompt) and (profile or comparison.hints):
        raise DataError(
            f"comparison {quote(comparison.id)}: its text is rendered already, so there is no place for a profile or "
            "aspects: use --profile-posts 0, or give messages"
        )
    if protocol is TextProtocol.PAPER:
        return Visible(_before_answer(comparison, profile), comparison.responses)
    heading = profile_heading(comparison.profile_order, order_claim)
    told = [heading, profile] if profile else []
    told += [comparison.hints] if comparison.hints else []
    if not told:
        return Visible(comparison.prompt, comparison.responses)
    before = "\n\n".join([*told, QUESTION_HEADING, ""])
    if comparison.prompt:
        return Visible(_after(before, comparison.prompt), comparison.responses)
    return Visible((), tuple(Turns(_after(before, turns_of(text))) for text in comparison.responses))


def _after(text: str, messages: Messages) -> Messages:
    """Return the conversation with a text before its first user message."""
    place = next(i for i, message in enumerate(messages) if message.role == "user")
    asked = messages[place].with_content(text + messages[place].content)
    return (*messages[:place], asked, *messages[place + 1 :])


def _before_answer(comparison: Comparison, profile: str) -> Messages:
    """Return the prompt with the profile after its last user message."""
    if not profile:
        return comparison.prompt
    *before, last = comparison.prompt or [Message("", "")]
    if last.role != "user":
        raise DataError(
            f"comparison {quote(comparison.id)}: protocol paper shows a profile after the user's last message, but "
            "its prompt does not end with one: use the default protocol"
        )
    return (*before, last.with_content(last.content + profile))
