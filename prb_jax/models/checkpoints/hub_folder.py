"""Models of the Hugging Face hub, as snapshots on this machine."""

from __future__ import annotations

from pathlib import Path

from prb_jax.errors import CheckpointError, first_line
from prb_jax.models.checkpoints.locate import TORCH, WANTED, has_safetensors
from prb_jax.platform.hub import connection_fault, hub_or_copies


def snapshot_of(name: str, revision: str | None) -> Path:
    """Return the folder with a repository's files that a model needs; weights of torch.save only without safetensors.

    Raises:
      CheckpointError: The repository cannot be fetched, and the hub's cache has no copy.
    """
    from huggingface_hub import snapshot_download

    try:
        with hub_or_copies():
            snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
            if not has_safetensors(snapshot):
                wanted = [*WANTED, *TORCH]
                snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:
        if fault := connection_fault():
            reason = f"no copy in the hub's cache, and the hub cannot be reached ({fault})"
        else:
            reason = f"and it cannot be fetched from the hub: {first_line(error)}"
        raise CheckpointError(f"{name}: no such folder here, {reason}") from error
    return snapshot
