"""Rows of data sets in the layout of the Hugging Face hub, from the hub or from a folder on disk.

The paper's data set has one config for each of three subsets; their short names are those of the
paper's released scripts. Both places are read by the same call of ``datasets.load_dataset``.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.data.files import RECORD_FIELDS, Row, has_known_suffix
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


@dataclass(frozen=True)
class _Config:
    """One config of a data set: declared by name, or, without a declaration, a sub-folder."""

    name: str
    folder: str | None = None


def short_name(subset: str) -> str:
    """The short name of a subset of the paper's data set, in any spelling; other names unchanged."""
    return _SHORT_NAMES.get(subset.casefold(), subset)


def read_hub(
    source: str | Path,
    *,
    subset: str | None,
    split: str,
    columns: Collection[str] | None = RECORD_FIELDS,
) -> list[Row]:
    """The records of all configs of a data set, or of the one that ``subset`` names, in order.

    If there are several configs, the subset of a record is the (short) name of its config. Configs
    number their records on their own: if two of those read share an id, every id is written as
    "SUBSET/ID".

    Args:
      source: a hub id, or (as ``Path``) a folder with the same layout: configs declared in the
        README.md, or one sub-folder of data files for each.
      subset: name of a config, long or short; None for all. If there is but one config, it is left
        to the caller to choose records by their own subset.
      split: name of the split.
      columns: what is read of each record; None for everything.

    Raises:
      DataError: for a data set, config or split that does not exist or cannot be read.
    """
    configs = _configs(source)
    if subset is not None and len(configs) > 1:
        wanted = [c for c in configs if short_name(c.name) == short_name(subset)]
        if not wanted:
            names = ", ".join(short_name(c.name) for c in configs)
            raise DataError(f"{source}: no subset {quote(subset)}; expected one of {names}")
        configs, several = wanted, True
    else:
        several = len(configs) > 1
    tables = [(config, _load(source, config, split=split, columns=columns)) for config in configs]
    ids = Counter(value for _, rows in tables for value in {str(row.get("id")) for row in rows})
    clash = any(count > 1 for count in ids.values())
    result = []
    for config, rows in tables:
        name = short_name(config.name)
        place = f"{source} ({name}, {split})" if several else f"{source} ({split})"
        for number, row in enumerate(rows, start=1):
            if several:
                row["subset"] = name
            if clash and isinstance(row.get("id"), str | int):
                row["id"] = f"{name}/{row['id']}"
            result.append(Row(f"{place}: row {number}", row))
    return result


def _configs(source: str | Path) -> list[_Config]:
    if source == PRB_REPOSITORY:
        return [_Config(name) for name in PRB_SUBSETS]
    import datasets  # slow to import

    with _loading(source):
        names = datasets.get_dataset_config_names(str(source))
    if isinstance(source, Path) and names == ["default"]:
        folders = sorted(
            f.name for f in source.iterdir() if f.is_dir() and any(has_known_suffix(p) for p in f.iterdir())
        )
        # "data" is where the hub keeps the files of a data set that has no configs.
        if folders and folders != ["data"]:
            return [_Config(name, folder=name) for name in _paper_order(folders)]
    return [_Config(name) for name in _paper_order(names)]


def _paper_order(names: Sequence[str]) -> list[str]:
    """The paper's subsets in the paper's order, so that a folder reads as the hub does."""
    order = list(PRB_SUBSETS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _load(
    source: str | Path, config: _Config, *, split: str, columns: Collection[str] | None
) -> list[dict[str, Any]]:
    import datasets  # slow to import

    # A folder is read through a cache that is thrown away: a kept one would grow with every folder
    # and could hold what the files said before.
    with tempfile.TemporaryDirectory(prefix="prb-jax-") as temporary, _loading(source):
        local = isinstance(source, Path)
        table = datasets.load_dataset(
            str(source),
            None if config.folder else config.name,
            data_dir=config.folder,
            split=split,
            cache_dir=temporary if local else None,
        )
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"{source}: split {quote(split)} is not one table of records")
        if columns is not None:
            table = table.select_columns([name for name in table.column_names if name in columns])
        return [_lists_of_objects(row) for row in table.to_list()]


def _lists_of_objects(row: dict[str, Any]) -> dict[str, Any]:
    """Undo the older ``Sequence`` feature, which turns a list of objects into an object of lists."""
    for name in ("profile", "rubric_aspects"):
        value = row.get(name)
        if isinstance(value, dict) and value and all(isinstance(items, list) for items in value.values()):
            lengths = {len(items) for items in value.values()}
            if len(lengths) == 1:
                row[name] = [dict(zip(value, items)) for items in zip(*value.values())]
    return row


@contextmanager
def _loading(source: str | Path) -> Iterator[None]:
    """Quiet for folders, and one line for whatever ``datasets`` finds wrong."""
    import datasets  # slow to import

    quiet = isinstance(source, Path) and not datasets.are_progress_bars_disabled()
    if quiet:
        datasets.disable_progress_bars()
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
    finally:
        if quiet:
            datasets.enable_progress_bars()


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: the outer ones only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0] or type(error).__name__
