"""What the name of a source stands for: a file or a value of a Python file; other kinds have modules of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from prb_jax.errors import DataError, PrbError
from prb_jax.records.comparison import Comparison
from prb_jax.records.field_names import RECORD, FieldNames
from prb_jax.records.files import read_rows
from prb_jax.records.intake import given_rows
from prb_jax.records.lines import Row, is_large
from prb_jax.seams import python_value

if TYPE_CHECKING:
    from prb_jax.records.items import Items

Digest = Callable[[Path], Any]

PRB_SUBSETS: Final[Mapping[str, str]] = {
    "Lifestyle_and_Personal_Development": "Lifestyle",
    "Art_and_Entertainment": "Art",
    "Society_and_Culture": "Society",
}
"""Config name on the hub -> short name, which is that of the paper's released scripts."""

_SHORT_NAMES: Final = {
    name.casefold(): short for long, short in PRB_SUBSETS.items() for name in (long, short)
}


def short_name(subset: str) -> str:
    """The short name of a subset of the paper's data set, in any spelling; other names unchanged."""
    return _SHORT_NAMES.get(subset.casefold(), subset)


def same_subset(name: str | None, wanted: str) -> bool:
    """Whether a subset is the one that is wanted, in any spelling, or a part of its name is: "en" of "en/balanced"."""
    return name is not None and short_name(wanted) in (short_name(name), *name.split("/"))


@dataclass(frozen=True)
class Source:
    """Records by name."""

    name: str  # a path, a hub id, or the part of the generated benchmark
    # the fields that have other names in the data; None to read all columns
    columns: FieldNames | None = RECORD
    benchmark: str | None = None  # the name of the benchmark that it holds, if it holds one

    kind: ClassVar[str]
    has_columns: ClassVar[bool] = False
    """Whether its records are as a stranger wrote them, so that columns may have other names than fields."""

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        """Yield the records, unchecked; those of one config where the subset names one of several.

        Raises:
          DataError: they cannot be read.
        """
        raise NotImplementedError

    def splits(self, config: str | None) -> list[str]:
        """Return the names of all splits, of one config where there are several.

        Raises:
          DataError: they cannot be read.
        """
        raise NotImplementedError

    def files(self, *, split: str) -> Sequence[Path]:
        """Return the files that decide what the split holds; none where no file alone does."""
        return []

    def large_files(self, *, split: str) -> Sequence[Path]:
        """Return the files that are read by windows, as they are large; none where all is read at once."""
        return []

    def stored(self, *, split: str) -> Items[Comparison] | None:
        """Return the comparisons on the disk, if each can be read from there when it is asked for."""
        return None

    @property
    def tokens(self) -> Path | None:
        """The folder of the source, if it holds tokens beside the text."""
        return None

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        """Return what the source is made of, JSON-ready: equal now and later only if its contents are."""
        files = {self._inside(file): digest(file) for file in sorted(self.files(split=split))}
        return {"kind": self.kind, **self.marks(), "split": split, "files": files}

    def marks(self) -> dict[str, Any]:
        """Return what else a description says: how its records are read."""
        columns = self.columns or RECORD
        mapped = {"columns": dict(columns.columns)} if columns.columns else {}
        return mapped | ({"rendered": True} if columns.rendered else {})

    def _inside(self, file: Path) -> str:
        return file.relative_to(self.name).as_posix()


class FileSource(Source):
    """One file."""

    kind = "file"
    has_columns = True

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        return read_rows(Path(self.name), columns=self.columns)

    def files(self, *, split: str) -> Sequence[Path]:
        return [Path(self.name)]

    def large_files(self, *, split: str) -> Sequence[Path]:
        return [file for file in self.files(split=split) if is_large(file)]

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        path = Path(self.name)
        return {"kind": self.kind, **self.marks(), "files": {path.name: digest(path)}}


class PythonSource(Source):
    """FILE.py:NAME, which is a function that returns records, or the records themselves."""

    kind = "python"

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        value = python_value(self.name).value
        try:
            records: Any = value() if callable(value) else value
        except PrbError:
            raise
        except Exception as error:
            raise DataError(f"{self.name}: fails: {type(error).__name__}: {error}") from error
        for row in given_rows(records):
            yield Row(f"{self.name}: {row.where}", row.value)

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        content = sha256()  # of the records: what the file computes may depend on more than the file
        for row in self.rows(subset=None, split=split):
            value = row.value.to_row() if isinstance(row.value, Comparison) else row.value
            content.update(json.dumps(value, sort_keys=True, default=str).encode() + b"\n")
        name = self.name.rpartition(":")[2]
        return {"kind": self.kind, "name": name, "sha256": content.hexdigest()}
