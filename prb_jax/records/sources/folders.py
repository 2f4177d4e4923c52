"""Data sets of the hub, and folders in their layout: which file belongs to which config and split.

The README.md of a folder can declare configs (``configs``, as on the hub); other files are then ignored. Without a
declaration names decide: a folder or file name with the word "train", "validation" ("valid", "dev", "val") or "test"
("eval") belongs to this split, and so does ``data/SPLIT-00000-of-00001.*``. If no name contains a split, all files are
"train". Any folder except "data" is a config. Every data file is then read, or an error names it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from prb_jax.errors import DataError, counted, first_line, listed, quote
from prb_jax.platform.hub import connection_fault, hub_or_copies
from prb_jax.records.arrow_tables import without_padding
from prb_jax.records.benchmarks import of_repository
from prb_jax.records.benchmarks.prb import PRB_REPOSITORY
from prb_jax.records.fields import FieldNames
from prb_jax.records.files import SUFFIXES, WINDOWED, Row, has_known_suffix, is_large, read_rows
from prb_jax.records.sources.prepared import PreparedSource, is_prepared, metadata
from prb_jax.records.sources.source import PRB_SUBSETS, Digest, Source, same_subset, short_name
from prb_jax.seams import names

README: Final = "README.md"

_SAVED: Final = ("dataset_dict.json", "state.json")  # written by `save_to_disk`

FolderLayout = Mapping[str | None, Mapping[str, list[Path]]]
"""Config (None: the data set has none) -> split -> files."""

_KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "train": frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "dev", "val"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
_SHARD: Final = re.compile(r"(.+)-\d{5}-of-\d{5}\b")
_TABLES: Final = frozenset(
    (
        ".arrow", ".avro", ".csv", ".feather", ".json", ".jsonl", ".lance", ".ndjson", ".orc", ".parquet", ".tar",
        ".tsv", ".xls", ".xlsx", ".zip",
    )
)  # fmt: skip
_AT_A_TIME: Final = 1024  # rows of a hub data set to decode at once
_NO_DATA: Final = (
    "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"
)  # fmt: skip


def open_folder(path: str) -> Source:
    """Return the source of a folder: one that `prb prepare` wrote, or a data set in the layout of the hub."""
    if not is_prepared(Path(path)):
        saved = any((Path(path) / name).is_file() for name in _SAVED)
        return SavedSource(path) if saved else FolderSource(path)
    benchmark = metadata(Path(path)).get("benchmark")
    return PreparedSource(path, benchmark=benchmark if benchmark in names("benchmarks") else None)


class FolderSource(Source):
    """A folder in the layout of a hub data set; the place of each record is its file and line."""

    kind = "folder"
    has_columns = True

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        layout = folder_layout(Path(self.name))
        names = [name or "default" for name in layout]
        chosen, several = choose_configs(names, subset, source=self.name)
        tables = []
        for name, splits in zip(names, layout.values()):
            if name not in chosen:
                continue
            if not splits.get(split):
                place = f"{self.name} ({name})" if several else self.name
                raise DataError(f"{place}: no split {quote(split)}; it has {', '.join(splits)}")
            tables.append((name, self._rows_of(splits[split])))
        yield from join_configs(tables, several=several)

    def splits(self, config: str | None) -> list[str]:
        layout = folder_layout(Path(self.name))
        return list(dict.fromkeys(split for splits in layout.values() for split in splits))

    def _rows_of(self, files: Sequence[Path]) -> Iterator[Row]:
        return (row for file in files for row in read_rows(file, columns=self.columns))

    def files(self, *, split: str) -> Sequence[Path]:
        folder = Path(self.name)
        files = [file for splits in folder_layout(folder).values() for file in splits.get(split, ())]
        return [folder / README, *files] if _declared(folder) else files

    def large_files(self, *, split: str) -> Sequence[Path]:
        configs = list(folder_layout(Path(self.name)).values())
        files = configs[0].get(split, ()) if len(configs) == 1 else ()
        windowed = all(file.name.endswith(WINDOWED) for file in files)
        return files if windowed and any(map(is_large, files)) else []


class SavedSource(Source):
    """A folder from ``save_to_disk`` of ``datasets``; a single data set without splits is read for any split name."""

    kind = "saved"
    has_columns = True

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        import datasets  # slow to import

        with _loading(self.name):
            saved: Any = datasets.load_from_disk(self.name)
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise DataError(f"{self.name}: no split {quote(split)}; it has {', '.join(map(str, saved))}")
            saved = saved[split]
        if self.columns is not None:
            saved = saved.select_columns([column for column in saved.column_names if column in self.columns])
        for number, value in enumerate(saved, start=1):
            yield Row(f"{self.name} ({split}): row {number}", without_padding(value))

    def files(self, *, split: str) -> Sequence[Path]:
        return [file for file in Path(self.name).rglob("*") if file.is_file()]


def folder_layout(folder: Path) -> FolderLayout:
    """Return the data files of the folder by config and split; configs of the paper's data set keep its order.

    Raises:
      DataError: The declaration is invalid, there are no data files, or a data file lacks a split, or lacks a config
        although others have one; the message names it.
    """
    declared = _declared(folder)
    layout: FolderLayout = dict(_read_declared(folder, declared)) if declared else _by_name(folder)
    return {name: layout[name] for name in paper_order(layout)}


def _by_name(folder: Path) -> dict[str | None, dict[str, list[Path]]]:
    files = list(_data_files(folder))
    if not files:
        raise DataError(
            f"{folder}: cannot be read as a data set: no data files in it; expected {', '.join(SUFFIXES)}"
        )
    unread = [file for file in files if not has_known_suffix(file)]
    _refuse(folder, unread, "of an unsupported kind")
    files_by_config: dict[str | None, list[tuple[Path, set[str]]]] = {}
    for file in files:
        config, splits = _place(PurePosixPath(file.relative_to(folder).as_posix()))
        files_by_config.setdefault(config, []).append((file, splits))
    if len(files_by_config) > 1:
        beside = [file for file, _ in files_by_config.get(None, ())]
        _refuse(folder, beside, "beside sub-folders, which are the subsets")
    layout: dict[str | None, dict[str, list[Path]]] = {}
    for config, members in files_by_config.items():
        named = any(splits for _, splits in members)
        unread = [file for file, splits in members if named and len(splits) != 1]
        _refuse(folder, unread, "whose names contain no split, or several")
        layout[config] = {}
        for file, splits in members:
            layout[config].setdefault(splits.pop() if named else "train", []).append(file)
    return layout


def _place(file: PurePosixPath) -> tuple[str | None, set[str]]:
    """Return the config and the splits in the path of a file within its folder."""
    folders = [name for name in file.parts[:-1] if name != "data"]
    configs = [name for name in folders if not _splits(name)]
    shard = _SHARD.match(file.name)
    if shard and file.parts[0] == "data" and len(file.parts) == 2:
        splits = {shard[1]}
    else:
        splits = set().union(*map(_splits, folders)) or _splits(file.name)
        splits = splits or ({shard[1]} if shard else set())
    return (configs[0] if configs else None), splits


def _splits(name: str) -> set[str]:
    words = set(re.split(r"[-._ \d]+", name.lower()))
    return {split for split, keywords in _KEYWORDS.items() if words & keywords}


def _data_files(folder: Path) -> Iterator[Path]:
    """Everything that looks like a table, but for hidden files and what describes a data set."""
    try:
        paths = sorted(folder.rglob("*"))
    except OSError as error:  # a folder that vanishes or may not be read
        raise DataError(f"{folder}: cannot be searched for data: {error}") from error
    for path in paths:
        inside = path.relative_to(folder)
        if any(part.startswith((".", "__")) for part in inside.parts) or path.name in _NO_DATA:
            continue
        if _TABLES & {suffix.lower() for suffix in path.suffixes} and path.is_file():
            yield path


def _refuse(folder: Path, files: Collection[Path], why: str) -> None:
    if files:
        names = [file.relative_to(folder).as_posix() for file in files]
        raise DataError(
            f"{folder}: contains {counted(len(names), 'data file')} {why}: {listed(names, most=5)}; remove or rename "
            f"them, or declare the files to read in {README}"
        )


def _declared(folder: Path) -> list[Any]:
    """``configs`` of the README.md; empty if it declares none."""
    path = folder / README
    if not path.is_file():
        return []
    from huggingface_hub import metadata_load  # slow to import

    try:
        card = metadata_load(path)
    except Exception as error:  # whatever YAML and its reader make of it
        raise DataError(f"{path}: its metadata cannot be read: {first_line(error)}") from error
    configs = (card or {}).get("configs") or []
    if not isinstance(configs, list):
        raise DataError(f"{path}: configs: expected a list, found {type(configs).__name__}")
    names_files = any(isinstance(c, dict) and {"data_files", "data_dir"} & set(c) for c in configs)
    return configs if names_files else []


def _read_declared(folder: Path, configs: list[Any]) -> Iterator[tuple[str, dict[str, list[Path]]]]:
    for config in configs:
        where = f"{folder / README}: configs"
        if not isinstance(config, dict) or not isinstance(config.get("config_name"), str):
            raise DataError(f"{where}: expected objects with a config_name, found {quote(config)}")
        where = f"{where}: {config['config_name']}"
        base, entries = str(config.get("data_dir") or "."), config.get("data_files")
        if entries is None:
            inside = _by_name(folder / base) if (folder / base).is_dir() else {}
            merged: dict[str, list[Path]] = {}
            for split, files in (item for splits in inside.values() for item in splits.items()):
                merged.setdefault(split, []).extend(files)
            yield config["config_name"], merged
            continue
        splits: dict[str, list[Path]] = {}
        for entry in entries if isinstance(entries, list) else [entries]:
            named = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
            split, paths = named.get("split"), named.get("path")
            for pattern in paths if isinstance(paths, list) else [paths]:
                if not isinstance(split, str) or not isinstance(pattern, str):
                    raise DataError(f"{where}: data_files: expected a split and a path, found {quote(entry)}")
                splits.setdefault(split, []).extend(_matching(folder, base, pattern, where))
        yield config["config_name"], {split: list(dict.fromkeys(files)) for split, files in splits.items()}


def _matching(folder: Path, base: str, pattern: str, where: str) -> list[Path]:
    path = PurePosixPath(base, pattern)
    if path.is_absolute() or ".." in path.parts or "://" in pattern:
        raise DataError(f"{where}: data_files: expected a path within the folder, found {quote(pattern)}")
    if path.name == "**":  # files at any depth, as on the hub
        path = path / "*"
    return sorted(file for file in folder.glob(path.as_posix()) if file.is_file() and file.name != README)


def open_hub(repository: str) -> HubSource:
    """Return the source of a hub id, with its benchmark if it is one."""
    benchmark = of_repository(repository)
    return HubSource(repository, benchmark=None if benchmark is None else benchmark.name)


class HubSource(Source):
    """A data set of the hub."""

    kind = "hub"
    has_columns = True

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        configs, several = choose_configs(_configs(self.name), subset, source=self.name)
        tables = []
        for config in configs:
            place = f"{self.name} ({short_name(config)}, {split})" if several else f"{self.name} ({split})"
            tables.append((config, _load(self.name, config, split=split, columns=self.columns, place=place)))
        yield from join_configs(tables, several=several)

    def splits(self, config: str | None) -> list[str]:
        import datasets  # slow to import

        with _loading(self.name):
            return datasets.get_dataset_split_names(self.name, config)

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        return {"kind": self.kind, **self.marks(), "repository": self.name, "split": split}


def choose_configs(names: Sequence[str], subset: str | None, *, source: object) -> tuple[Sequence[str], bool]:
    """Return the configs to read, and whether the data set has several, which are then its subsets.

    If there is only one config, the caller must select records by their subset.

    Raises:
      DataError: The data set has several configs, and none matches the subset.
    """
    if subset is None or len(names) == 1:
        return names, len(names) > 1
    wanted = [name for name in names if same_subset(name, subset)]
    if not wanted:
        expected = ", ".join(map(short_name, names))
        raise DataError(f"{source}: no subset {quote(subset)}; expected one of {expected}")
    return wanted, True


def join_configs(tables: Sequence[tuple[str, Iterable[Row]]], *, several: bool) -> Iterator[Row]:
    """Yield the rows of all (config, rows) pairs.

    If there are several configs, the subset of a record is the (short) name of its config. Ids can repeat between
    configs; then every id becomes "SUBSET/ID". The rows of a single config are read lazily.
    """
    if len(tables) > 1:
        tables = [(config, list(rows)) for config, rows in tables]
    read = tables if len(tables) > 1 else ()
    ids = Counter(value for _, rows in read for value in {_id(row) for row in rows} - {None})
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


def _load(name: str, config: str, *, split: str, columns: FieldNames | None, place: str) -> Iterator[Row]:
    import datasets  # slow to import

    with _loading(name):
        table = datasets.load_dataset(name, config, split=split)
        if not isinstance(table, datasets.Dataset):
            raise DataError(f"{name}: split {quote(split)} is not one table of records")
        if columns is not None:
            table = table.select_columns([column for column in table.column_names if column in columns])
    for start in range(0, len(table), _AT_A_TIME):
        with _loading(name):
            values = table.select(range(start, min(start + _AT_A_TIME, len(table)))).to_list()
        yield from (
            Row(f"{place}: row {number}", value)
            for number, value in enumerate(map(without_padding, values), start + 1)
        )


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """One line for whatever ``datasets`` finds wrong."""
    try:
        with hub_or_copies():
            yield
    except DataError:
        raise
    except ConnectionError as error:
        raise DataError(
            f"{name}: no such file or folder, no copy in the hub's cache, and the hub cannot be reached "
            f"({connection_fault() or _reason(error)}); without a network, name the folder of a downloaded copy"
        ) from error
    except Exception as error:  # readers raise many types of errors; the chain keeps the details
        raise DataError(f"{name}: cannot be read as a data set: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause: the outer ones only say that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
