"""Slurm: what is submitted, and the job's answers to signals, with stubs in place of the cluster."""

import os
import signal
import subprocess
import sys

import pytest

from tests.launch.conftest import LAUNCH, ROOT, Stubs

JOB = str(LAUNCH / "slurm_job.sh")
IN_JOB = {"SLURM_JOB_ID": "417", "SLURM_JOB_NODELIST": "localhost"}

# Two tasks on this machine with the variables that Slurm sets.
SRUN = """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  echo $! >>"$STUBS/tasks"
done
status=0
for task in $(cat "$STUBS/tasks"); do wait "$task" || status=$?; done
exit $status
"""


@pytest.fixture
def cluster(stubs: Stubs) -> Stubs:
    stubs.add("srun", SRUN)
    stubs.add("scancel", 'kill -TERM $(cat "$STUBS/tasks")')
    stubs.add("scontrol")
    stubs.add("sbatch", "echo Submitted batch job 417")
    return stubs


def test_submit_prints(stubs: Stubs):
    gpu = ("--nodes", "2", "--gpus-per-node", "8", "--time", "1:00:00", "--setup", ". .venv/bin/activate")
    command = ("--", "prb", "train", "a b", "--distributed")
    assert stubs.printed("slurm_submit.sh", *gpu, "--sbatch=--constraint=h100", *command) == [
        "mkdir -p runs/logs",
        "sbatch --job-name=prb --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00 --constraint=h100 "
        "--requeue --signal=B:USR1@300 --open-mode=append --output=runs/logs/%x-%j.log "
        f"{JOB} --device gpu --log-dir runs/logs --max-requeues 50 --setup '. .venv/bin/activate' "
        "-- prb train 'a b' --distributed",
    ]
    cpu = ("--nodes", "4", "--tasks-per-node", "2", "--cpus-per-task", "16", "--log-dir", "/shared/logs")
    assert stubs.printed("slurm_submit.sh", *cpu, *command)[1] == (
        "sbatch --job-name=prb --nodes=4 --ntasks-per-node=2 --cpus-per-task=16 --requeue --signal=B:USR1@300 "
        f"--open-mode=append --output=/shared/logs/%x-%j.log {JOB} --device cpu --log-dir /shared/logs "
        "--max-requeues 50 --setup '' -- prb train 'a b' --distributed"
    )


def test_job_prints(stubs: Stubs):
    words = ("--device", "gpu", "--log-dir", "logs", "--", "prb", "a b")
    assert stubs.printed("slurm_job.sh", *words, SLURM_CPUS_PER_TASK="12") == [
        "srun --kill-on-bad-exit=1 --output=logs/%x-%j.%t.log --open-mode=append --cpus-per-task=12 "
        "--gpu-bind=none prb a\\ b "
    ]


def test_submitted_words_are_unchanged(cluster: Stubs):
    awkward = ["it's", 'a "b" c', "$HOME", "two\nlines", ""]
    result = cluster.run("slurm_submit.sh", "--setup", "module load 'x y'", "--", "echo", *awkward)
    assert result.stdout == "Submitted batch job 417\n"
    (call,) = cluster.calls("sbatch")
    assert call[call.index("--") + 1 :] == ["echo", *awkward]
    assert call[call.index("--setup") + 1] == "module load 'x y'"
    assert (cluster.home / "runs" / "logs").is_dir()


def test_job_ends_with_the_command(cluster: Stubs):
    (cluster.home / "activate").write_text("export FROM_SETUP='a b'\n")
    words = ("--device", "cpu", "--setup", '. "$HOME/activate"', "--")
    result = cluster.run("slurm_job.sh", *words, "bash", "-c", 'echo "$FROM_SETUP $JAX_PLATFORMS"', **IN_JOB)
    assert result.returncode == 0
    assert result.stdout.splitlines()[1:] == ["a b cpu", "a b cpu"]
    (cluster.folder / "tasks").unlink()
    assert cluster.run("slurm_job.sh", *words, "bash", "-c", "exit 3", **IN_JOB).returncode == 3
    assert cluster.calls("scontrol") == []


@pytest.mark.parametrize(
    ("number", "restarts", "requeued", "status"),
    [
        (signal.SIGUSR1, "0", [["scontrol", "requeue", "417"]], 75),
        (signal.SIGUSR1, "50", [], 2),  # enough
        (signal.SIGTERM, "0", [], 75),  # a preemption: Slurm queues it again
    ],
)
def test_signals(cluster: Stubs, number: int, restarts: str, requeued: list[list[str]], status: int):
    save = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [JOB, "--device", "cpu", "--", "bash", "-c", save],
        env=cluster.environment() | IN_JOB | {"SLURM_RESTART_COUNT": restarts},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(3)]
    assert f"start {int(restarts) + 1} of job 417 on localhost" in seen[0]
    assert seen[1:] == ["ready\n", "ready\n"]
    process.send_signal(number)
    output = process.communicate(timeout=300)[0]
    assert output.count("saved\n") == 2
    assert process.returncode == status
    assert cluster.calls("scancel") == [["scancel", "--signal=TERM", "417"]]
    assert cluster.calls("scontrol") == requeued


@pytest.mark.slow
def test_jax_finds_the_other_processes(cluster: Stubs):
    program = (
        "from prb_jax.commands.process import prepare_jax; prepare_jax(distributed=True); "
        "from prb_jax.platform.processes.sharing import process_count, process_index; "
        "import os; os.write(1, f'{process_index()} {process_count()}\\n'.encode())"
    )
    words = ("--device", "cpu", "--", sys.executable, "-c", program)
    variables = IN_JOB | {"SLURM_JOB_ID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
    result = cluster.run("slurm_job.sh", *words, **variables)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()[1:]) == ["0 2", "1 2"]
