"""Location of a model by name in a local folder, and fingerprint of its weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, first_line, quote
from prb_jax.models.checkpoints.weight_file import read_header
from prb_jax.platform.hub import connection_fault, hub_or_copies
from prb_jax.platform.paths import is_path, localised, near_path, shown
from prb_jax.platform.processes.sharing import process_count, process_index
from prb_jax.records.digests import check_digests
from prb_jax.records.files import has_known_suffix
from prb_jax.records.intake import MODEL_FIRST
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.seams import get

# Files that a model needs, without code. Small files of torch.save are fetched with safetensors; weights of
# torch.save only if there are no safetensors.
_SIDE_FILES = ("value_head.bin", "regression_layer.pt", "gating_layer.pt")
_WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", *_SIDE_FILES)
_TORCH = ("pytorch_model*.bin", "*.pt")

TRAIN, MODEL = "train.json", "model"
"""Record of a training run, and folder of its model."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER, BASE = "peft_adapter", "peft_base"
"""Links to adapter and base in a folder that represents an adapter on its base model."""

_WHOLE_FILE = 32 * 1024**2
_SAMPLES = 256
_SAMPLE_BYTES = 16 * 1024
_SMALL_TENSOR = 256 * 1024


@dataclass(frozen=True)
class ModelFolder:
    """Location of a checkpoint on this machine."""

    name: str  # name given by the user
    path: Path  # local folder
    revision: str | None  # commit on the hub; None for a local folder


def locate(name: str | Path, *, revision: str | None = None, base: str | Path | None = None) -> ModelFolder:
    """Return the folder of a model: a local folder, the model of a run of `prb train`, or a snapshot of a hub
    repository.

    For a PEFT adapter, the folder represents the adapter on its base model.

    Args:
      name: Folder or hub id.
      revision: Branch, tag or commit of a hub id.
      base: Base model of an adapter, if it differs from the base named in the adapter.

    Raises:
      CheckpointError: The name is neither a folder nor a repository that can be fetched; a local folder has a
        revision; a model that is not an adapter has a base; or the adapter cannot be used.
    """
    folder = _folder(name, revision)
    if (folder.path / ADAPTER_CONFIG).is_file() and not _has_weights(folder.path):
        return replace(folder, path=get("models", "adapter").value(folder.path, base))
    if base is not None:
        raise CheckpointError(f"{name}: base is for a PEFT adapter, which this is not: leave it out")
    return folder


def _has_weights(folder: Path) -> bool:
    return any(path.name.startswith(("model", "pytorch_model")) for path in folder.iterdir())


def _folder(name: str | Path, revision: str | None) -> ModelFolder:
    path = Path(localised(name)).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{path}: revision {quote(revision)} was asked for, but this is a local folder"
            )
        return ModelFolder(shown(str(name)), _without_pipes(_trained_model(path)), None)
    if path.exists():
        hint = f"; is it data? {MODEL_FIRST}" if has_known_suffix(path) else ""
        raise CheckpointError(f"{path}: expected a model folder, found a file{hint}")
    text = str(name)
    if text.startswith((".", "/", "~")) or text.count("/") != 1 or is_path(text):
        raise CheckpointError(
            f"{text}: no such folder (a model is a local folder, a hub id like 'org/name', or a "
            f"built-in baseline such as 'baseline:length'){near_path(path)}"
        )
    from huggingface_hub import snapshot_download

    try:
        with hub_or_copies():
            snapshot = Path(snapshot_download(text, revision=revision, allow_patterns=list(_WANTED)))
            if not _has_safetensors(snapshot):
                wanted = [*_WANTED, *_TORCH]
                snapshot = Path(snapshot_download(text, revision=revision, allow_patterns=wanted))
    except Exception as error:
        if fault := connection_fault():
            reason = f"no copy in the hub's cache, and the hub cannot be reached ({fault})"
        else:
            reason = f"and it cannot be fetched from the hub: {first_line(error)}"
        raise CheckpointError(f"{text}: no such folder here, {reason}") from error
    return ModelFolder(text, snapshot, snapshot.name)


def _trained_model(path: Path) -> Path:
    """Return the model folder of a training run; return any other folder unchanged."""
    if not (path / TRAIN).is_file() or (path / "config.json").exists():
        return path
    if not (path / MODEL).is_dir() and (path / "summary.json").is_file():
        raise CheckpointError(
            f"{path}: the model of this training run was deleted: the same command exports it again from its "
            f"checkpoint; of `prb train`, `prb convert {path} DST` does too"
        )
    if not (path / MODEL).is_dir():
        raise CheckpointError(
            f"{path}: this training run is not finished, so there is no model in it yet: the same command "
            f"continues it; of `prb train`, `prb convert {path} DST` writes the best checkpoint"
        )
    return path / MODEL


def check_exported(folder: Path) -> None:
    """Compare the model files of a training run with the digests in the record of the run.

    Other folders, and runs of earlier versions, have no digests. Several processes share the reading.

    Raises:
      CheckpointError: A file is missing or differs from the exported file.
    """
    record = folder.absolute().parent / TRAIN
    if folder.absolute().name != MODEL or not record.is_file():
        return
    digests = read_object(record, error=CheckpointError).get("files", {})
    check_schema(digests, dict[str, str], where=f"{record}: files", error=CheckpointError)
    files = sorted(name for name in digests if name.startswith(f"{MODEL}/"))
    share = {
        name.removeprefix(f"{MODEL}/"): digests[name] for name in files[process_index() :: process_count()]
    }
    check_digests(folder, share, record=record, error=CheckpointError)


def _without_pipes(folder: Path) -> Path:
    """Return the folder after checking for pipes and devices, which would block other readers or never end."""
    for path in folder.iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise CheckpointError(f"{path}: expected a file, found a pipe or a device")
    return folder


def fingerprint(folder: Path) -> dict[str, str]:
    """Return a digest, by file name, of every file that affects scores.

    Files up to 32 MiB are hashed completely (``sha256:``). Larger files, weights, are sampled (``sampled-sha256:``):
    their size and 256 evenly spaced blocks of 16 KiB, including the first and last bytes. Safetensors also contribute
    the header and every tensor of at most 256 KiB, so a newly trained head changes the digest. This distinguishes
    checkpoints at a cost almost independent of their size.

    Raises:
      CheckpointError: A file vanished or cannot be read.
    """
    digests: dict[str, str] = {}
    for pattern in _WANTED if _has_safetensors(folder) else (*_WANTED, *_TORCH):
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                digests[path.name] = _digest(path)
    for part in (ADAPTER, BASE):
        if (folder / part).is_dir():
            digests |= {f"{part}/{name}": digest for name, digest in fingerprint(folder / part).items()}
    return dict(sorted(digests.items()))


def _has_safetensors(folder: Path) -> bool:
    return any(path.name.startswith("model") for path in folder.glob("*.safetensors"))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= _WHOLE_FILE:
                digest.update(file.read())
                return f"sha256:{digest.hexdigest()}"
            digest.update(str(size).encode())
            for number in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
            if path.suffix == ".safetensors":
                for tensor in sorted(read_header(path).values(), key=lambda tensor: tensor.start):
                    digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                    if tensor.nbytes <= _SMALL_TENSOR:
                        file.seek(tensor.start)
                        digest.update(file.read(tensor.nbytes))
            return f"sampled-sha256:{digest.hexdigest()}"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def describe(folder: ModelFolder) -> dict[str, Any]:
    """Return the record of the weights for ``run.json``."""
    return {"revision": folder.revision, "files": fingerprint(folder.path)}
