"""The two ways of turning a comparison into text and tokens, and the facts that differ between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from prb_jax.errors import DataError, quote


class Protocol(StrEnum):
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


@dataclass(frozen=True)
class ProtocolFacts:
    """What a protocol fixes.

    Attributes:
      max_length: the length limit of a conversation in tokens where the caller gives none; None
        means the model's own context length.
      cuts_responses: whether a conversation beyond the limit loses its end (the response's end and
        end-of-turn token) instead of profile posts and prompt.
    """

    max_length: int | None
    cuts_responses: bool


FACTS = MappingProxyType(
    {
        Protocol.DEFAULT: ProtocolFacts(max_length=None, cuts_responses=False),
        Protocol.PAPER: ProtocolFacts(max_length=8192, cuts_responses=True),
    }
)


def parse_protocol(name: str) -> Protocol:
    """The protocol called `name`.

    Raises:
      DataError: no protocol has this name.
    """
    try:
        return Protocol(name)
    except ValueError:
        known = ", ".join(repr(str(protocol)) for protocol in Protocol)
        raise DataError(f"protocol: expected one of {known}, found {quote(name)}") from None


def length_limit(
    protocol: Protocol, *, context: int, max_length: int | None = None, reserved: int = 0, where: str
) -> int:
    """The most tokens of a conversation's text.

    Args:
      protocol: its own limit counts where the caller gives none.
      context: tokens that the model was made for (max_position_embeddings).
      max_length: the caller's limit.
      reserved: tokens of it that are no text (soft prompts).
      where: the model, for messages.

    Raises:
      DataError: more than the model was made for, or nothing beside what is reserved.
    """
    limit = FACTS[protocol].max_length or context if max_length is None else max_length
    if limit > context:
        if max_length is not None:
            raise DataError(
                f"max_length {limit} is more than the {context} tokens (max_position_embeddings) that {where} was "
                "made for"
            )
        limit = context
    if reserved and limit <= reserved:
        raise DataError(
            f"max_length {limit} leaves no room beside the {reserved} tokens of {where}'s soft prompts"
        )
    return limit - reserved
