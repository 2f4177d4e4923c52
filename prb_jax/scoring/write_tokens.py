"""Write a token store: parts by any number of processes, then all of them as one, byte for byte reproducible.

A part holds the trees of some thousand comparisons, one after another. Each is written whole, under a lock of its own,
by the process that comes first, so that a killed command goes on with the parts that are missing. When all are there
one process joins them: prefixes are cut into pages, equal pages are stored once, and equal ids are found.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import zipfile
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from prb_jax.data.files import file_digest
from prb_jax.data.writing import temporary_name, whole_file, write_json
from prb_jax.errors import DataError, RunError
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.scoring.comparison_table import ComparisonTable, TableRow
from prb_jax.scoring.prepared_tokens import store_folder, store_key
from prb_jax.scoring.reader import Reader, open_reader
from prb_jax.sources.prepared import TOKENS, PreparedComparisons, prepared_sources
from prb_jax.text.view import View, ViewOptions
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.token_store import COLUMNS, FORMAT, KIND, PAGE, STORE, open_store, split_pages
from prb_jax.trees.tree import Tree

PART: Final = 4096
"""Comparisons of a part."""

_AT_A_TIME: Final = 256
_PART_ARRAYS: Final = ("facts", "prefix_lengths", "counts", "response_lengths", "read", "cuts", "tokens")
_PARTS: Final = "parts"


@dataclass(frozen=True, kw_only=True)
class TokensJob:
    """What is tokenised; it can be sent to another process.

    Attributes:
      model: a folder or hub id.
      loading: how its tokenizer is opened.
      view: what is asked for; the rest is as the model was trained.
      folder: the prepared folder, with the data itself.
      part: comparisons of a part.
    """

    model: str
    loading: LoadOptions
    view: ViewOptions
    folder: Path
    part: int = PART

    def reader(self) -> Reader:
        """Open the tokenizer."""
        return open_reader(open_model(self.model, self.loading))[0]


def write_store(job: TokensJob, *, split: str, processes: int = 1) -> Path:
    """Write the trees of one split; what is there already stays.

    Args:
      job: what is tokenised.
      split: of the sources.
      processes: how many write parts.

    Returns:
      The folder of the store.

    Raises:
      DataError: a comparison that cannot be read or shown to the model, or an id given twice.
      CheckpointError: the tokenizer cannot be opened.
      RunError: the folder cannot be written.
    """
    reader = job.reader()
    view = reader.view(job.view)
    key = store_key(reader, view)
    path = store_folder(job.folder / TOKENS, key, split=split)
    if (path / STORE).is_file():
        open_store(path)
        return path
    with _writing(path):
        (path / _PARTS).mkdir(parents=True, exist_ok=True)
    others = [
        multiprocessing.get_context("spawn").Process(
            target=_write_parts_quietly, args=(job, split), daemon=True
        )
        for _ in range(processes - 1)
    ]
    for other in others:
        other.start()
    try:
        comparisons = PreparedComparisons(job.folder, split=split)
        _write_parts(job, comparisons, reader, view, path)
    finally:
        for other in others:
            other.join()
    with _locked(path / _PARTS / "join"):
        if not (path / STORE).is_file():
            _join(job, comparisons, path, key=key, data=prepared_sources(job.folder, split=split))
    shutil.rmtree(path / _PARTS, ignore_errors=True)
    return path


def _write_parts_quietly(job: TokensJob, split: str) -> None:
    """In a process of its own: the first process meets every error, too, as it does what is left."""
    with contextlib.suppress(DataError, RunError):
        reader = job.reader()
        view = reader.choose_view(job.view).view
        path = store_folder(job.folder / TOKENS, store_key(reader, view), split=split)
        _write_parts(job, PreparedComparisons(job.folder, split=split), reader, view, path)


def _write_parts(
    job: TokensJob, comparisons: PreparedComparisons, reader: Reader, view: View, path: Path
) -> None:
    """Write the parts that nobody has written or is writing; then wait for those of others, and see to what is left."""
    starts = range(0, len(comparisons), job.part)
    for wait in (False, True):
        for number, start in enumerate(starts):
            file = path / _PARTS / f"{number:06}.npz"
            if file.exists():
                continue
            with _locked(file.with_suffix(".lock"), wait=wait) as held:
                if held and not file.exists():
                    indices = range(start, min(start + job.part, len(comparisons)))
                    _write_part(file, comparisons, indices, reader, view)


def _write_part(
    file: Path, comparisons: PreparedComparisons, indices: range, reader: Reader, view: View
) -> None:
    trees: list[Tree] = []
    rows: list[list[Any]] = []
    for start in range(indices.start, indices.stop, _AT_A_TIME):
        read = comparisons[start : min(start + _AT_A_TIME, indices.stop)]
        try:
            trees += reader.encode_text(read, view=view)
        except TooLongError as error:
            raise DataError(f"{error}; leave it out of the data, or give a larger --max-length") from error
        rows += [TableRow.of(comparison, baselines=True).values() for comparison in read]
    cuts = [tree.truncation for tree in trees]
    arrays = {
        "prefix_lengths": [len(tree.prefix) for tree in trees],
        "counts": [len(tree.responses) for tree in trees],
        "response_lengths": [len(response) for tree in trees for response in tree.responses],
        "read": [place for tree in trees for place in tree.read],
        "cuts": [[c.posts_dropped, c.prompt_tokens_dropped, c.response_tokens_dropped] for c in cuts],
        "tokens": np.concatenate([part for tree in trees for part in (tree.prefix, *tree.responses)]),
    }
    with _writing(file), whole_file(file) as out:
        np.savez(
            out,
            facts=np.frombuffer(json.dumps(rows).encode(), np.uint8),
            **{name: np.asarray(values, np.int32) for name, values in arrays.items()},  # pyright: ignore[reportArgumentType]
        )


def _read_part(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as part:
            return {name: part[name] for name in _PART_ARRAYS}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file}: not a whole part: {error}; remove it, and the same command makes it again"
        ) from error


def _join(
    job: TokensJob, comparisons: PreparedComparisons, path: Path, *, key: Mapping[str, Any], data: Any
) -> None:
    """All parts as one store."""
    table = ComparisonTable(())
    known: dict[bytes, int] = {}
    columns: dict[str, array[int]] = {
        name: array("q")
        for name in ("page_numbers", "prefix_lengths", "response_lengths", "read", "cuts", "checks")
    }
    for name in ("page_starts", "token_starts", "response_starts"):
        columns[name] = array("q", [0])
    with (
        _writing(path),
        _growing(path / "pages.npy", (PAGE,)) as pages,
        _growing(path / "tokens.npy", ()) as tokens,
    ):
        for number in range(-(-len(comparisons) // job.part)):
            arrays = _read_part(path / _PARTS / f"{number:06}.npz")
            table.extend(TableRow(*values) for values in json.loads(arrays["facts"].tobytes()))
            sums = np.add.reduceat(arrays["response_lengths"], np.cumsum([0, *arrays["counts"][:-1]]))
            ends = np.cumsum(arrays["prefix_lengths"].astype(np.int64) + sums)
            for prefix, start, end in zip(
                arrays["prefix_lengths"].tolist(), [0, *ends[:-1].tolist()], ends.tolist()
            ):
                whole, rest = split_pages(arrays["tokens"][start : start + prefix])
                for page in whole:
                    digest = hashlib.blake2b(page.tobytes(), digest_size=16).digest()
                    place = known.setdefault(digest, len(known))
                    if place == pages.rows:
                        pages.append(page[None])
                    columns["page_numbers"].append(place)
                rest_and_responses = np.concatenate([rest, arrays["tokens"][start + prefix : end]])
                tokens.append(rest_and_responses)
                columns["page_starts"].append(len(columns["page_numbers"]))
                columns["token_starts"].append(tokens.rows)
                columns["checks"].append(zlib.crc32(arrays["tokens"][start:end].tobytes()))
            for name in ("prefix_lengths", "response_lengths", "read"):
                columns[name].extend(arrays[name].tolist())
            columns["cuts"].extend(arrays["cuts"].reshape(-1).tolist())
            for count in arrays["counts"].tolist():
                columns["response_starts"].append(columns["response_starts"][-1] + count)
    arrays_of_store: dict[str, np.ndarray] = {name: np.asarray(values) for name, values in columns.items()}
    arrays_of_store["cuts"] = arrays_of_store["cuts"].reshape(-1, 3)
    arrays_of_store |= table.columns()
    for name, values in arrays_of_store.items():
        with _writing(path), whole_file(path / f"{name}.npy") as out:
            np.save(out, values.astype(COLUMNS[name]), allow_pickle=False)
    files = {
        f"{name}.npy": {
            "bytes": (path / f"{name}.npy").stat().st_size,
            "sha256": file_digest(path / f"{name}.npy").removeprefix("sha256:"),
        }
        for name in COLUMNS
    }
    facts_of_store = {
        "kind": KIND,
        "format": FORMAT,
        "comparisons": len(comparisons),
        "key": dict(key),
        "data": data,
    }
    write_json(path / STORE, {**facts_of_store, "files": files})


class _Growing:
    """An array in a file that becomes longer and longer."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...]) -> None:
        self._file, self._shape, self.rows = file, shape, 0
        self.write_header()

    def append(self, values: np.ndarray) -> None:
        """Add rows."""
        self._file.write(values.astype(np.int32, copy=False).tobytes())
        self.rows += len(values)

    def write_header(self) -> None:
        """Write the number of rows that there are now; numpy leaves room for it to grow."""
        header = {"descr": "<i4", "fortran_order": False, "shape": (self.rows, *self._shape)}
        np.lib.format.write_array_header_1_0(self._file, header)


@contextlib.contextmanager
def _growing(path: Path, shape: tuple[int, ...]) -> Iterator[_Growing]:
    with whole_file(path) as file:
        growing = _Growing(file, shape)
        before = file.tell()
        yield growing
        file.seek(0)
        growing.write_header()
        assert file.tell() == before


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that dies with the process; False where another process has it. No lock where there are none."""
    with _writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(file)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        temporary_name(path).unlink(missing_ok=True)
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; the parts that are done are kept: once this is put "
            "right, the same command goes on"
        ) from error
