"""What several processes of one run must agree on: who writes, and what is already done.

One process is the normal case, and costs nothing here: JAX is asked only where
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
    """This process's number; 0 is the one that reads and writes the run folder."""
    return sys.modules["jax"].process_index() if process_count() > 1 else 0


def process_count() -> int:
    """The number of processes that run this job together."""
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return 1
    return jax.process_count()


def share_json(value: Any) -> Any:
    """Process 0's value in every process; a collective, so every process must call it.

    Args:
      value: anything JSON can hold; looked at on process 0 alone.
    """
    if process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    text = json.dumps(value).encode() if process_index() == 0 else b""
    # The length goes first: a broadcast needs one shape everywhere.
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    # Powers of two: each length of its own would be a program of its own.
    buffer = np.zeros(1 << length.bit_length(), np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:length].tobytes())


def gather_int32(values: np.ndarray) -> list[np.ndarray]:
    """The vectors int32 [any length] of all processes, in their order; a collective."""
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
    """The whole of an array on the host, wherever its parts are; a collective where they are with several processes."""
    import numpy as np

    if process_count() == 1 or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def parts_of(count: int) -> list[range]:
    """So many items divided into equal parts in order, one for each process."""
    processes = process_count()
    ends = [index * count // processes for index in range(processes + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def on_first_process(action: Callable[[], Any]) -> Any:
    """Runs ``action`` on process 0 alone; its value, or its PrbError, in every process.

    A collective, so every process must call it. The value must be one that JSON can hold.
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
    """Make and enter a context on process 0 alone; a collective, whose errors are raised in every process.

    Args:
      open_it: makes the context.
      tell: makes of what it gives a value that JSON can hold.

    Yields:
      What it gives (None on the other processes), and the value that is told.
    """
    with contextlib.ExitStack() as stack:
        entered: list[Entered] = []

        def enter() -> Any:
            entered.append(stack.enter_context(open_it()))
            return tell(entered[0])

        told = on_first_process(enter)
        yield next(iter(entered), None), told


def refuse_together(*, endpoint: object = None, part: object = None, together: bool | None = None) -> None:
    """Raise RunError for what several processes cannot do together.

    Args:
      endpoint: the server that is asked, if there is one.
      part: of the run that is made, if it is not the whole.
      together: whether there are several processes; those of this job if not given.
    """
    if process_count() == 1 if together is None else not together:
        return
    if endpoint is not None:
        raise RunError("--distributed: an endpoint is asked by one process alone: leave --distributed out")
    if part is not None:
        raise RunError(
            "--distributed: part: jobs of parts know nothing of each other: leave --distributed or --part out"
        )
