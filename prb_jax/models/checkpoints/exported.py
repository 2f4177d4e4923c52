"""Models that a training run exported: their files are compared with the digests in the record of the run."""

from __future__ import annotations

from pathlib import Path

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.locate import MODEL, TRAIN
from prb_jax.platform.processes.sharing import process_count, process_index
from prb_jax.records.digests import check_digests
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema


def check_exported(folder: Path) -> None:
    """Compare the files of an exported model with their digests; runs of earlier versions have no digests.

    Several processes share the reading.

    Raises:
      CheckpointError: A file is missing or differs from the exported file.
    """
    record = folder.absolute().parent / TRAIN
    digests = read_object(record, error=CheckpointError).get("files", {})
    check_schema(digests, dict[str, str], where=f"{record}: files", error=CheckpointError)
    files = sorted(name for name in digests if name.startswith(f"{MODEL}/"))
    share = {
        name.removeprefix(f"{MODEL}/"): digests[name] for name in files[process_index() :: process_count()]
    }
    check_digests(folder, share, record=record, error=CheckpointError)
