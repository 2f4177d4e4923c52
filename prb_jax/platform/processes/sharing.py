"""Collectives for the decisions of a run: who writes, and what is already done.

A single process is the normal case and costs nothing here: these functions import and ask JAX only if
``jax.distributed.initialize`` was called.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from prb_jax import errors
from prb_jax.errors import PrbError, RunError

if TYPE_CHECKING:
    import numpy as np

Entered = TypeVar("Entered")


def process_index() -> int:
    """Return this process's number; process 0 reads and writes the run folder."""
    return sys.modules["jax"].process_index() if process_count() > 1 else 0


def process_count() -> int:
    """Return the number of processes in this job."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return 1
    return jax.process_count()


def share_json(value: Any) -> Any:
    """Return process 0's value in every process; a collective, so every process must call it.

    Args:
      value: Any JSON value; only process 0's value is used.
    """
    if process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode() if process_index() == 0 else b""
    # Share the length first: a broadcast needs the same shape everywhere.
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    # Round up to powers of two: every new length compiles a new program.
    buffer = np.zeros(1 << length.bit_length(), np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:length].tobytes())


def gather_int32(values: np.ndarray) -> list[np.ndarray]:
    """Return the int32 vectors [any length] of all processes, in process order; a collective."""
    if process_count() == 1:
        return [values]
    import numpy as np
    from jax.experimental import multihost_utils

    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(values))))
    padded = np.zeros(1 << int(lengths.max()).bit_length(), np.int32)
    padded[: len(values)] = values
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def fetch(array: Any) -> np.ndarray:
    """Return a whole array on the host; a collective if the array is sharded over several processes."""
    import numpy as np

    if process_count() == 1 or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def parts_of(count: int) -> list[range]:
    """Divide ``count`` items into equal consecutive ranges, one per process."""
    processes = process_count()
    ends = [index * count // processes for index in range(processes + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def on_first_process(action: Callable[[], Any]) -> Any:
    """Run ``action`` on process 0 only; return its value, or raise its PrbError, in every process.

    A collective, so every process must call it. The value must be a JSON value.
    """
    if process_count() == 1:
        return action()
    failure: PrbError | None = None
    outcome: dict[str, Any] = {}
    if process_index() == 0:
        try:
            outcome = {"value": action()}
        except PrbError as error:
            failure = error
            outcome = {"error": [type(error).__name__, str(error)]}
    outcome = share_json(outcome)
    if failure is not None:
        raise failure
    if "error" in outcome:
        kind, text = outcome["error"]
        raise getattr(errors, kind)(f"process 0: {text}")
    return outcome["value"]


@contextlib.contextmanager
def entered_on_first_process(
    open_it: Callable[[], contextlib.AbstractContextManager[Entered]],
    tell: Callable[[Entered], Any] = lambda entered: None,
) -> Iterator[tuple[Entered | None, Any]]:
    """Make and enter a context on process 0 only; a collective that raises its errors in every process.

    Args:
      open_it: Makes the context.
      tell: Converts the entered object to a JSON value for all processes.

    Yields:
      The entered object (None on the other processes), and the value of ``tell``.
    """
    with contextlib.ExitStack() as stack:
        entered: list[Entered] = []

        def enter() -> Any:
            entered.append(stack.enter_context(open_it()))
            return tell(entered[0])

        told = on_first_process(enter)
        yield next(iter(entered), None), told


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
