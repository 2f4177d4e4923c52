"""Comparisons in memory, of large files, and looked up by place: each gives the same answers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row
from prb_jax.records.items import Held, Items, joined, windows
from prb_jax.records.joined import Joined
from prb_jax.records.sources.large import LargeComparisons

ALL = [Comparison(id=str(k), prompt="q", responses=["a", "b"], labels=[1.0, 0.0]) for k in range(7)]


def large(comparisons: list[Comparison] = ALL) -> LargeComparisons:
    def start() -> Iterator[Row]:
        return (Row(f"file:{number}", one) for number, one in enumerate(comparisons, 1))

    return LargeComparisons(start)


KINDS = {"held": lambda: Held(ALL), "large": large, "looked up": lambda: Joined([ALL[:3], ALL[3:]])}


@pytest.fixture(params=KINDS)
def items(request: pytest.FixtureRequest) -> Items[Comparison]:
    return KINDS[request.param]()


def test_all_kinds_give_the_same_answers(items):
    assert items.complete == (items.about() == len(ALL))
    assert list(items) == ALL
    assert (len(items), items.complete, items.about()) == (len(ALL), True, len(ALL))
    assert [items[place].id for place in (2, 5, 0, -1)] == ["2", "5", "0", "6"]
    assert list(items.without({0, 6})) == ALL[1:-1]
    assert list(items.at(np.asarray([4, 1]))) == [ALL[4], ALL[1]]
    told = items.changed(lambda one: replace(one, user_id="u"))
    assert [one.user_id for one in told] == ["u"] * len(ALL)
    assert [placed.value for placed in items.placed("name")] == ALL


def test_a_sample_is_everything_in_memory_and_some_of_larger_data():
    sampled = {name: [one.id for one in make().sample(3)] for name, make in KINDS.items()}
    assert sampled == {"held": list("0123456"), "large": list("012"), "looked up": list("036")}


def test_windows_end_with_the_last_comparison(items):
    found = [(window.places, window.last) for window in windows(items, first=1, size=3)]
    assert found == [(range(1), False), (range(1, 4), False), (range(4, 7), True)]
    assert [one for window in windows(items, first=2, size=2) for one in window.comparisons] == ALL


def test_whoever_listens_is_told_of_what_is_read_and_where_it_stands(items):
    heard: list[int] = []
    where = items.listen(lambda index, _: heard.append(index))
    assert [one.id for one in items] == [one.id for one in ALL]
    found = (heard, None if where is None else where(2))
    assert found == ((list(range(7)), "file:3") if type(items) is LargeComparisons else ([], None))


def test_sources_joined_are_in_memory_only_if_all_are():
    held = joined([("a", Held(ALL[:2])), ("b", Held(ALL[2:]))])
    mixed = joined([("a", Held(ALL[:2])), ("b", large(ALL[2:]))])
    assert (held.in_memory, mixed.in_memory, mixed.complete) == (True, False, False)
    assert list(held) == list(mixed) == ALL
    assert [placed.where for placed in mixed.placed("")][:3] == ["a", "a", "file:1"]
    assert joined([("a", mixed)]) is mixed
