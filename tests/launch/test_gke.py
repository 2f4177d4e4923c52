"""Google Kubernetes Engine: the printed commands, and words that pass through xpk's container script."""

import subprocess

import pytest

from tests.launch.conftest import LAUNCH, ROOT, Stubs

AT = ("--cluster", "c", "--zone", "us-east5-b", "--project", "p")
PRINTED = "--cluster=c --zone=us-east5-b --project=p"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("cluster-create", *AT, "--type", "v6e-16", "--slices", "2", "--spot"),
            [
                f"xpk cluster create {PRINTED} --tpu-type=v6e-16 --num-slices=2 --spot --enable-workload-identity "
                "--enable-gcsfuse-csi-driver"
            ],
        ),
        (
            ("storage", *AT, "--bucket", "b"),
            [
                f"xpk storage attach prb-runs {PRINTED} --type=gcsfuse --bucket=b --size=1000 --mount-point=/mnt/prb "
                "--auto-mount=false --readonly=false --mount-options=implicit-dirs,rename-dir-limit=100000"
            ],
        ),
        (
            ("image", "--image", "r/prb:1", "--extra", "cuda"),
            [
                f"docker build --platform=linux/amd64 --build-arg=EXTRA=cuda --file={LAUNCH}/Dockerfile "
                f"--tag=r/prb:1 {ROOT}",
                "docker push r/prb:1",
            ],
        ),
        (
            ("run", *AT, "--type", "v6e-16", "--image", "r/prb:1", "--job", "j", "--env", "A=b c",
             "--xpk=--priority=high", "--", "prb", "train", "a b", "--distributed"),
            [
                f"xpk workload create --workload=j {PRINTED} --tpu-type=v6e-16 --num-slices=1 --docker-image=r/prb:1 "
                "--storage=prb-runs --max-restarts=100 --restart-on-exit-codes=1,75 "
                "--termination-grace-period-seconds=120 "
                r"'--command=exec /opt/prb_jax/launch/worker.sh exec -- prb train '\''a b'\'' --distributed' "
                "'--env=A=b c' --priority=high"
            ],
        ),
        (("status", *AT, "--job", "j"), [f"xpk workload list {PRINTED} --filter-by-job=j"]),
        (
            ("logs", *AT, "--job", "j"),
            [
                "gcloud container clusters get-credentials c --region=us-east5 --project=p",
                "kubectl logs --follow --tail=-1 --prefix --max-log-requests=64 "
                "--selector=jobset.sigs.k8s.io/jobset-name=j,batch.kubernetes.io/job-completion-index=0",
            ],
        ),
        (("delete", *AT, "--job", "j"), [f"xpk workload delete --workload=j {PRINTED} --force"]),
        (("cluster-delete", *AT), [f"xpk cluster delete {PRINTED} --force"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_prints(stubs: Stubs, words: tuple[str, ...], expected: list[str]):
    assert stubs.printed("gke_xpk.sh", *words) == expected


def test_words_pass_through_the_container(stubs: Stubs):
    stubs.add("xpk")
    awkward = ["it's", 'a "b" c', "$HOME `date`", "two\nlines", "back\\slash", ""]
    words = (*AT, "--type", "v6e-16", "--image", "i", "--job", "j", "--", "printf", "%s\\0", *awkward)
    assert stubs.run("gke_xpk.sh", "run", *words).returncode == 0
    (call,) = stubs.calls("xpk")
    (command,) = (word.removeprefix("--command=") for word in call if word.startswith("--command="))
    assert "\n" not in command  # it becomes one line of a manifest
    # xpk runs it as `(command) &` in bash.
    here = command.replace("/opt/prb_jax", str(ROOT))
    result = subprocess.run(["bash", "-c", f"({here}) & wait $!"], capture_output=True, text=True)
    assert result.stdout.split("\0")[:-1] == awkward


def test_image_has_what_it_copies():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    allowed = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed
