"""Google Kubernetes Engine: the printed commands, and words that pass through the container's shell."""

import subprocess

import pytest

from tests.launch.conftest import LAUNCH, ROOT, Stubs

AT = ("--cluster", "c", "--location", "us-east5", "--project", "p")
PRINTED = "--cluster=c --location=us-east5 --project=p"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("image", "--image", "r/prb:1", "--extra", "cuda"),
            [
                f"docker build --platform=linux/amd64 --build-arg=EXTRA=cuda --file={LAUNCH}/Dockerfile "
                f"--tag=r/prb:1 {ROOT}",
                "docker push r/prb:1",
            ],
        ),
        (
            ("run", *AT, "--type", "v6e-16", "--image", "r/prb:1", "--job", "j", "--bucket", "b",
             "--gcluster=--priority=high", "--", "prb", "train", "a b", "--distributed"),
            [
                "gcluster job submit --name=j --compute-type=v6e-16 --num-slices=1 --image=r/prb:1 "
                "--mount=gs://b:/mnt/prb:rw --restarts=10 --restart-on-exit-codes=75 --grace-period=120s "
                r"'--command=exec /opt/prb_jax/launch/worker.sh exec -- prb train '\''a b'\'' --distributed' "
                f"{PRINTED} --priority=high"
            ],
        ),
        (("status", *AT, "--job", "j"), [f"gcluster job list --name-contains=j {PRINTED}"]),
        (("logs", *AT, "--job", "j"), [f"gcluster job logs j --follow {PRINTED}"]),
        (("delete", *AT, "--job", "j"), [f"gcluster job cancel j {PRINTED}"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_prints(stubs: Stubs, words: tuple[str, ...], expected: list[str]):
    assert stubs.printed("gke.sh", *words) == expected


def test_words_pass_through_the_container(stubs: Stubs):
    stubs.add("gcluster")
    awkward = ["it's", 'a "b" c', "$HOME `date`", "two\nlines", "back\\slash", ""]
    words = (*AT, "--type", "v6e-16", "--image", "i", "--job", "j", "--bucket", "none")
    assert stubs.run("gke.sh", "run", *words, "--", "printf", "%s\\0", *awkward).returncode == 0
    (call,) = stubs.calls("gcluster")
    (command,) = (word.removeprefix("--command=") for word in call if word.startswith("--command="))
    assert "\n" not in command  # it becomes one line of a manifest
    # the toolkit runs it by `/bin/bash -c`
    here = command.replace("/opt/prb_jax", str(ROOT))
    result = subprocess.run(["bash", "-c", here], capture_output=True, text=True)
    assert result.stdout.split("\0")[:-1] == awkward


def test_image_has_what_it_copies():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    allowed = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
