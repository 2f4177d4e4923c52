"""Combinations of options that several processes do not support."""

from __future__ import annotations

from prb_jax.errors import RunError
from prb_jax.platform.processes.sharing import process_count


def refuse_together(*, endpoint: object = None, part: object = None, together: bool | None = None) -> None:
    """Raise RunError for combinations that several processes do not support.

    Args:
      endpoint: Server that answers the requests, if any.
      part: Part of the run to compute, if not the whole.
      together: True if there are several processes; default: ask this job.
    """
    if process_count() == 1 if together is None else not together:
        return
    if endpoint is not None:
        raise RunError("--distributed: only one process queries an endpoint: remove --distributed")
    if part is not None:
        raise RunError(
            "--distributed: part: jobs that compute parts do not communicate: remove --distributed or --part"
        )
