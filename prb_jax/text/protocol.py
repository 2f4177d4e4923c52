"""The two ways of turning a comparison into text and tokens, and the facts that differ between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from prb_jax.errors import DataError, quote


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


PROTOCOLS = tuple(map(str, TextProtocol))
"""Their names."""


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
        TextProtocol.DEFAULT: ProtocolFacts(max_length=None, cuts_responses=False),
        TextProtocol.PAPER: ProtocolFacts(max_length=8192, cuts_responses=True),
    }
)


def parse_protocol(name: str) -> TextProtocol:
    """The protocol called `name`.

    Raises:
      DataError: no protocol has this name.
    """
    try:
        return TextProtocol(name)
    except ValueError:
        known = ", ".join(repr(str(protocol)) for protocol in TextProtocol)
        raise DataError(f"protocol: expected one of {known}, found {quote(name)}") from None
