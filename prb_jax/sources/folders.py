"""Records of a folder in the layout of a hub data set: which file belongs to which config and split.

The README.md declares it (``configs``, as on the hub), and files that it does not name are no part of the data set.
Without a declaration the names say it: a folder or file name with the word "train", "validation" ("valid", "dev",
"val") or "test" ("eval") in it is of that split, as is ``data/SPLIT-00000-of-00001.*``; where no name says one, all
is "train". Any other folder than "data" is a config. Then every data file is read, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from prb_jax.data.files import has_known_suffix, read_rows
from prb_jax.data.lines import WINDOWED, Row, is_large
from prb_jax.errors import DataError, counted, listed, quote
from prb_jax.sources.hub import choose_configs, join_configs, paper_order
from prb_jax.sources.source import Source

README: Final = "README.md"

Layout = Mapping[str | None, Mapping[str, list[Path]]]
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
_NO_DATA: Final = (
    "config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"
)  # fmt: skip


class FolderSource(Source):
    """A folder: its records are those of a data set of the hub, but each is placed at its file and line."""

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
            rows = [row for file in splits[split] for row in read_rows(file, columns=self.columns)]
            tables.append((name, rows))
        yield from join_configs(tables, several=several)

    def files(self, *, split: str) -> Sequence[Path]:
        folder = Path(self.name)
        readme = [folder / README] if _declared(folder) else []
        return [
            *readme,
            *(file for splits in folder_layout(folder).values() for file in splits.get(split, ())),
        ]

    def large_files(self, *, split: str) -> Sequence[Path]:
        configs = list(folder_layout(Path(self.name)).values())
        files = configs[0].get(split, ()) if len(configs) == 1 else ()
        windowed = all(file.name.endswith(WINDOWED) for file in files)
        return files if windowed and any(map(is_large, files)) else []


def folder_layout(folder: Path) -> Layout:
    """All data files of the folder by config and split, configs of the paper's data set in its order.

    Raises:
      DataError: for a declaration that cannot be, no data files, and data files that belong to no split, or to
        no config where others do, naming them.
    """
    declared = _declared(folder)
    found: Layout = dict(_read_declared(folder, declared)) if declared else _by_name(folder)
    return {name: found[name] for name in paper_order(found)}


def _by_name(folder: Path) -> dict[str | None, dict[str, list[Path]]]:
    files = list(_data_files(folder))
    if not files:
        raise DataError(f"{folder}: cannot be read as a data set: no data files in it")
    unread = [file for file in files if not has_known_suffix(file)]
    _refuse(folder, unread, "of a kind that is not read")
    found: dict[str | None, list[tuple[Path, set[str]]]] = {}
    for file in files:
        config, splits = _place(PurePosixPath(file.relative_to(folder).as_posix()))
        found.setdefault(config, []).append((file, splits))
    if None in found and len(found) > 1:
        _refuse(folder, [file for file, _ in found[None]], "beside sub-folders, which are the subsets,")
    layout: dict[str | None, dict[str, list[Path]]] = {}
    for config, members in found.items():
        named = any(splits for _, splits in members)
        unread = [file for file, splits in members if named and len(splits) != 1]
        _refuse(folder, unread, "whose names say no split, or several,")
        layout[config] = {}
        for file, splits in members:
            layout[config].setdefault(splits.pop() if named else "train", []).append(file)
    return layout


def _place(file: PurePosixPath) -> tuple[str | None, set[str]]:
    """The config and the splits that the path of a file within its folder says."""
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
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith((".", "__")) for part in inside.parts) or path.name in _NO_DATA:
            continue
        if _TABLES & {suffix.lower() for suffix in path.suffixes} and path.is_file():
            yield path


def _refuse(folder: Path, files: Collection[Path], why: str) -> None:
    if files:
        names = [file.relative_to(folder).as_posix() for file in files]
        raise DataError(
            f"{folder}: holds {counted(len(names), 'data file')} {why} and would not be read: "
            f"{listed(names, most=5)}; remove or rename, or declare in {README} what is to be read"
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
        raise DataError(f"{path}: its metadata cannot be read: {str(error).splitlines()[0]}") from error
    configs = (card or {}).get("configs") or []
    if not isinstance(configs, list):
        raise DataError(f"{path}: configs: expected a list, found {type(configs).__name__}")
    return (
        configs if any(isinstance(c, dict) and {"data_files", "data_dir"} & set(c) for c in configs) else []
    )


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
