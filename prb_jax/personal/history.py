"""Earlier choices of users, without anything that reveals the choice to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prb_jax.errors import DataError, quote
from prb_jax.records.comparison import Comparison

IDENTICAL: Final[str] = "identical responses"
CONTRADICTED: Final[str] = "a pair that the same user judged both ways"


def informative_comparisons(history: Sequence[Comparison]) -> tuple[list[Comparison], dict[str, int]]:
    """Return the comparisons that show a preference of their user, and the number left out by reason."""
    pairs = [(one.user_id, one.prompt, frozenset(one.responses)) for one in history]
    preferred: dict[object, set[frozenset[str]]] = {}
    for pair, one in zip(pairs, history, strict=True):
        labels = one.labels or ()
        top = max(labels, default=None)
        best = frozenset(text for text, label in zip(one.responses, labels, strict=False) if label == top)
        preferred.setdefault(pair, set()).add(best)
    kept, left_out = list[Comparison](), Counter[str]()
    for pair, one in zip(pairs, history, strict=True):
        if len(pair[2]) == 1:
            left_out[IDENTICAL] += 1
        elif len(preferred[pair]) > 1:
            left_out[CONTRADICTED] += 1
        else:
            kept.append(one)
    return kept, dict(left_out)


def preferred_pairs(comparison: Comparison) -> list[tuple[int, int]]:
    """Return the indices (better, worse) of each response with the highest label and each with a lower label."""
    labels = comparison.labels or ()
    top = max(labels, default=0)
    best = [k for k, label in enumerate(labels) if label == top]
    return [(k, other) for k in best for other, label in enumerate(labels) if label < top]


def by_user(history: Iterable[Comparison]) -> dict[str, tuple[Comparison, ...]]:
    """Return the comparisons of each user, in their order.

    Raises:
      DataError: If a comparison has no user.
    """
    groups: dict[str, list[Comparison]] = {}
    for comparison in history:
        if comparison.user_id is None:
            raise DataError(f"history: comparison {quote(comparison.id)} names no user (field 'user_id')")
        groups.setdefault(comparison.user_id, []).append(comparison)
    return {user: tuple(comparisons) for user, comparisons in groups.items()}


def refuse_query_in_history(known: Iterable[Comparison], query: Comparison) -> None:
    """Raise DataError if the query is in the given history, because the history reveals its label."""
    for one in known:
        if one.prompt == query.prompt and set(one.responses) == set(query.responses):
            raise DataError(
                f"comparison {quote(query.id)}: is in the history too, as {quote(one.id)}: its label is known"
            )


def without_shared_responses(context: Sequence[Comparison], query: Comparison) -> tuple[Comparison, ...]:
    """Return the comparisons that share no response with the query: a judged response would reveal its label."""
    asked = set(query.responses)
    return tuple(one for one in context if asked.isdisjoint(one.responses))


def chosen_before(
    comparisons: Sequence[Comparison],
    *,
    most: int,
    history: Mapping[str, Sequence[Comparison]] | None = None,
) -> Iterator[tuple[Comparison, ...]]:
    """Yield for each comparison the latest comparisons of the same user that may be shown with it.

    Args:
      comparisons: Comparisons in order; without ``history``, the earlier ones are the history of a comparison.
      most: Maximum number of comparisons shown.
      history: History of each user; see :func:`by_user`.

    Raises:
      DataError: If a comparison is in the history.
    """
    before: dict[str, list[Comparison]] = {}
    for query in comparisons:
        user = query.user_id
        if history is not None:
            known: Sequence[Comparison] = history.get(user, ()) if user is not None else ()
            refuse_query_in_history(known, query)
        else:
            known = before.setdefault(user, []) if user is not None else []
        latest = without_shared_responses(known, query)
        yield latest[len(latest) - min(most, len(latest)) :]
        if history is None and user is not None:
            before[user].append(query)
