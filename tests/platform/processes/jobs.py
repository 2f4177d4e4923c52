"""Jobs of several processes on this machine, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.plain_process import ROOT, free_port, plain_environment

EVALUATE = ("-m", "prb_jax", "evaluate", "baseline:length", "--data", "personas:generic-test")
SOON = 90  # processes end long before jax's own heartbeat of 100 seconds when one of them is gone


@contextlib.contextmanager
def job(
    arguments: Sequence[object],
    *,
    count: int,
    devices: int = 1,
    environment: Mapping[str, str] | None = None,
    others: Sequence[object] | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts ``python ARGUMENTS`` in ``count`` processes on the CPU; what is left of them is killed at the end.

    Each has so many devices, and these variables more; ``others`` are the arguments of all but the first, if they
    differ.
    """
    shared = plain_environment(devices=devices) | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        **(environment or {}),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, others if others is not None and index > 0 else arguments)],
            cwd=ROOT, env=shared | {"JAX_PROCESS_ID": str(index)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(processes: Sequence[subprocess.Popen[str]], *, seconds: float = 600) -> list[tuple[int, str, str]]:
    """(status, output, errors) of each, when all have ended."""
    said = [process.communicate(timeout=seconds) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def run_job(
    arguments: Sequence[object], *, count: int, status: int = 0, **options: Any
) -> list[tuple[str, str]]:
    """(output, errors) of each process of a job, all of which end with this status."""
    with job(arguments, count=count, **options) as processes:
        results = ended(processes)
    assert [result[0] for result in results] == [status] * count, results
    return [(output, errors) for _, output, errors in results]


def wait_for(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[str]]) -> None:
    """Until the condition holds; an error where one of the processes ends before."""
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def lines(path: Path) -> int:
    """How many whole lines a file has by now."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
