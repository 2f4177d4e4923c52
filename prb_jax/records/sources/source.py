"""Base class of sources, and files; other kinds are in separate modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from prb_jax.records.comparison import Comparison
from prb_jax.records.fields import RECORD, FieldNames
from prb_jax.records.files import Row, is_large, read_rows

if TYPE_CHECKING:
    from prb_jax.records.items import Items

Digest = Callable[[Path], Any]

PRB_SUBSETS: Final[Mapping[str, str]] = {
    "Lifestyle_and_Personal_Development": "Lifestyle",
    "Art_and_Entertainment": "Art",
    "Society_and_Culture": "Society",
}
"""Config name on the hub -> short name of the paper's released scripts."""

_SHORT_NAMES: Final = {
    name.casefold(): short for long, short in PRB_SUBSETS.items() for name in (long, short)
}


def short_name(subset: str) -> str:
    """Return the short name of a subset of the paper's data set, in any spelling; other names unchanged."""
    return _SHORT_NAMES.get(subset.casefold(), subset)


def same_subset(name: str | None, wanted: str) -> bool:
    """Return True if `subset` matches the wanted one in any spelling, or by a part: "en" matches "en/balanced"."""
    return name is not None and short_name(wanted) in (short_name(name), *name.split("/"))


@dataclass(frozen=True)
class Source:
    """Records by name."""

    name: str  # path, hub id, or part of the generated benchmark
    # mapped columns; None to read all columns
    columns: FieldNames | None = RECORD
    benchmark: str | None = None  # name of the benchmark, if it is one

    kind: ClassVar[str]
    has_columns: ClassVar[bool] = False
    """True if columns can have other names than fields, as in foreign data."""

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        """Yield the unchecked records; only those of one config if the subset names one of several.

        Raises:
          DataError: Records cannot be read.
        """
        raise NotImplementedError

    def splits(self, config: str | None) -> list[str]:
        """Return the names of all splits, or of one config's splits if there are several configs.

        Raises:
          DataError: Names cannot be read.
        """
        raise NotImplementedError

    def files(self, *, split: str) -> Sequence[Path]:
        """Return the files that define the contents of the split; empty if files do not define them."""
        return []

    def large_files(self, *, split: str) -> Sequence[Path]:
        """Return the files if they are large and read by windows; empty if all is read at once."""
        return []

    def stored(self, *, split: str) -> Items[Comparison] | None:
        """Return comparisons with random access on disk, if the source supports it."""
        return None

    @property
    def tokens(self) -> Path | None:
        """Return the folder of the source if it contains tokens; else None."""
        return None

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        """Return a JSON-ready description of the source, which changes if the contents change."""
        files = {self._inside(file): digest(file) for file in sorted(self.files(split=split))}
        return {"kind": self.kind, **self.marks(), "split": split, "files": files}

    def marks(self) -> dict[str, Any]:
        """Return further entries of the description: how records are read."""
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
