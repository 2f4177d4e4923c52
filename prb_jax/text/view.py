"""How much of a comparison a model sees: as in training, as the caller asks, or by default."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prb_jax.errors import DataError, PrbWarning, quote, short_repr
from prb_jax.records.options import option
from prb_jax.text.visible import PROTOCOLS, OrderClaim, TextProtocol, parse_protocol

if TYPE_CHECKING:
    from prb_jax.text.trained_view import TrainedView

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
