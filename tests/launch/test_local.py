"""One machine: a real run of two processes, and what becomes of the others when one ends."""

import signal
import subprocess
import sys
import time

from tests.launch.conftest import LAUNCH, ROOT, Stubs


def test_prints(stubs: Stubs):
    command = ("--", "prb", "evaluate", "a b", "--distributed")
    start = "env JAX_COORDINATOR_ADDRESS=127.0.0.1:1234 JAX_NUM_PROCESSES=2"
    assert stubs.printed("local.sh", "--gpus", "0,3", "--port", "1234", *command) == [
        f"{start} JAX_PROCESS_ID=0 JAX_LOCAL_DEVICE_IDS=0 prb evaluate 'a b' --distributed",
        f"{start} JAX_PROCESS_ID=1 JAX_LOCAL_DEVICE_IDS=3 prb evaluate 'a b' --distributed",
    ]
    assert stubs.printed("local.sh", "--cpu", "--processes", "2", "--port", "1234", *command)[1] == (
        f"{start} JAX_PROCESS_ID=1 JAX_PLATFORMS=cpu JAX_LOCAL_DEVICE_IDS=0 prb evaluate 'a b' --distributed"
    )


def test_a_process_for_each_gpu(stubs: Stubs):
    tool = stubs.folder / "bin" / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\n'\n")
    tool.chmod(0o755)
    assert len(stubs.printed("local.sh", "--", "true")) == 3
    assert len(stubs.printed("local.sh", "--", "true", CUDA_VISIBLE_DEVICES="4,5")) == 2


def test_two_processes_are_one_job(stubs: Stubs):
    program = """
from prb_jax.commands.process import prepare_jax
prepare_jax(distributed=True)
from prb_jax.platform.processes.sharing import process_count, process_index, share_json
print(process_index(), process_count(), share_json(["from", process_index()]), flush=True)
"""
    words = ("--cpu", "--processes", "2", "--log-dir", "logs", "--", sys.executable, "-c", program)
    result = stubs.run("local.sh", *words, PYTHONPATH=str(ROOT))
    logs = [(stubs.home / "logs" / f"process-{index}.log").read_text() for index in range(2)]
    assert result.returncode == 0, (result.stderr, logs)
    assert "0 2 ['from', 0]\n" in result.stdout
    assert result.stdout == logs[0]
    assert "1 2 ['from', 0]\n" in logs[1]


def test_one_failure_ends_all_and_is_tried_again(stubs: Stubs):
    command = 'echo "$JAX_PROCESS_ID" >>starts; [ "$JAX_PROCESS_ID" = 0 ] || exit 7; exec sleep 100'
    words = ("--cpu", "--processes", "2", "--retries", "1", "--log-dir", "logs", "--", "bash", "-c", command)
    result = stubs.run("local.sh", *words)
    assert result.returncode == 7
    assert (stubs.home / "starts").read_text().count("1\n") == 2
    assert "a process ended with status 7; ending the others" in result.stderr
    assert "start 2: the run continues" in result.stderr
    assert result.stderr.splitlines()[-1] == "local.sh: failed with status 7; see logs"


def test_a_wrong_command_line_is_not_tried_again(stubs: Stubs):
    words = ("--cpu", "--processes", "2", "--retries", "5", "--", "bash", "-c", "exit 2")
    result = stubs.run("local.sh", *words)
    assert result.returncode == 2
    assert "start 2" not in result.stderr


def test_sigterm_comes_once(stubs: Stubs):
    save = "trap 'echo saved; sleep 0.5; exit 0' TERM; echo ready; while :; do read -rt 0.05 <> <(:); done"
    process = subprocess.Popen(
        [str(LAUNCH / "local.sh"), "--cpu", "--processes", "2", "--log-dir", "logs", "--", "bash", "-c", save],
        env=stubs.environment(), cwd=stubs.home, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    other = stubs.home / "logs" / "process-1.log"
    while not other.exists() or "ready\n" not in other.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=300)[0] == "saved\n"
    assert process.returncode == 75
    assert other.read_text() == "ready\nsaved\n"
