"""What `train.json` says of a run: all that decides the result, and how it is run this time."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.models.attention.choice import choose_attention, trained_stream_attention
from prb_jax.processes.sharing import process_count
from prb_jax.training.config import flat_settings
from prb_jax.training.options import keys_with
from prb_jax.training.settings import SCRATCH, TrainSettings
from prb_jax.training.splits import TrainingData
from prb_jax.training.start import Start
from prb_jax.version import versions

_NAMES = keys_with(TrainSettings, "contents")
_WITHOUT_EFFECT = keys_with(TrainSettings, "contents", "none")
_COMPUTING = ("numpy", "jax", "jaxlib", "flax", "optax", "transformers", "tokenizers")


def shared_settings(settings: TrainSettings) -> dict[str, Any]:
    """The settings that several processes must have in common before anything is read: all but names of files."""
    values = flat_settings(settings).items()
    shared = {name: value for name, value in values if name not in _NAMES and not name.startswith("log.")}
    from_scratch = {"model": settings.model == SCRATCH, "scratch.tokenizer": bool(settings.scratch.tokenizer)}
    return {"verb": "train", "settings": shared | from_scratch}


def run_inputs(
    settings: TrainSettings, data: TrainingData, start: Start, *, lengths: Sequence[int]
) -> dict[str, Any]:
    """Everything that decides the result, JSON-ready."""
    chosen = {name: value for name, value in flat_settings(settings).items() if name not in _WITHOUT_EFFECT}
    if settings.model != SCRATCH:
        chosen = {name: value for name, value in chosen.items() if not name.startswith("scratch.")}
    return {
        "settings": chosen,
        **({"lengths": list(lengths)} if len(lengths) > 1 else {}),
        **settings.view.wording,
        "learning_rate": settings.learning_rate(hidden_size=start.config.hidden_size),
        "model": dict(start.identity),
        "data": {
            "sources": dict(data.sources),
            "train": len(data.train),
            "validation": len(data.validation),
        },
        "versions": computing_versions(),
    }


def run_session(settings: TrainSettings, mesh: Mesh) -> dict[str, Any]:
    """How the run is done this time."""
    devices, dtype = mesh.devices.flatten().tolist(), jnp.dtype(settings.dtype)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "settings": {name: flat_settings(settings)[name] for name in _WITHOUT_EFFECT},
        "mesh": dict(mesh.shape),
        "attention": trained_stream_attention(mesh, dtype, settings.attention)
        or choose_attention(mesh, dtype, settings.attention).name,
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        },
    }


def computing_versions() -> dict[str, str | None]:
    """Versions of everything that computes in training."""
    return versions(_COMPUTING)
