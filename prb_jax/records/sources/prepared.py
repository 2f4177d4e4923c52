"""Data sets that `prb prepare` wrote: array_record files with random access.

They are ordinary data sets of tensorflow-datasets; TensorFlow is not needed to read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records import lines
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import file_digest
from prb_jax.records.items import Items
from prb_jax.records.lines import Row
from prb_jax.records.reading import read_json, read_object
from prb_jax.records.sources.source import Digest, Source

NAME: Final = "prb_comparisons"
"""Of the data set, as tensorflow-datasets knows it; also the folder that it makes."""

OPTIONAL: Final = ("user_id", "profile_order", "category", "subset", "margin", "narrative")
"""Fields that a record may lack, beside lists, which may be empty."""

DIGESTS: Final = "digests.json"  # of its other files when they were written
TOKENS: Final = "tokens"  # of its trees, where a model was given: see `prb_jax.trees.token_store`

_INFO: Final = "dataset_info.json"
_METADATA: Final = "metadata.json"
_AGAIN: Final = "prepare the data set again"
_AT_A_TIME: Final = 1024


class PreparedSource(Source):
    """A prepared folder."""

    kind = "prepared"

    def rows(self, *, subset: str | None, split: str) -> Iterator[Row]:
        return PreparedComparisons(self.name, split=split).rows()

    def files(self, *, split: str) -> Sequence[Path]:
        files = (file for file in Path(self.name).rglob("*") if file.is_file())
        return sorted(
            file for file in files if not any(p.startswith(".") for p in Path(self._inside(file)).parts)
        )

    def large_files(self, *, split: str) -> Sequence[Path]:
        files = self.files(split=split)
        size = sum(file.stat().st_size for file in files)
        return files if size > lines.LARGE or tokens_folder(Path(self.name)) is not None else []

    def stored(self, *, split: str) -> PreparedComparisons:
        return PreparedComparisons(self.name, split=split)

    @property
    def tokens(self) -> Path | None:
        folder = Path(self.name)
        return None if tokens_folder(folder) is None else folder

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        """The description of the source that the split was prepared from, for which the copy may stand.

        It is that of the files themselves where the copy was made of several sources, or by an earlier version.

        Raises:
          DataError: the copy is damaged, or its files are not those that were prepared.
        """
        folder = Path(self.name)
        made = metadata(folder)
        sources, splits = made.get("sources"), made.get("splits")
        if not _digests(folder) or not isinstance(sources, list) or not isinstance(splits, list):
            return super().describe(split=split, digest=digest)
        if tokens_folder(folder) is None:  # else the text is hardly read, and checked where it is
            check_text(folder)
        if len(sources) != len(splits) or (len(splits) > 1 and split not in splits):
            return super().describe(split=split, digest=digest)
        return sources[splits.index(split) if len(splits) > 1 else 0]


class PreparedComparisons(Items[Comparison]):
    """The comparisons of one split of a prepared folder, each read from disk when it is asked for.

    Args:
      folder: that `prb prepare` wrote, or the folder of the version within it.
      split: its name; a folder with only one split has that for any name.

    Raises:
      DataError: for a folder that holds no prepared data set, or not this split.
    """

    in_memory = False

    def __init__(self, folder: str | Path, *, split: str = "test") -> None:
        self._place = f"{folder} ({split})"
        self._examples = _examples(Path(folder), split)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        if isinstance(places, range):
            return [Comparison.from_row(row.value, where=row.where) for row in self._rows(places)]
        return self[places : places + 1][0]

    def __iter__(self) -> Iterator[Comparison]:
        return (Comparison.from_row(row.value, where=row.where) for row in self.rows())

    def rows(self) -> Iterator[Row]:
        """Yield the records of the split, in the order of their source."""
        for start in range(0, len(self), _AT_A_TIME):
            yield from self._rows(range(start, min(start + _AT_A_TIME, len(self))))

    def _rows(self, places: range) -> Iterator[Row]:
        # Several at once are read faster than one after the other.
        for place, example in zip(places, self._examples.__getitems__(list(places)) if places else ()):
            yield Row(f"{self._place}: row {place + 1}", to_row(example))


def is_prepared(folder: Path) -> bool:
    """Whether the folder holds a prepared data set of ours."""
    return _version_folder(folder) is not None


def metadata(folder: Path) -> dict[str, Any]:
    """What the data set was made of: "sources", "splits", "benchmark" (a name or None).

    Raises:
      DataError: it is damaged.
    """
    return read_object(_found(folder) / _METADATA, error=DataError, hint=_AGAIN)


def check_text(folder: Path) -> None:
    """Make sure that the files of a prepared folder, but for its tokens, are those that were prepared.

    Raises:
      DataError: one of them changed, or cannot be read.
    """
    for name, digest in _digests(folder).items():
        if file_digest(_found(folder) / name) != digest:
            raise DataError(f"{_found(folder) / name}: changed since it was prepared; {_AGAIN}")


def _digests(folder: Path) -> dict[str, str]:
    """By name, the digests of the files; earlier versions kept none."""
    digests = read_json(_found(folder) / DIGESTS, error=DataError, hint=_AGAIN, optional=True)
    return digests if isinstance(digests, dict) else {}


def tokens_folder(folder: Path) -> Path | None:
    """The folder of the tokens that were prepared with a data set; None if it was prepared without."""
    version = _version_folder(folder)
    return version / TOKENS if version is not None and (version / TOKENS).is_dir() else None


def prepared_sources(folder: Path, *, split: str) -> list[Any]:
    """What `describe_source` said of the sources that a split was prepared from.

    Raises:
      DataError: the copy is damaged, or does not know its sources.
    """
    made = metadata(folder)
    sources, splits = made.get("sources"), made.get("splits")
    if not isinstance(sources, list) or not isinstance(splits, list) or split not in splits:
        raise DataError(f"{folder}: does not say what the split {quote(split)} was made of; {_AGAIN}")
    per_split = len(sources) // len(splits)
    return sources[splits.index(split) * per_split :][:per_split]


def to_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """A stored example as a record: see ``prb_jax.records.sources.tfds_builder`` for what stands for what."""
    responses = [text.decode() for text in example["responses"]]
    row: dict[str, Any] = {"id": example["id"].decode(), "prompt": _objects(example["prompt"])}
    if bool(example["is_pair"]):
        row["chosen"], row["rejected"] = responses
    else:
        row |= {"responses": responses, "labels": [float(label) for label in example["labels"]]}
    absent = {name.decode() for name in example["absent"]}
    for name in OPTIONAL:
        if name not in absent and name in example:  # earlier versions had fewer fields
            row[name] = float(example[name]) if name == "margin" else example[name].decode()
    for name in ("profile", "rubric_aspects"):
        row[name] = _objects(example[name])
    return row


def _objects(columns: Mapping[str, Sequence[bytes]]) -> list[dict[str, str]]:
    """A list of objects, which is stored as an object of lists."""
    return [dict(zip(columns, (text.decode() for text in texts))) for texts in zip(*columns.values())]


def _version_folder(folder: Path) -> Path | None:
    """The folder with the files themselves: the one given, or the newest version within it."""
    inside = sorted(folder.glob(f"{NAME}/[0-9]*/{_INFO}"), key=lambda path: path.parent.name, reverse=True)
    for info in (folder / _INFO, *inside):
        with contextlib.suppress(DataError):
            if read_object(info, error=DataError).get("name") == NAME:
                return info.parent
    return None


def _found(folder: Path) -> Path:
    version = _version_folder(folder)
    if version is None:
        raise DataError(f"{folder}: holds no data set that `prb prepare` wrote")
    return version


def _examples(folder: Path, split: str) -> Any:
    """Random access to the stored examples of a split."""
    version = _found(folder)
    import tensorflow_datasets as tfds  # slow to import

    try:
        builder: Any = tfds.builder_from_directory(version)
        splits = list(builder.info.splits)
        name = splits[0] if len(splits) == 1 else split
        if name not in splits:
            raise DataError(f"{folder}: no split {quote(split)}; it has {', '.join(splits)}")
        return builder.as_data_source(split=name)
    except DataError:
        raise
    except Exception as error:  # whatever damaged files make of it; the chain keeps the details
        raise DataError(f"{folder}: cannot be read: {error}; {_AGAIN}") from error
