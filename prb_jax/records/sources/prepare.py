"""`prb prepare`: any source as array_record files of tensorflow-datasets, checked once."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prb_jax.errors import DataError, RunError
from prb_jax.records.sources.prepared import NAME, is_prepared, metadata
from prb_jax.records.writing import held_folder, refuse_file


@dataclass(frozen=True)
class Prepared:
    """A prepared data set.

    Attributes:
      folder: Folder of its files; `--data` accepts this folder and `out`.
      counts: Number of comparisons by split.
    """

    folder: Path
    counts: dict[str, int]


def prepare(sources: Sequence[str], *, out: str | Path, splits: Sequence[str] = ("test",)) -> Prepared:
    """Write a data set of tensorflow-datasets, without TensorFlow.

    A failing call leaves nothing behind, and the next call removes the files of a killed one. A repeated call finds the
    finished data set. Equal sources give equal bytes.

    Args:
      sources: Sources for `read_comparisons`; ids must be distinct over all sources.
      out: Output folder.
      splits: Splits of the sources to read; they keep their names.

    Raises:
      DataError: A source cannot be read, or an id occurs twice.
      RunError: `out` cannot be written or contains another data set, or another process is writing to it.
    """
    out = Path(out)
    if not sources or not splits:
        raise DataError("prepare: expected at least one source and one split")
    refuse_file(out)
    import tensorflow_datasets as tfds  # slow to import

    from prb_jax.records.sources.tfds_builder import PrbComparisons, made_of

    wanted = made_of(sources, splits)
    if is_prepared(out) and metadata(out) != wanted:
        raise RunError(f"{out}: contains another prepared data set; choose another folder with --out")
    tfds.disable_progress_bar()
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        # tensorflow-datasets prints to standard output and creates an empty folder for downloads.
        with (
            held_folder(out, purpose="prepares a data set here"),
            contextlib.redirect_stdout(io.StringIO()),
            tempfile.TemporaryDirectory() as downloads,
        ):
            for unfinished in (out / NAME).glob("incomplete.*"):
                shutil.rmtree(unfinished)
            builder = PrbComparisons(sources=sources, splits=splits, data_dir=str(out))
            builder.download_and_prepare(download_dir=downloads)  # keeps finished splits
    except (OSError, RuntimeError) as error:  # the writer of array_record files raises the latter
        raise RunError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        for path in (out / NAME, *made):
            with contextlib.suppress(OSError):  # not empty, or not there
                path.rmdir()
    counts = {name: int(split.num_examples) for name, split in builder.info.splits.items()}
    return Prepared(folder=Path(builder.data_dir), counts=counts)
