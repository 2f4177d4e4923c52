"""Rows of data sets of the Hugging Face hub, and how the configs of a data set become subsets.

The paper's data set has one config for each of three subsets; their short names are those of the
paper's released scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from prb_jax.data.field_names import RECORD, FieldNames
from prb_jax.data.files import Row
from prb_jax.errors import DataError, quote

PRB_REPOSITORY: Final = "QiyaoMa/Personalized-RewardBench"

PRB_SUBSETS: Final[Mapping[str, str]] = {
    "Lifestyle_and_Personal_Development": "Lifestyle",
    "Art_and_Entertainment": "Art",
    "Society_and_Culture": "Society",
}
"""Config name on the hub -> short name."""

_SHORT_NAMES: Final = {
    name.casefold(): short for long, short in PRB_SUBSETS.items() for name in (long, short)
}


def short_name(subset: str) -> str:
    """The short name of a subset of the paper's data set, in any spelling; other names unchanged."""
    return _SHORT_NAMES.get(subset.casefold(), subset)


def same_subset(name: str | None, wanted: str) -> bool:
    """Whether a subset is the one that is wanted, in any spelling."""
    return name is not None and short_name(name) == short_name(wanted)


def read_hub(
    source: str, *, subset: str | None, split: str, columns: FieldNames | None = RECORD
) -> list[Row]:
    """The records of all configs of a data set, or of the one that ``subset`` names, in order.

    If there are several configs, the subset of a record is the (short) name of its config. Configs
    number their records on their own: if two of those read share an id, every id is written as
    "SUBSET/ID".

    Args:
      source: a hub id.
      subset: name of a config, long or short; None for all. If there is but one config, it is left
        to the caller to choose records by their own subset.
      split: name of the split.
      columns: what is read of each record; None for everything.

    Raises:
      DataError: for a data set, config or split that does not exist or cannot be read.
    """
    configs, several = choose_configs(_configs(source), subset, source=source)
    tables = []
    for config in configs:
        place = f"{source} ({short_name(config)}, {split})" if several else f"{source} ({split})"
        values = _load(source, config, split=split, columns=columns)
        rows = [Row(f"{place}: row {number}", value) for number, value in enumerate(values, start=1)]
        tables.append((config, rows))
    return join_configs(tables, several=several)


def choose_configs(
    names: Sequence[str], subset: str | None, *, source: str | Path
) -> tuple[Sequence[str], bool]:
    """The configs to read, and whether the data set has several, so that they are its subsets.

    Raises:
      DataError: for a subset that is none of them.
    """
    if subset is None or len(names) == 1:
        return names, len(names) > 1
    wanted = [name for name in names if short_name(name) == short_name(subset)]
    if not wanted:
        expected = ", ".join(map(short_name, names))
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {expected}")
    return wanted, True


def join_configs(tables: Sequence[tuple[str, Sequence[Row]]], *, several: bool) -> list[Row]:
    """The rows of (config, rows) one after the other, with subset and id as ``read_hub`` says."""
    ids = Counter(value for _, rows in tables for value in {_id(row) for row in rows} - {None})
    clash = any(count > 1 for count in ids.values())
    for config, rows in tables:
        for row in rows:
            if several and isinstance(row.value, dict):
                row.value["subset"] = short_name(config)
            if clash and _id(row) is not None:
                row.value["id"] = f"{short_name(config)}/{row.value['id']}"
    return [row for _, rows in tables for row in rows]


def _id(row: Row) -> str | None:
    value = row.value.get("id") if isinstance(row.value, dict) else None
    return str(value) if isinstance(value, str | int) else None


def paper_order(names: Iterable[Any]) -> list[Any]:
    """Configs in alphabetic order, but the paper's in the paper's order."""
    order = list(PRB_SUBSETS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name or ""))


def _configs(source: str) -> list[str]:
    if source == PRB_REPOSITORY:
        return list(PRB_SUBSETS)
    import datasets  # slow to import

    with _loading(source):
        return paper_order(datasets.get_dataset_config_names(source))


def _load(source: str, config: str, *, split: str, columns: FieldNames | None) -> list[dict[str, Any]]:
    import datasets  # slow to import

    with _loading(source):
        table = datasets.load_dataset(source, config, split=split)
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"{source}: split {quote(split)} is not one table of records")
        if columns is not None:
            table = table.select_columns([name for name in table.column_names if name in columns])
        return table.to_list()


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """One line for whatever ``datasets`` finds wrong."""
    try:
        yield
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{source}: no such file or folder, and the hub cannot be reached ({_reason(error)}); "
            "without a network, give the folder of a downloaded copy"
        ) from error
    except Exception as error:  # a reader of any format fails in its own way; the chain keeps the details
        raise DataError(f"{source}: cannot be read as a data set: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: the outer ones only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0] or type(error).__name__
