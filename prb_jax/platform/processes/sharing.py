"""Collectives for the decisions of a run: who writes, and what is already done.

A single process is the normal case and costs nothing here: these functions import and ask JAX only if
``jax.distributed.initialize`` was called.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from prb_jax.errors import PrbError, class_named
from prb_jax.seams import get

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
    return get("processes", "share").value(value)


def gather_int32(values: np.ndarray) -> list[np.ndarray]:
    """Return the int32 vectors [any length] of all processes, in process order; a collective."""
    if process_count() == 1:
        return [values]
    return get("processes", "gather").value(values)


def fetch(array: Any) -> np.ndarray:
    """Return a whole array on the host; a collective if the array is sharded over several processes."""
    import numpy as np

    if process_count() == 1 or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return get("processes", "fetch").value(array)


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
        raise class_named(kind)(f"process 0: {text}")
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
