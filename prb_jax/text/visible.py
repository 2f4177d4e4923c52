"""The leak guard: the one place that decides which parts of a comparison a scored model may see.

Nothing but the prompt, the responses, the text and category of the first profile posts, in words whether these are
ordered, and the hints that a caller asked for, passes through `visible`. Rubric aspects, narrative, labels, margin,
ids, user, subset and the category of the record never do; everything downstream works on its result and not on the
comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.conversation import Message, Messages, Turns, is_rendered, turns_of

RECENCY = "recency"  # the order of a profile with the newest post first

QUESTION_HEADING = "What the user asks now:"

_HEADING = "What this user wrote before{}:"
_RELEVANT, _NEWEST = ", most relevant first", ", newest first"
PROFILE_HEADINGS = tuple(map(_HEADING.format, ("", _RELEVANT, _NEWEST)))  # what may stand above a profile


class TextProtocol(StrEnum):
    """How a comparison is shown to the model.

    DEFAULT: one tokenisation through the chat template (one BOS), the profile before the question,
      truncation that never touches a response, the score read at the last token.
    PAPER: what the scripts released with Personalised RewardBench (arXiv 2604.07343) do: without a
      profile as their pointwise script, with one as their best-of-N script. The rendered template is
      tokenised with special tokens added again, the end of a long conversation is cut off, the score is read
      at the last token that is not the padding token, and of several labels it is the last of the softmax.
    """

    DEFAULT = "default"
    PAPER = "paper"

    @property
    def max_length(self) -> int | None:
        """Most tokens of a conversation where the caller gives no limit; None for the model's own context length."""
        return 8192 if self is TextProtocol.PAPER else None

    @property
    def cuts_responses(self) -> bool:
        """Whether a conversation beyond the limit loses its end (the response's end and end-of-turn token) instead of
        profile posts and prompt."""
        return self is TextProtocol.PAPER


PROTOCOLS = tuple(map(str, TextProtocol))  # their names


def parse_protocol(name: str) -> TextProtocol:
    """The protocol called `name`.

    Raises:
      DataError: no protocol has this name.
    """
    if name not in PROTOCOLS:
        known = ", ".join(map(repr, PROTOCOLS))
        raise DataError(f"protocol: expected one of {known}, found {quote(name)}")
    return TextProtocol(name)


class OrderClaim(StrEnum):
    """What the heading of a profile tells the model about the order of its posts.

    RECORDED: what the record says (`profile_order`): the most relevant first, the newest first, or nothing.
    ALWAYS: that the most relevant come first, whatever their order is; models that were trained so are scored so.
    """

    RECORDED = "recorded"
    ALWAYS = "always"


@dataclass(frozen=True)
class Visible:
    """What the model sees of one comparison."""

    # the conversation that all responses share; its last message is the user's or a tool's
    prefix_messages: tuple[Message, ...]
    responses: tuple[str, ...]  # the K responses, in the order of the comparison


def render_profile(
    posts: Sequence[Post], count: int, *, protocol: TextProtocol = TextProtocol.DEFAULT
) -> str:
    """The first `count` posts as text, one after the other, in the format of the paper.

    Each post is `Post {i} (Category: {category}):`, a newline and its text, numbered from 1. Where a
    post has no category the default protocol leaves the parenthesis out; the paper's format keeps it.
    """
    blocks = []
    for i, post in enumerate(posts[:count], start=1):
        named = post.category or protocol is TextProtocol.PAPER
        header = f"Post {i} (Category: {post.category}):" if named else f"Post {i}:"
        blocks.append(f"{header}\n{post.text}")
    return "\n".join(blocks)


def profile_heading(order: str | None, claim: OrderClaim) -> str:
    """Return what stands above a profile whose record names this order."""
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
    """What a model may see of `comparison` when it is shown at most `profile_posts` posts.

    default: the posts and then the hints stand before the question, under headings, within the first user turn.
    paper: the posts follow the question without any separator (the best-of-N script does so); with
    no posts it is the question alone (the pointwise script).

    Raises:
      DataError: `profile_posts` is negative; hints with the paper protocol, which has no place for them.
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
    """The conversation with a text in front of its first message of the user."""
    place = next(i for i, message in enumerate(messages) if message.role == "user")
    asked = messages[place].with_content(text + messages[place].content)
    return (*messages[:place], asked, *messages[place + 1 :])


def _before_answer(comparison: Comparison, profile: str) -> Messages:
    """The prompt with a profile behind it."""
    if not profile:
        return comparison.prompt
    *before, last = comparison.prompt or [Message("", "")]
    if last.role != "user":
        raise DataError(
            f"comparison {quote(comparison.id)}: protocol paper shows a profile behind the user's last message, and "
            "its prompt ends with none: use the default protocol"
        )
    return (*before, last.with_content(last.content + profile))
