"""What a model sees of a comparison: a :class:`View` says how much, and :func:`visible` returns these parts.

`visible` is the leak guard, the one place that decides which parts of a comparison can reach a scored model. It
passes on only the prompt, the responses, the text and category of the first profile posts, a heading about their
order, and the hints that a caller asked for. It never passes on rubric aspects, narrative, labels, margin, ids, user,
subset or the category of the record. All later steps work on its result, not on the comparison.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prb_jax.errors import DataError, PrbWarning, quote, short_repr
from prb_jax.records.comparison import Comparison, Post
from prb_jax.records.conversation import Message, Messages, Turns, is_rendered, turns_of
from prb_jax.records.options import option

if TYPE_CHECKING:
    from prb_jax.text.trained_view import TrainedView

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


TRAINED_VIEW = "prb_view.json"  # next to `config.json`, in models trained by this package

DEFAULT_PROFILE_POSTS = MappingProxyType({TextProtocol.DEFAULT: 10, TextProtocol.PAPER: 0})
"""Default number of profile posts if neither the caller nor the model gives one. The best-of-N scripts of Personalised
RewardBench show ten posts, its pointwise script none."""


@dataclass(frozen=True)
class View:
    """How a model sees a comparison.

    Raises:
      DataError: A number is too small.
    """

    profile_posts: int  # maximum number of profile posts; 0 shows none
    protocol: TextProtocol = TextProtocol.DEFAULT  # rules for text and tokens
    # maximum tokens of a conversation; None for the limit of the protocol and the model
    max_length: int | None = None
    # claim in the prompt about the order of the posts (default protocol)
    order_claim: OrderClaim = OrderClaim.RECORDED

    def __post_init__(self) -> None:
        if not isinstance(self.profile_posts, Integral) or self.profile_posts < 0:
            raise DataError(f"profile_posts: expected 0 or more, found {quote(self.profile_posts)}")
        if self.max_length is not None and (not isinstance(self.max_length, Integral) or self.max_length < 1):
            raise DataError(f"max_length: expected at least 1, found {quote(self.max_length)}")

    @property
    def wording(self) -> dict[str, str]:
        """Wording of the prompt for a run's record: the order claim, if the prompt has a heading for posts."""
        headed = self.profile_posts > 0 and self.protocol is TextProtocol.DEFAULT
        return {"order_claim": self.order_claim.value} if headed else {}

    @property
    def shown(self) -> dict[str, Any]:
        """Fields of the view for a run's record, JSON-ready."""
        return {
            "protocol": self.protocol.value,
            "profile_posts": self.profile_posts,
            "max_length": self.max_length,
        }

    def __str__(self) -> str:
        length = "the model's context" if self.max_length is None else f"{self.max_length:,} tokens"
        return f"profile posts {self.profile_posts}, protocol {self.protocol}, max length {length}"


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """The caller's choices; None for defaults."""

    profile_posts: int | None = option(
        None,
        "maximum number of profile posts that the model sees (default: as in training; if unknown, 10, or 0 for the "
        "paper protocol)",
        "N",
        least=0,
    )
    protocol: str | None = option(
        None, "rules for text and tokens (default: as in training, or default)", choices=PROTOCOLS
    )
    max_length: int | None = option(
        None,
        "maximum length of a conversation in tokens (default: as in training, or the model's limit)",
        "L",
        least=1,
    )

    __repr__ = short_repr


@dataclass(frozen=True)
class ChosenView:
    """The view that a model is scored with."""

    view: View
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Field of the view -> {"trained": value, "used": value}, JSON-ready, for fields that differ from training; empty
    if the training view is unknown."""

    def warn(self, model: str) -> None:
        """Warn of the overrides, if there are any."""
        said = [
            f"{name} {_spoken(values['used'])} instead of {_spoken(values['trained'])}"
            for name, values in self.overrides.items()
        ]
        if said:
            message = f"{model} is scored otherwise than it was trained: {', '.join(said)}"
            warnings.warn(message, PrbWarning, stacklevel=3)


def choose_view(
    trained: TrainedView | None, options: ViewOptions = ViewOptions(), *, context: int | None = None
) -> ChosenView:
    """Return the view from the given options, else from the model's training, else from the general defaults.

    Args:
      trained: View of the model's training, if known.
      options: The caller's choices.
      context: Context length of the model in tokens. As a limit it equals "the model's own" and is not an override.

    Raises:
      DataError: The protocol is unknown, or a number is too small.
    """
    rules = None if options.protocol is None else parse_protocol(options.protocol)
    if trained is None:
        rules = rules or TextProtocol.DEFAULT
        posts = DEFAULT_PROFILE_POSTS[rules] if options.profile_posts is None else options.profile_posts
        return ChosenView(View(posts, rules, options.max_length))
    given, before = {**asdict(options), "protocol": rules}, trained.view
    view = replace(before, **{name: value for name, value in given.items() if value is not None})
    overrides = {
        name: {"trained": getattr(before, name), "used": getattr(view, name)}
        for name in given
        if getattr(view, name) != getattr(before, name)
    }
    if {view.max_length, before.max_length} == {None, context}:
        overrides.pop("max_length", None)
    return ChosenView(view, overrides)


def length_limit(view: View, *, context: int, reserved: int = 0, where: str) -> int:
    """Return the maximum number of tokens of a conversation's text.

    Args:
      view: View with a limit; if it has none, the protocol's limit counts.
      context: Context length of the model in tokens (max_position_embeddings).
      reserved: Tokens of the context that soft prompts occupy.
      where: Name of the model, for messages.

    Raises:
      DataError: The limit exceeds the context, or the reserved tokens leave no room.
    """
    limit = view.max_length or min(view.protocol.max_length or context, context)
    if limit > context:
        raise DataError(
            f"max_length {limit} is more than the {context} tokens (max_position_embeddings) that {where} was "
            "made for"
        )
    if reserved and limit <= reserved:
        raise DataError(
            f"max_length {limit} leaves no room beside the {reserved} tokens of {where}'s soft prompts"
        )
    return limit - reserved


def _spoken(value: object) -> str:
    return "the model's own" if value is None else str(value)


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
