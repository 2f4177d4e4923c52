"""What `train.json` says of a run: all that decides the result, and how it is run this time."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.data.options import Effect, flat_settings, options_of
from prb_jax.models.attention.choice import choose_attention, trained_stream_attention
from prb_jax.processes.sharing import process_count
from prb_jax.training.settings import SCRATCH, TrainSettings
from prb_jax.training.splits import TrainingData
from prb_jax.training.start import Start
from prb_jax.version import versions

_COMPUTING = ("numpy", "jax", "jaxlib", "flax", "optax", "transformers", "tokenizers")


def shared_settings(settings: Any, verb: str = "train") -> dict[str, Any]:
    """The settings that several processes must have in common before anything is read: all but names of files."""
    values = settings_with(settings, "result", "none").items()
    shared = {name: value for name, value in values if not name.startswith("log.")}
    if isinstance(settings, TrainSettings):
        shared["model"] = settings.model == SCRATCH
        shared["scratch.tokenizer"] = bool(settings.scratch.tokenizer)
    return {"verb": verb, "settings": shared}


def run_inputs(
    settings: TrainSettings, data: TrainingData, start: Start, *, lengths: Sequence[int]
) -> dict[str, Any]:
    """Everything that decides the result, JSON-ready."""
    chosen = settings_with(settings, "result")
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
    dtype = jnp.dtype(settings.dtype)
    attention = trained_stream_attention(mesh, dtype, settings.attention)
    attention = attention or choose_attention(mesh, dtype, settings.attention).name
    return {**session_on(mesh, settings), "attention": attention}


def session_on(mesh: Mesh, settings: Any) -> dict[str, Any]:
    """When and on what a run is started, and those of its settings that have no effect on the result."""
    devices = mesh.devices.flatten().tolist()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "settings": settings_with(settings, "contents", "none"),
        "mesh": dict(mesh.shape),
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": process_count(),
        },
    }


def settings_with(settings: Any, *effects: Effect) -> dict[str, Any]:
    """The options with one of these effects, by their keys."""
    flat = flat_settings(settings)
    return {name: flat[name] for name, known in options_of(type(settings)).items() if known.effect in effects}


def computing_versions() -> dict[str, str | None]:
    """Versions of everything that computes in training."""
    return versions(_COMPUTING)
