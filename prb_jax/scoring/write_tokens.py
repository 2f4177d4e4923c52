"""Write the tokens of prepared comparisons for `prb prepare`: the stores that `prepared_tokens` reads.

Any number of processes write parts of `PART` comparisons; one process then joins them into a store, reproducible byte
for byte. It cuts prefixes into pages and stores equal pages once. The first process to lock a part writes all of it,
so a restarted command only writes the missing parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model
from prb_jax.records.arrays import load_arrays
from prb_jax.records.files import file_digest
from prb_jax.records.items import Held
from prb_jax.records.sources.prepared import TOKENS, PreparedComparisons, prepared_sources
from prb_jax.records.writing import whole_file, write_json, writing
from prb_jax.scoring.baselines import BASELINES
from prb_jax.scoring.encode_together import packed_trees, unpacked_trees
from prb_jax.scoring.large_table import LargeTable, TableRow, scored_by
from prb_jax.scoring.prepared_tokens import store_folder, store_key
from prb_jax.scoring.reader import Reader, open_reader
from prb_jax.text.view import View, ViewOptions
from prb_jax.trees.token_store import COLUMNS, FORMAT, KIND, PAGE, STORE, open_store
from prb_jax.trees.tree import TooLongError, Tree

PART: Final = 4096  # comparisons per part

_AT_A_TIME: Final = 256
_PARTS: Final = "parts"


@dataclass(frozen=True, kw_only=True)
class TokensJob:
    """A tokenisation job, which can be sent to another process."""

    model: str
    loading: LoadOptions
    view: ViewOptions  # options not given are as in training
    folder: Path
    part: int = PART

    def reader(self) -> Reader:
        """Open the tokenizer."""
        return open_reader(open_model(self.model, self.loading))[0]


def write_store(job: TokensJob, *, split: str, processes: int = 1) -> Path:
    """Write the trees of one split; existing parts are kept.

    Args:
      job: Model, view and folder of the comparisons.
      split: Split of the sources.
      processes: Number of processes that write parts.

    Returns:
      The folder of the store.

    Raises:
      DataError: A comparison cannot be read or shown to the model, or an id occurs twice.
      CheckpointError: The tokenizer cannot be opened.
      RunError: The folder cannot be written.
    """
    reader = job.reader()
    view = reader.view(job.view)
    key = store_key(reader, view)
    path = store_folder(job.folder / TOKENS, key, split=split)
    if (path / STORE).is_file():
        open_store(path)
        shutil.rmtree(path / _PARTS, ignore_errors=True)  # left by a command killed after its last file
        return path
    with writing(path):
        (path / _PARTS).mkdir(parents=True, exist_ok=True)
    start = multiprocessing.get_context("spawn").Process
    others = [start(target=_help, args=(job, split), daemon=True) for _ in range(processes - 1)]
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
            _join(job, len(comparisons), path, key=key, data=prepared_sources(job.folder, split=split))
    shutil.rmtree(path / _PARTS, ignore_errors=True)
    return path


def _help(job: TokensJob, split: str) -> None:
    """Write parts in a helper process; errors are ignored, because the first process repeats unfinished parts."""
    with contextlib.suppress(DataError, RunError):
        reader = job.reader()
        view = reader.choose_view(job.view).view
        path = store_folder(job.folder / TOKENS, store_key(reader, view), split=split)
        _write_parts(job, PreparedComparisons(job.folder, split=split), reader, view, path)


def _write_parts(
    job: TokensJob, comparisons: PreparedComparisons, reader: Reader, view: View, path: Path
) -> None:
    """Write the parts that no process has locked; then wait for the locked parts, and write those still missing."""
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
    rows: list[tuple[Any, ...]] = []
    for start in range(indices.start, indices.stop, _AT_A_TIME):
        read = comparisons[start : min(start + _AT_A_TIME, indices.stop)]
        try:
            trees += reader.encode_text(read, view=view)
        except TooLongError as error:
            raise DataError(f"{error}; leave it out of the data, or give a larger --max-length") from error
        for one in read:
            row = TableRow(one.id, one.subset, one.user_id, one.labels or (), one.margin, one.has_user_info)
            rows.append((*astuple(row), scored_by(BASELINES, one)))
    with writing(file), whole_file(file) as out:
        np.savez(out, rows=np.frombuffer(json.dumps(rows).encode(), np.uint8), trees=packed_trees(trees))


def _read_part(file: Path) -> tuple[list[tuple[TableRow, list[list[float]]]], list[Tree]]:
    hint = "remove it, and the same command makes it again"
    part = load_arrays(file, error=DataError, hint=hint)
    try:
        rows, trees = json.loads(part["rows"].tobytes()), part["trees"]
        return [(TableRow(*values), scores) for *values, scores in rows], unpacked_trees(trees)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file}: not a whole part: {error}; {hint}") from error


def _join(job: TokensJob, count: int, path: Path, *, key: Mapping[str, Any], data: Any) -> None:
    """Join all parts into one store."""
    table = LargeTable(Held())
    known: dict[bytes, int] = {}
    names = ("page_numbers", "prefix_lengths", "response_lengths", "read", "cuts", "checks")
    columns: dict[str, array[int]] = {name: array("q") for name in names}
    starts = {name: array("q", [0]) for name in ("page_starts", "token_starts", "response_starts")}
    with (
        writing(path),
        _growing(path / "pages.npy", (PAGE,)) as append_pages,
        _growing(path / "tokens.npy", ()) as append_tokens,
    ):
        for number in range(-(-count // job.part)):
            rows, trees = _read_part(path / _PARTS / f"{number:06}.npz")
            for row, scores in rows:
                table.append(row, scores)
            for tree in trees:
                whole = len(tree.prefix) // PAGE * PAGE  # tokens in full pages
                for page in tree.prefix[:whole].reshape(-1, PAGE):
                    digest = hashlib.blake2b(page.tobytes(), digest_size=16).digest()
                    if digest not in known:
                        known[digest] = len(known)
                        append_pages(page[None])
                    columns["page_numbers"].append(known[digest])
                tokens = np.concatenate([tree.prefix, *tree.responses])
                columns["checks"].append(zlib.crc32(tokens.tobytes()))
                columns["prefix_lengths"].append(len(tree.prefix))
                columns["response_lengths"].extend(map(len, tree.responses))
                columns["read"].extend(tree.read)
                columns["cuts"].extend(astuple(tree.truncation))
                starts["page_starts"].append(len(columns["page_numbers"]))
                starts["token_starts"].append(append_tokens(tokens[whole:]))
                starts["response_starts"].append(len(columns["read"]))
    arrays: dict[str, np.ndarray] = {name: np.asarray(values) for name, values in (columns | starts).items()}
    arrays["cuts"] = arrays["cuts"].reshape(-1, 3)
    for name, values in (arrays | table.columns()).items():
        with writing(path), whole_file(path / f"{name}.npy") as out:
            np.save(out, values.astype(COLUMNS[name]), allow_pickle=False)
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": file_digest(file).removeprefix("sha256:")}
        for file in (path / f"{name}.npy" for name in COLUMNS)
    }
    facts = {"kind": KIND, "format": FORMAT, "comparisons": count, "key": dict(key), "data": data}
    write_json(path / STORE, {**facts, "files": files})


@contextlib.contextmanager
def _growing(path: Path, shape: tuple[int, ...]) -> Iterator[Callable[[np.ndarray], int]]:
    """Yield a function that appends int32 rows to an array in a file and returns the number of rows."""
    rows = 0
    with whole_file(path) as file:

        def write_header() -> int:
            header = {"descr": "<i4", "fortran_order": False, "shape": (rows, *shape)}
            np.lib.format.write_array_header_1_0(file, header)
            return file.tell()

        def append(values: np.ndarray) -> int:
            nonlocal rows
            file.write(values.astype(np.int32, copy=False).tobytes())
            rows += len(values)
            return rows

        start = write_header()
        yield append
        file.seek(0)
        assert write_header() == start  # numpy leaves room for the number of rows to grow


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock that ends with the process; yield False if another process holds it.

    On a file system without locks, nothing is locked and the result is True.
    """
    held = True
    with writing(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                held = False
        yield held
    finally:
        os.close(file)
