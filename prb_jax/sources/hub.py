"""Data sets of the Hugging Face hub, and how the configs of a data set become subsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prb_jax.benchmarks.prb import PRB_REPOSITORY, PRB_SUBSETS, same_subset, short_name
from prb_jax.data.field_names import FieldNames
from prb_jax.data.lines import Row
from prb_jax.errors import DataError, quote
from prb_jax.sources.source import Digest, Source


class HubSource(Source):
    """A data set of the hub."""

    kind = "hub"
    has_columns = True

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        configs, several = choose_configs(_configs(self.name), subset, source=self.name)
        tables = []
        for config in configs:
            place = f"{self.name} ({short_name(config)}, {split})" if several else f"{self.name} ({split})"
            values = _load(self.name, config, split=split, columns=self.columns)
            rows = [Row(f"{place}: row {number}", value) for number, value in enumerate(values, start=1)]
            tables.append((config, rows))
        yield from join_configs(tables, several=several)

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        return {"kind": self.kind, **self.marks(), "repository": self.name, "split": split}


def choose_configs(names: Sequence[str], subset: str | None, *, source: object) -> tuple[Sequence[str], bool]:
    """The configs to read, and whether the data set has several, so that they are its subsets.

    If there is but one config, it is left to the caller to choose records by their own subset.

    Raises:
      DataError: for a subset that is none of them.
    """
    if subset is None or len(names) == 1:
        return names, len(names) > 1
    wanted = [name for name in names if same_subset(name, subset)]
    if not wanted:
        expected = ", ".join(map(short_name, names))
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {expected}")
    return wanted, True


def join_configs(tables: Sequence[tuple[str, Sequence[Row]]], *, several: bool) -> Iterator[Row]:
    """Yield the rows of (config, rows) one after the other.

    If there are several configs, the subset of a record is the (short) name of its config. Configs
    number their records on their own: if two of those read share an id, every id is written as
    "SUBSET/ID".
    """
    ids = Counter(value for _, rows in tables for value in {_id(row) for row in rows} - {None})
    clash = any(count > 1 for count in ids.values())
    for config, rows in tables:
        for row in rows:
            if several and isinstance(row.value, dict):
                row.value["subset"] = short_name(config)
            if clash and _id(row) is not None:
                row.value["id"] = f"{short_name(config)}/{row.value['id']}"
            yield row


def _id(row: Row) -> str | None:
    value = row.value.get("id") if isinstance(row.value, Mapping) else None
    return str(value) if isinstance(value, str | int) else None


def paper_order(names: Iterable[Any]) -> list[Any]:
    """Configs in alphabetic order, but the paper's in the paper's order."""
    order = list(PRB_SUBSETS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name or ""))


def _configs(name: str) -> list[str]:
    if name == PRB_REPOSITORY:
        return list(PRB_SUBSETS)
    import datasets  # slow to import

    with _loading(name):
        return paper_order(datasets.get_dataset_config_names(name))


def _load(name: str, config: str, *, split: str, columns: FieldNames | None) -> list[dict[str, Any]]:
    import datasets  # slow to import

    with _loading(name):
        table = datasets.load_dataset(name, config, split=split)
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"{name}: split {quote(split)} is not one table of records")
        if columns is not None:
            table = table.select_columns([column for column in table.column_names if column in columns])
        return table.to_list()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """One line for whatever ``datasets`` finds wrong."""
    try:
        yield
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{name}: no such file or folder, and the hub cannot be reached ({_reason(error)}); "
            "without a network, give the folder of a downloaded copy"
        ) from error
    except Exception as error:  # a reader of any format fails in its own way; the chain keeps the details
        raise DataError(f"{name}: cannot be read as a data set: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: the outer ones only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0] or type(error).__name__
