"""Jobs on a worker: they outlive their caller, and say truly how they ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.conftest import LAUNCH, Stubs

WORKER = "worker.sh"
SAVE = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"


def report(stubs: Stubs) -> str:
    return stubs.run(WORKER, "report", "a").stdout.partition(": ")[2].strip()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def job(stubs: Stubs) -> Path:
    return stubs.home / "prb_jobs" / "a"


def test_states(stubs: Stubs):
    assert report(stubs) == "none"
    assert stubs.run(WORKER, "start", "a", "--", "bash", "-c", "echo one; exit 4").returncode == 0
    assert "one\n" in stubs.run(WORKER, "follow", "a").stdout
    assert report(stubs) == "exit 4"
    stubs.run(WORKER, "start", "a", "--", "bash", "-c", "echo two; pwd")
    followed = stubs.run(WORKER, "follow", "a").stdout
    assert "two\n" in followed
    assert f"{LAUNCH.parent}\n" in followed
    assert "\none\n" not in f"\n{followed}"  # that was another start; the log keeps both
    assert "one\n" in (job(stubs) / "log").read_text()
    assert report(stubs) == "exit 0"
    assert stubs.run(WORKER, "follow", "a", str(len(followed) - 5)).stdout == followed[-5:]


def test_lost_after_a_restart_of_the_machine(stubs: Stubs):
    stubs.run(WORKER, "start", "a", "--", "sleep", "100")
    assert report(stubs) == "running"
    (job(stubs) / "boot").write_text("another\n")
    assert report(stubs) == "lost"


def test_sigterm_of_a_shutdown_is_an_interruption(stubs: Stubs):
    # A command may save and end with status 0; that must not look like the end of the run.
    stubs.run(WORKER, "start", "a", "--", "bash", "-c", SAVE)
    wait_for(lambda: "ready\n" in (job(stubs) / "log").read_text())
    os.kill(int((job(stubs) / "pid").read_text()), signal.SIGTERM)
    time.sleep(0.2)
    assert report(stubs) == "running"  # the system signals the command itself
    os.kill(int((job(stubs) / "child").read_text()), signal.SIGTERM)
    wait_for(lambda: report(stubs) == "interrupted")
    assert "saved\n" in (job(stubs) / "log").read_text()


def test_a_command_that_was_interrupted_elsewhere_says_so_by_its_status(stubs: Stubs):
    stubs.run(WORKER, "start", "a", "--", "bash", "-c", "exit 75")
    wait_for(lambda: report(stubs) == "interrupted")


def test_stop_reaches_what_the_command_started(stubs: Stubs):
    save = "bash -c 'trap \"echo saved; exit\" TERM; echo ready; sleep 100 & wait'"
    stubs.run(WORKER, "start", "a", "--", "bash", "-c", save)
    wait_for(lambda: "ready\n" in (job(stubs) / "log").read_text())
    assert stubs.run(WORKER, "stop", "a").stdout == "stopped\n"
    assert "saved\n" in (job(stubs) / "log").read_text()
    deaf = "trap '' TERM; echo deaf; while :; do sleep 0.1; done"
    stubs.run(WORKER, "start", "a", "--", "bash", "-c", deaf)
    wait_for(lambda: "deaf\n" in (job(stubs) / "log").read_text())
    assert stubs.run(WORKER, "stop", "a", "1").stdout == "stopped\n"  # with SIGKILL


def test_exec_is_the_command_but_for_sigterm(stubs: Stubs):
    assert stubs.run(WORKER, "exec", "--", "bash", "-c", "exit 2").returncode == 2
    assert stubs.run(WORKER, "exec", "--", "echo", "it's me").stdout == "it's me\n"
    command = [str(LAUNCH / WORKER), "exec", "--", "bash", "-c", SAVE]
    process = subprocess.Popen(command, env=stubs.environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=300)[0] == "saved\n"
    assert process.returncode == 75


def test_no_job_without_its_storage(stubs: Stubs):
    (stubs.home / "prb_mount").write_text(f"{stubs.home}\n")
    result = stubs.run(WORKER, "start", "a", "--", "true")
    assert result.returncode == 2
    assert result.stderr == f"worker.sh: error: {stubs.home} is not mounted; run launch/tpu_setup.sh again\n"
    assert report(stubs) == "none"
