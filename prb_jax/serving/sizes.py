"""Size limits of one request. The limits are checked before any part of a request is processed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prb_jax.errors import DataError
from prb_jax.records.conversation import turns_of
from prb_jax.serving.items import ChatItem, Item, part_characters

CHARACTERS = 16
"""Characters of a client's text for each token of the length limit; longer texts are refused and not tokenised."""

LEAST_CHARACTERS = 100_000
"""Characters that a prompt, a profile, or another text that is cut to fit may have in any case."""

MOST_CHARACTERS = 1_000_000
"""Characters of a client's text where no length limit is known: of a baseline, a function or a judge."""

PARTS = 100_000
"""Messages and posts of a request, counted once for each prompt and user."""


class TooLargeError(DataError):
    """A request, or a part of one, that is too large to read."""


@dataclass(frozen=True)
class Sizes:
    """Limits of a request; None means no limit.

    Attributes:
      items: Responses of the request.
      posts: Posts of a profile that the model sees. The others are checked and left out.
      tokens: Tokens of a conversation.
      cuts_responses: If True, a response that is too long is cut instead of refused.
    """

    items: int | None = None
    posts: int | None = None
    tokens: int | None = None
    cuts_responses: bool = False

    def check_count(self, count: int, where: str) -> None:
        """Raise TooLargeError if a request asks for more than `items` scores."""
        if self.items is not None and count > self.items:
            raise TooLargeError(f"{where}: expected at most {self.items} responses, found {count}")

    def check_texts(self, items: Sequence[Item]) -> None:
        """Refuse texts that take long to tokenise. A prompt or profile that responses share is checked once.

        Raises:
          TooLargeError: If a text is too large; the message names the text, its size and the largest size allowed.
        """
        contexts = {_context(item): item for item in items if isinstance(item, ChatItem)}
        parts = sum(len(item.prompt) + len(item.profile) for item in contexts.values())
        if parts > PARTS:
            raise TooLargeError(
                f"the prompts and profiles of this request have {parts:,} messages and posts; at most {PARTS:,} are "
                "read at a time"
            )
        least = MOST_CHARACTERS if self.tokens is None else CHARACTERS * self.tokens
        of_cut = max(least, LEAST_CHARACTERS)  # texts that will be cut may be longer
        of_response = of_cut if self.cuts_responses else least
        checked: set[int] = set()
        for number, item in enumerate(items):
            if isinstance(item, ChatItem):
                said = sum(
                    map(part_characters, turns_of(item.response))
                )  # includes the tools, which its text does not contain
                self._check(number, "response", said, of_response)
                for name, noun, part in (
                    ("prompt", "messages", item.prompt), ("profile", "posts", item.profile),
                ):  # fmt: skip
                    if id(part) not in checked:
                        checked.add(id(part))
                        self._check(number, name, sum(map(part_characters, part)), of_cut)
                        if self.tokens is not None:  # each post has a heading of at least one token
                            self._check(number, name, len(part), of_cut // CHARACTERS, noun)
            elif isinstance(item.content, str):
                self._check(number, "input", len(item.content), least if item.keep is None else of_cut)

    def _check(self, number: int, name: str, found: int, most: int, noun: str = "characters") -> None:
        if found > most:
            why = "" if self.tokens is None else f" where a conversation has at most {self.tokens:,} tokens"
            raise TooLargeError(
                f"response {number}: its {name} has {found:,} {noun}; at most {most:,} are read{why}"
            )


UNLIMITED = Sizes()


def _context(item: ChatItem) -> tuple[object, ...]:
    """Return a key that is equal for responses of one request that share prompt, user and profile."""
    return id(item.prompt), item.user_id, id(item.profile), item.profile_order
