"""Runs whose inputs differ from those that their folder records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError
from prb_jax.platform.processes.agreement import differences
from prb_jax.runs.kind import RUN

_LONGEST_DIFFERENCE = 20


def check_same_inputs(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, file: str = RUN) -> None:
    """Raise RunError if a run would continue with other inputs.

    Args:
      path: Run folder.
      old: Inputs in its `file`.
      new: Inputs of this call.
      file: Name of the record, for the message.

    Raises:
      RunError: the message names each differing field with both values.
    """
    changed = differences(old, new)
    if not changed:
        return
    lines = [f"  {name}: {before} -> {after}" for name, (before, after) in changed.items()]
    if len(lines) > _LONGEST_DIFFERENCE:
        lines[_LONGEST_DIFFERENCE:] = [f"  and {len(lines) - _LONGEST_DIFFERENCE} more"]
    raise RunError(
        f"{path} holds another run; these differ from its {file}:\n"
        + "\n".join(lines)
        + "\nTo continue that run, repeat its settings; for a new one, choose another folder with --out."
    )
