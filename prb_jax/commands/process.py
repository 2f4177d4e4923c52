"""The process that a verb runs in: what must come before the first use of JAX, and SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from prb_jax.processes.job import start_job


class Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def until_terminated(options: argparse.Namespace) -> Iterator[None]:
    """Raise SIGTERM as `Terminated`, so that it is answered as Ctrl-C is; only where the process is ours."""

    def terminate(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
            # JAX's part of a garbage collection, where Python drops what is raised: once more, a little later.
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        raise Terminated

    if not options.own_process:
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def start(options: argparse.Namespace) -> None:
    """Prepare the process for a model."""
    hide_torch(options)
    prepare_jax(distributed=options.distributed, after_interrupt=options.after_interrupt)


def was_stopped(stopped_by: str | None) -> bool:
    """Tell whether SIGTERM stopped a run, which has said so; of Ctrl-C raise KeyboardInterrupt."""
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return stopped_by is not None


def prepare_jax(*, distributed: bool = False, after_interrupt: str = "") -> None:
    """Switch the compilation cache on, join the other processes, and check that there is a device."""
    from prb_jax.commands.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
    if distributed:
        start_job(after_interrupt=after_interrupt)
    from prb_jax.sharding import all_devices

    all_devices()  # that there are none is said before anything is read


def hide_torch(options: argparse.Namespace) -> None:
    """Let transformers and datasets find no torch, which they would import: two seconds.

    transformers looks for it once, when it is imported, so an ``import torch`` of somebody else, as in the file of a
    reward, works later. Only where the process is ours.
    """
    if not options.own_process or "torch" in sys.modules:
        return
    os.environ.setdefault("USE_TORCH", "0")  # of datasets
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]
