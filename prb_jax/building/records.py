"""Input records of a build: a question, its user's profile, and the user's wishes; redaction."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from prb_jax.building.settings import BuildSettings
from prb_jax.errors import DataError, quote
from prb_jax.platform.extras import need_extra
from prb_jax.records.comparison import Comparison, RubricAspect
from prb_jax.records.intake import each_row
from prb_jax.records.sources.source import short_name

_ANSWERS: Final = ("chosen", "rejected", "responses", "labels", "margin")
_PLACEHOLDER: Final = "-"

_NOT: Final = frozenset(
    {"no", "not", "never", "without", "avoid", "avoids", "avoiding", "dont", "doesnt", "cannot"}
)
_EMPTY: Final = frozenset(
    {
        "a", "an", "and", "are", "be", "for", "in", "is", "it", "of", "on", "or", "prefer", "prefers", "should", "that",
        "the", "to", "user", "want", "wants", "wish", "wishes", "with", "do", "does",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """A question and its user's wishes: a comparison with a placeholder for answers. ``where`` locates the record in
    messages."""

    where: str
    comparison: Comparison

    @property
    def id(self) -> str:
        """Id of the record."""
        return self.comparison.id

    @property
    def aspects(self) -> tuple[RubricAspect, ...]:
        """Aspects that the user wants in an answer."""
        return self.comparison.rubric_aspects

    def pair(
        self, chosen: str, rejected: str, aspects: Sequence[Mapping[str, str]] | None = None
    ) -> Comparison:
        """Return the record with two answers, and with ``aspects`` in place of its own if given."""
        row = self.comparison.to_row()
        row.pop("responses")
        row |= {"chosen": chosen, "rejected": rejected}
        if aspects is not None:
            row["rubric_aspects"] = list(aspects)
        return Comparison.from_row(row, where=self.where)


def read_records(settings: BuildSettings) -> list[Record]:
    """Read the records of a build; answers in them are ignored.

    Raises:
      DataError: a record is malformed, has neither aspects nor a narrative, or has contradictory aspects; or an id
        is used twice.
    """
    assert settings.data is not None
    subset = settings.subset
    records: list[Record] = []
    seen: dict[str, str] = {}
    for row in each_row(settings.data, subset=subset, split=settings.split):
        value = row.value.to_row() if isinstance(row.value, Comparison) else row.value
        if not isinstance(value, Mapping):
            raise DataError(f"{row.where}: expected an object with fields, found {quote(value)}")
        rest = {name: part for name, part in value.items() if name not in _ANSWERS} | {
            "responses": [_PLACEHOLDER]
        }
        record = Record(row.where, Comparison.from_row(rest, where=row.where, labelled=False))
        if subset is not None and short_name(record.comparison.subset or "") != short_name(subset):
            continue
        before = seen.setdefault(record.id, row.where)
        if before is not row.where:
            raise DataError(f"{row.where}: field 'id': {quote(record.id)} was already used at {before}")
        _check(record, derive=settings.aspects)
        records.append(record)
        if len(records) == settings.limit:
            break
    if not records:
        named = f" of subset {quote(subset)}" if subset else ""
        raise DataError(f"{settings.data}: found no records{named}")
    return records


def _check(record: Record, *, derive: bool) -> None:
    narrative = (record.comparison.narrative or "").strip()
    if not record.aspects and not narrative:
        raise DataError(
            f"{record.where}: field 'rubric_aspects': missing, and there is no 'narrative' to derive it from; a pair "
            "needs the user's wishes"
        )
    if not record.aspects and not derive:
        raise DataError(
            f"{record.where}: field 'rubric_aspects': missing; --aspects derives them from the record's 'narrative'"
        )
    for number, aspect in enumerate(record.aspects):
        if not aspect.aspect.strip():
            raise DataError(f"{record.where}: field 'rubric_aspects[{number}].aspect': empty")
    if contradicting := contradiction(record.aspects):
        first, second = map(quote, contradicting)
        raise DataError(
            f"{record.where}: field 'rubric_aspects': {first} and {second} contradict each other; no answer can follow "
            "both: remove one of them"
        )


def contradiction(aspects: Sequence[RubricAspect]) -> tuple[str, str] | None:
    """Return two aspects that differ only in "no", "not", "without" and the like; None if there are none.

    The generator checks for contradictions of meaning when it plans.
    """
    for a, b in combinations([aspect.aspect for aspect in aspects], 2):
        words_a, negated_a = _meaning(a)
        words_b, negated_b = _meaning(b)
        if words_a and words_a == words_b and negated_a != negated_b:
            return a, b
    return None


def _meaning(text: str) -> tuple[frozenset[str], bool]:
    words = re.findall(r"\w+", text.casefold().replace("'", "").replace("’", ""))
    negated = sum(word in _NOT for word in words) % 2 == 1
    return frozenset(word for word in words if word not in _NOT and word not in _EMPTY), negated


def load_redactor() -> Callable[[str], str]:
    """Return the cleaning function of scrubadub; raise RunError if it is not installed."""
    need_extra("redact", "--redact")
    import scrubadub  # pyright: ignore[reportMissingImports]

    return lambda text: str(scrubadub.clean(text))


def redact(record: Record, redactor: Callable[[str], str]) -> Record:
    """Return the record with question, profile, aspects and narrative redacted."""
    row = record.comparison.to_row()
    for name in ("question", "narrative"):
        if isinstance(row.get(name), str):
            row[name] = redactor(row[name])
    lists = {"prompt": ("content",), "profile": ("text",), "rubric_aspects": ("aspect", "evidence", "reason")}
    for name, parts in lists.items():
        if name in row:
            row[name] = [{**item, **{part: redactor(item[part]) for part in parts}} for item in row[name]]
    return Record(record.where, Comparison.from_row(row, where=record.where, labelled=False))
