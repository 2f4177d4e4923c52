"""Warnings about records that can be read, but are probably not what the user means."""

from __future__ import annotations

import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prb_jax.errors import PrbWarning, quote
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import is_rendered
from prb_jax.records.files import Row
from prb_jax.records.template_marks import template_mark


def with_remarks(rows: Iterable[Row[Comparison]], unnamed: Counter[str]) -> Iterator[Row[Comparison]]:
    """Yield the comparisons, and warn at the end about duplicates, similar user names, and rendered prompts.

    Args:
      rows: Comparisons with their places.
      unnamed: Count of each comparison without an id among those read so far, by the digest of its contents.
    """
    users: dict[str, str] = {}
    rendered = RenderedPrompts()
    try:
        for row in rows:
            rendered.look_at(row)
            if row.value.user_id is not None:
                users.setdefault(row.value.user_id, row.where)
            yield row
    finally:
        again = next((name for name, count in unnamed.items() if count > 1), "")
        total = sum(unnamed.values())
        tell_equal(total - len(unnamed), unnamed=total, example=f"{again}#2")
        tell_alike(users, users)
        rendered.tell()


def tell_equal(again: int, *, unnamed: int, example: str) -> None:
    """Warn of duplicate records without an id.

    Args:
      again: Number of records that equal an earlier one.
      unnamed: Number of records without an id.
      example: Generated id of a duplicate.
    """
    if again:
        warnings.warn(
            f"{again:,} of {unnamed:,} records without an id are equal to an earlier one, and counted again (as "
            f"{example}); remove them, or give each an id",
            PrbWarning,
            stacklevel=2,
        )


class RenderedPrompts:
    """Counts prompts of one text that a chat template has already rendered, and warns about them."""

    def __init__(self) -> None:
        self._read, self._found, self._first = 0, 0, ""

    def look_at(self, row: Row[Comparison]) -> None:
        """Count the prompt of the next comparison."""
        prompt = row.value.prompt
        self._read += 1
        if len(prompt) == 1 and not is_rendered(prompt) and (mark := template_mark(prompt[0].content)):
            self._found += 1
            self._first = self._first or f"{row.where} holds {mark!r}"

    def tell(self) -> None:
        """Warn once about the prompts found."""
        if self._found:
            warnings.warn(
                f"field 'prompt': {self._found:,} of {self._read:,} are rendered by a chat template already (the "
                f"first, {self._first}); the model's template wraps them as a user's message again: give a list of "
                "{role, content}, or the plain question; --rendered (a name that ends in '?rendered') takes texts "
                "as they are",
                PrbWarning,
                stacklevel=2,
            )
        self._found = 0


def tell_alike(users: Iterable[str], places: Mapping[str, str] = MappingProxyType({})) -> None:
    """Warn of names that differ only by Unicode form or space, or are missing values; `places`: first occurrences."""
    spellings: dict[str, list[str]] = {}
    for user in users:
        if user.casefold() in ("nan", "none", "null", "<na>", "n/a"):
            told = f"{quote(user)} looks like a missing value, but counts as one user: leave it out"
            warnings.warn(f"{places.get(user, 'data')}: field 'user_id': {told}", PrbWarning, stacklevel=2)
        spellings.setdefault(" ".join(unicodedata.normalize("NFKC", user).split()), []).append(user)
    alike = [names for names in spellings.values() if len(names) > 1]
    if alike:
        first = [ascii(name) + (f" ({places[name]})" if name in places else "") for name in alike[0][:2]]
        count = sum(map(len, alike))
        warnings.warn(
            f"field 'user_id': {count:,} names differ from another one only by Unicode form or white space, and are "
            f"counted as {count:,} users, not {len(alike):,}: {' and '.join(first)}",
            PrbWarning,
            stacklevel=2,
        )
