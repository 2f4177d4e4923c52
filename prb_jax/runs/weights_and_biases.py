"""Log runs to Weights & Biases, on request: one folder is one run there, also after a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError, first_line


def check_wandb(option: str) -> Any:
    """Return the module `wandb`; call before anything is computed.

    Args:
      option: Option as the user gave it, for the message.

    Raises:
      RunError: wandb is missing.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunError(
            f"{option}: wandb is not installed: pip install wandb, or remove the option"
        ) from error
    return wandb


def start_wandb(project: str, out: Path, settings: Mapping[str, Any], *, option: str) -> Any:
    """Start or resume a run of this project; the folder defines its name and its id.

    Args:
      project: Project of Weights & Biases.
      out: Run folder; wandb keeps its local files in it.
      settings: Settings to show beside the figures.
      option: Option as the user gave it, for the message.

    Raises:
      RunError: wandb is not installed, or refuses, e.g. without a login.
    """
    wandb = check_wandb(option)
    identity = f"{out.name}-{hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:8]}"
    out.mkdir(parents=True, exist_ok=True)
    try:
        return wandb.init(
            project=project, name=out.name, id=identity, dir=str(out), config=dict(settings), resume="allow"
        )
    except Exception as error:  # wandb has errors of its own for a missing login, network or project
        raise RunError(f"{option}: wandb cannot start a run: {first_line(error)}") from error


def start_logger(
    project: str, out: Path, settings: Mapping[str, Any], *, option: str
) -> Callable[[Mapping[str, Any]], None]:
    """Start a run of an evaluation; return a function that logs its summary. For arguments see :func:`start_wandb`."""
    return partial(_log_summary, start_wandb(project, out, settings, option=option))


def _log_summary(run: Any, summary: Mapping[str, Any]) -> None:
    """Write the figures of a finished evaluation to its run of Weights & Biases, and end that run.

    Numbers are named by their path, e.g. ``by_subset/food/accuracy``; interval bounds are ``ci95/low`` and
    ``ci95/high``.
    """
    run.summary.update(_scalars(summary))
    run.finish()


def _scalars(value: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    scalars: dict[str, float] = {}
    for name, part in value.items():
        path = f"{prefix}{name}"
        if isinstance(part, Mapping):
            scalars |= _scalars(part, f"{path}/")
        elif isinstance(part, list) and len(part) == 2 and all(isinstance(end, float) for end in part):
            scalars |= {f"{path}/low": part[0], f"{path}/high": part[1]}
        elif isinstance(part, int | float) and not isinstance(part, bool):
            scalars[path] = part
    return scalars
