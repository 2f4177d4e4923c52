"""Data sets that `prb prepare` wrote: array_record files with random access.

They are ordinary data sets of tensorflow-datasets; TensorFlow is not needed to read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.records import files as local_files
from prb_jax.records.comparison import Comparison
from prb_jax.records.files import Row, file_digest
from prb_jax.records.items import Items
from prb_jax.records.reading import read_json, read_object
from prb_jax.records.sources.source import Digest, Source

NAME: Final = "prb_comparisons"
"""Name of the data set in tensorflow-datasets, and of its folder."""

OPTIONAL: Final = ("user_id", "profile_order", "category", "subset", "margin", "narrative")
"""Optional fields of a record other than lists, which can be empty."""

DIGESTS: Final = "digests.json"  # digests of the other files at the time of writing
TOKENS: Final = "tokens"  # folder of token stores, if a model was given: see `prb_jax.trees.token_store`

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
        return files if size > local_files.LARGE or tokens_folder(Path(self.name)) is not None else []

    def stored(self, *, split: str) -> PreparedComparisons:
        return PreparedComparisons(self.name, split=split)

    @property
    def tokens(self) -> Path | None:
        folder = Path(self.name)
        return None if tokens_folder(folder) is None else folder

    def describe(self, *, split: str, digest: Digest) -> dict[str, Any]:
        """Return the description of the split's original source, so the copy can replace the source.

        A copy of several sources, or from an earlier version, is described by its own files.

        Raises:
          DataError: The copy is damaged, or its files have changed.
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
    """Comparisons of one split of a prepared folder; each is read from disk on access.

    Args:
      folder: Folder from `prb prepare`, or the folder of a version in it.
      split: Name of the split; a folder with a single split uses it for any name.

    Raises:
      DataError: The folder contains no prepared data set, or lacks this split.
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
        # Reading several examples at once is faster.
        for place, example in zip(places, self._examples.__getitems__(list(places)) if places else ()):
            yield Row(f"{self._place}: row {place + 1}", to_row(example))


def is_prepared(folder: Path) -> bool:
    """Return True if the folder contains a data set from `prb prepare`."""
    return _version_folder(folder) is not None


def metadata(folder: Path) -> dict[str, Any]:
    """Return the origin of the data set: "sources", "splits", "benchmark" (a name or None).

    Raises:
      DataError: The data set is damaged.
    """
    return read_object(_found(folder) / _METADATA, error=DataError, hint=_AGAIN)


def check_text(folder: Path) -> None:
    """Check that the files of a prepared folder, except its tokens, have not changed.

    Raises:
      DataError: A file changed or cannot be read.
    """
    for name, digest in _digests(folder).items():
        if file_digest(_found(folder) / name) != digest:
            raise DataError(f"{_found(folder) / name}: changed since it was prepared; {_AGAIN}")


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files by name; earlier versions stored none."""
    digests = read_json(_found(folder) / DIGESTS, error=DataError, hint=_AGAIN, optional=True)
    return digests if isinstance(digests, dict) else {}


def tokens_folder(folder: Path) -> Path | None:
    """Return the folder of the tokens prepared with a data set; None without tokens."""
    version = _version_folder(folder)
    return version / TOKENS if version is not None and (version / TOKENS).is_dir() else None


def prepared_sources(folder: Path, *, split: str) -> list[Any]:
    """Return the descriptions (`describe_source`) of the sources of a split.

    Raises:
      DataError: The copy is damaged, or does not record its sources.
    """
    made = metadata(folder)
    sources, splits = made.get("sources"), made.get("splits")
    if not isinstance(sources, list) or not isinstance(splits, list) or split not in splits:
        raise DataError(f"{folder}: does not say what the split {quote(split)} was made of; {_AGAIN}")
    per_split = len(sources) // len(splits)
    return sources[splits.index(split) * per_split :][:per_split]


def to_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a stored example to a record; ``prb_jax.records.sources.tfds_builder`` documents the format."""
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
    """Return a list of objects, which is stored as an object of lists."""
    return [dict(zip(columns, (text.decode() for text in texts))) for texts in zip(*columns.values())]


def _version_folder(folder: Path) -> Path | None:
    """Return the folder with the data files: the given folder, or the newest version in it."""
    inside = sorted(folder.glob(f"{NAME}/[0-9]*/{_INFO}"), key=lambda path: path.parent.name, reverse=True)
    for info in (folder / _INFO, *inside):
        with contextlib.suppress(DataError):
            if read_object(info, error=DataError).get("name") == NAME:
                return info.parent
    return None


def _found(folder: Path) -> Path:
    version = _version_folder(folder)
    if version is None:
        raise DataError(f"{folder}: contains no data set written by `prb prepare`")
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
    except Exception as error:  # damaged files raise many types of errors; the chain keeps the details
        raise DataError(f"{folder}: cannot be read: {error}; {_AGAIN}") from error
