"""Several processes: one that ends before its time ends all, with one message; nothing is left hanging."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prb_jax import evaluate
from prb_jax.cli import main
from prb_jax.errors import MeshError
from prb_jax.platform.processes.job import leave_job, start_job
from tests.plain_process import free_port
from tests.platform.processes.jobs import EVALUATE, SOON, ended, job, lines, run_job, wait_for
from tests.scoring.slow_scorer import SlowScorer, comparisons
from tests.sweeps import sweep

COUNT = 60
PROGRAM = ("-m", "tests.platform.processes.job_process")


def of_prb(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("prb: ")]


def test_one_process_needs_none_of_it() -> None:
    """Nothing is started, and an error is left to the caller."""
    leave_job(2, "error")
    code = "import sys, prb_jax.cli; print('jax' in sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout == "False\n"


def test_a_killed_process_ends_all_and_another_number_of_processes_continues(tmp_path: Path) -> None:
    evaluate(SlowScorer(), comparisons(COUNT), out=tmp_path / "whole", progress=False)
    out = tmp_path / "killed"
    with job([*PROGRAM, out, COUNT, 0.5], count=3) as processes:
        wait_for(lambda: lines(out / "scores.jsonl") >= 4, processes)
        processes[1].kill()
        results = ended(processes)
    assert [status for status, *_ in results] == [1, -9, 1]
    for status, output, errors in results:
        assert "done" not in output
        if status == 1:
            (said,) = of_prb(errors)
            assert said.startswith(f"prb: error: process 1 of 3 (pid {processes[1].pid} on ")
            assert "is gone" in said
            assert "the same command continues the run" in said
    assert 4 <= lines(out / "scores.jsonl") < COUNT
    run_job([*PROGRAM, out, COUNT, 0.0], count=2)
    assert (out / "scores.jsonl").read_bytes() == (tmp_path / "whole" / "scores.jsonl").read_bytes()


@pytest.mark.slow
def test_without_the_first_process_the_others_end(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    with job([*PROGRAM, out, COUNT, 0.5], count=2) as processes:
        wait_for(lambda: lines(out / "scores.jsonl") >= 4, processes)
        processes[0].kill()
        _, (status, _, errors) = ended(processes, seconds=SOON)
    assert status != 0
    assert "process 0 of 2 (127.0.0.1) is gone" in errors


@pytest.mark.parametrize(
    ("failing", "failure", "status", "message"),
    sweep(
        [(1, "bug", 1, "ZeroDivisionError: a bug"), (0, "full", 2, "cannot write scores.jsonl: No space")],
        few=(0,),
    ),
)
def test_a_failure_is_told_to_the_others(
    tmp_path: Path, failing: int, failure: str, status: int, message: str
) -> None:
    with job([*PROGRAM, tmp_path / "run", COUNT, 0.5, failing, failure], count=2) as processes:
        results = ended(processes)
    assert [result[0] for result in results] == [status, status], results
    assert ("Traceback" in results[failing][2]) == (failure == "bug")
    (said,) = of_prb(results[1 - failing][2])
    assert f"process {failing} of 2 (pid {processes[failing].pid} on " in said
    assert f"stopped with status {status}, and this process with it: error: {message}" in said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS: expected HOST:PORT, found 'host'"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES: expected a whole number, found 'two'"),
    ],
)
def test_processes_that_are_not_known(variables: dict[str, str], message: str, monkeypatch) -> None:
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def refuse(**_: object) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", refuse)
    with pytest.raises(MeshError) as refused:
        start_job()
    assert message in str(refused.value)


@pytest.mark.parametrize(("number", "status"), sweep([(signal.SIGINT, 130), (signal.SIGTERM, 75)], few=(0,)))
def test_a_signal_ends_a_process_that_waits(tmp_path: Path, number: signal.Signals, status: int) -> None:
    """First for processes that are not there, then for one that does not come to a collective."""
    port = free_port()
    missing = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    with job([*EVALUATE, "--out", tmp_path, "--distributed"], count=1, environment=missing) as processes:
        wait_for(lambda: listens(port), processes)
        time.sleep(0.5)
        processes[0].send_signal(number)
        ((ended_with, _, errors),) = ended(processes, seconds=SOON)
    assert (ended_with, errors.count("\n")) == (status, 1), errors
    assert errors.endswith("all scores are kept: the same command continues the run\n")

    start = "from prb_jax.platform.processes.job import start_job; start_job(); print('met', flush=True); "
    waiting = start + "from prb_jax.platform.processes.sharing import share_json; share_json(1)"
    away = start + "import time; time.sleep(100)"
    with job(["-c", waiting], count=2, others=["-c", away]) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "met\n"
        time.sleep(1)
        processes[0].send_signal(number)
        results = ended(processes, seconds=SOON)
    assert [result[0] for result in results] == [status, status], results
    assert all(len(errors.splitlines()) == 1 for _, _, errors in results), results
    assert f"process 0 of 2 (pid {processes[0].pid} on " in results[1][2]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        taken = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": address}
        command = [*EVALUATE, "--out", tmp_path, "--distributed"]
        ((_, errors),) = run_job(command, count=1, environment=taken, status=2)
    assert errors.count("\n") == 1
    assert errors.startswith(f"prb: error: process 0 cannot listen at {address} (Address already in use): ")


def test_processes_that_never_come_are_one_line() -> None:
    code = "import prb_jax.platform.processes.job as job; job._SECONDS_TO_MEET = 1; job.start_job()"
    ((_, errors),) = run_job(["-c", code], count=1, environment={"JAX_NUM_PROCESSES": "2"}, status=1)
    assert errors.count("\n") == 1
    assert errors.startswith(
        "prb: error: process 0 waited 1 seconds for the other processes to meet at 127.0.0.1:"
    )


@pytest.mark.slow
def test_a_baseline_is_written_by_process_0_alone(tmp_path: Path, capsys) -> None:
    command = [*EVALUATE, "--limit", "20", "--out"]
    (first, _), (second, _) = run_job([*command, tmp_path / "two", "--distributed"], count=2)
    assert "written to" in first
    assert "written to" not in second
    assert main([*command[2:], str(tmp_path / "one")]) == 0
    one, two = ((tmp_path / folder / "scores.jsonl").read_bytes() for folder in ("one", "two"))
    assert one == two


@pytest.mark.slow
def test_a_process_that_compiles_long_is_waited_for() -> None:
    """Longer than the 30 seconds in which devices that have never met have to find each other."""
    for output, _ in run_job(
        ["-m", "tests.platform.processes.late_process", 35], count=2, devices=2
    ):  # gloo talks there, too
        assert [line for line in output.splitlines() if not line.startswith("[Gloo]")] == ["6.0"] * 3
