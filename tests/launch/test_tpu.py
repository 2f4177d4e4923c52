"""TPU VMs: the printed commands, and whole runs against a stub of gcloud that runs the workers' part here."""

import shutil

import pytest

from tests.launch.conftest import ROOT, Stubs

WHERE = ("--name", "pod", "--zone", "us-east5-a", "--project", "my-project")
AT = "--zone=us-east5-a --project=my-project"
SCOPES = "--scopes=https://www.googleapis.com/auth/cloud-platform"
SSH = f"gcloud compute tpus tpu-vm ssh pod {AT} --quiet"
ALIVE = "--ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oServerAliveCountMax=6"
WORKER = "prb_jax/launch/worker.sh"
AWKWARD = ["it's", 'a "b" c', "$HOME `date`", "back\\slash", "two\nlines", "*", "", "-- x"]

# One worker, whose home folder is $HOME; `state` is what Google Cloud says of the TPU.
GCLOUD = r"""
case "$*" in
  *' describe '*) cat "$STUBS/state" 2>/dev/null || { echo 'ERROR: NOT_FOUND: no such resource' >&2; exit 1; } ;;
  *' create '*)
    if [ -e "$STUBS/no_capacity" ]; then rm "$STUBS/no_capacity"; echo 'no more capacity' >&2; exit 1; fi
    echo READY >"$STUBS/state" ;;
  *' delete '*) rm -rf "$STUBS/state" "$STUBS/mounted" "$HOME"/prb_* ;;
  *' scp '*) cp "$5" "$HOME/${6#*:}" ;;
  *' ssh '*)
    [ "$(cat "$STUBS/state")" = READY ] || { echo 'ssh: connect to host: timed out' >&2; exit 255; }
    for word in "$@"; do case $word in --command=*) command=${word#--command=} ;; esac; done
    mkdir -p "$HOME/prb_venv/bin" && ln -sf /bin/true "$HOME/prb_venv/bin/python"
    cd "$HOME" && bash -c "$command" ;;
esac
"""


@pytest.fixture
def cloud(stubs: Stubs) -> Stubs:
    stubs.add("gcloud", GCLOUD)
    stubs.add("python3")
    stubs.add("sudo")
    stubs.add("gcsfuse", 'touch "$STUBS/mounted"')
    stubs.add("mountpoint", '[ -e "$STUBS/mounted" ]')
    return stubs


@pytest.fixture
def pod(cloud: Stubs) -> Stubs:
    """A TPU that is there and set up."""
    (cloud.folder / "state").write_text("READY\n")
    (cloud.home / "prb_jax").symlink_to(ROOT)
    return cloud


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--type", "v6e-8"),
            [
                f"gcloud compute tpus tpu-vm create pod {AT} --accelerator-type=v6e-8 {SCOPES} "
                "--version=v2-alpha-tpuv6e --quiet"
            ],
        ),
        (
            ("--type=v5p-32", "--spot", "--network", "n", "--internal-ips", "--version", "other"),
            [
                f"gcloud compute tpus tpu-vm create pod {AT} --accelerator-type=v5p-32 {SCOPES} --spot --network=n "
                "--internal-ips --version=other --quiet"
            ],
        ),
        (
            ("--type", "v5litepod-64", "--queued", "--spot", "--valid-until", "6h"),
            [
                f"gcloud compute tpus queued-resources create pod --node-id=pod {AT} --accelerator-type=v5litepod-64 "
                f"{SCOPES} --spot --valid-until-duration=6h --runtime-version=v2-alpha-tpuv5-lite --quiet",
                f"gcloud compute tpus queued-resources describe pod {AT} '--format=value(state.state)'",
            ],
        ),
    ],
    ids=["single-host", "spot-slice", "queued"],
)  # fmt: skip
def test_create_prints(stubs: Stubs, words: tuple[str, ...], expected: list[str]):
    assert stubs.printed("tpu_create.sh", *WHERE, *words) == expected


def test_variables_stand_for_options(stubs: Stubs):
    assert stubs.printed("tpu_create.sh", TPU_NAME="pod", TPU_ZONE="z", TPU_TYPE="v4-8") == [
        f"gcloud compute tpus tpu-vm create pod --zone=z --accelerator-type=v4-8 {SCOPES} "
        "--version=tpu-ubuntu2204-base --quiet"
    ]


def test_setup_prints(stubs: Stubs):
    printed = stubs.printed("tpu_setup.sh", *WHERE, "--bucket", "b", "--connect", "internal")
    assert printed[:4] == [
        "# the checkout as prb_jax.tar.gz",
        f"gcloud compute tpus tpu-vm scp prb_jax.tar.gz pod:prb_jax.tar.gz {AT} --quiet --internal-ip --worker=all",
        f"{SSH} --internal-ip {ALIVE} --worker=all "
        r"'--command=bash -c '\''mkdir -p prb_jax && tar -xzf prb_jax.tar.gz -C prb_jax'\'''",
        f"{SSH} --internal-ip {ALIVE} --worker=all '--command={WORKER} setup --extra tpu --bucket b'",
    ]
    assert "jax.distributed.initialize()" in printed[4]
    assert len(printed) == 5
    assert len(stubs.printed("tpu_setup.sh", *WHERE, "--no-check")) == 4


def test_worker_setup_prints(stubs: Stubs):
    printed = stubs.printed("worker.sh", "setup", "--bucket", "b", "--mount", "/mnt/x")
    assert printed[-1] == "gcsfuse --implicit-dirs --rename-dir-limit=100000 b /mnt/x"
    assert f"--editable '{ROOT}[tpu]'" in printed[2]
    assert stubs.printed("worker.sh", "setup", "--nfs", "10.0.0.2:/runs")[-2:] == [
        "sudo apt-get -o DPkg::Lock::Timeout=600 install --yes --quiet nfs-common",
        "sudo mount -t nfs 10.0.0.2:/runs /mnt/prb",
    ]


def test_run_and_job_print(stubs: Stubs):
    command = ("prb", "train", "configs/bt_user_blind.py", "--out", "/mnt/prb/a b", "--distributed")
    assert stubs.printed("tpu_run.sh", *WHERE, "--connect", "iap", "--", *command) == [
        f"gcloud alpha compute tpus tpu-vm ssh pod {AT} --quiet --tunnel-through-iap {ALIVE} --worker={line}"
        for line in (
            rf"all '--command={WORKER} start prb -- prb train configs/bt_user_blind.py --out '\''/mnt/prb/a b'\'' "
            "--distributed'",
            f"0 '--command={WORKER} follow prb'",
            f"all '--command={WORKER} report prb'",
        )
    ]
    for verb, expected in {
        "status": f"{SSH} {ALIVE} --worker=all '--command={WORKER} report x'",
        "log": f"{SSH} {ALIVE} --worker=3 '--command={WORKER} log x 9'",
        "follow": f"{SSH} {ALIVE} --worker=3 '--command={WORKER} follow x'",
        "stop": f"{SSH} {ALIVE} --worker=all '--command={WORKER} stop x'",
    }.items():
        words = (verb, *WHERE, "--job", "x", "--worker", "3", "--lines", "9")
        assert stubs.printed("tpu_job.sh", *words) == [expected]


def test_delete_prints(stubs: Stubs):
    assert stubs.printed("tpu_delete.sh", *WHERE) == [f"gcloud compute tpus tpu-vm delete pod {AT} --quiet"]
    assert stubs.printed("tpu_delete.sh", *WHERE, "--queued") == [
        f"gcloud compute tpus queued-resources delete pod {AT} --force --quiet"
    ]


def test_until_done_prints_the_whole_run(stubs: Stubs):
    words = (*WHERE, "--type", "v6e-16", "--spot", "--queued", "--bucket", "b", "--", "prb", "--distributed")
    verbs = [" ".join(line.split()[3:5]) for line in stubs.printed("tpu_until_done.sh", *words)]
    assert verbs == [
        "queued-resources create", "queued-resources describe", "as prb_jax.tar.gz", "tpu-vm scp",
        *["tpu-vm ssh"] * 6, "queued-resources delete",
    ]  # fmt: skip


def test_queue_is_waited_for(stubs: Stubs):
    states = stubs.folder / "states"
    stubs.add(
        "gcloud", '[[ "$*" != *describe* ]] || { head -n 1 "$STUBS/states"; sed -i 1d "$STUBS/states"; }'
    )
    words = (*WHERE, "--type", "v6e-16", "--queued", "--poll", "0")
    states.write_text("WAITING_FOR_RESOURCES\nWAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    result = stubs.run("tpu_create.sh", *words)
    assert (result.returncode, states.read_text()) == (0, "")
    assert result.stderr.count("WAITING_FOR_RESOURCES") == 1
    states.write_text("WAITING_FOR_RESOURCES\nFAILED\n")
    assert stubs.run("tpu_create.sh", *words).returncode == 75


def test_words_reach_the_command_unchanged(pod: Stubs):
    echo = ["bash", "-c", 'printf "%s\\0" "$@" >"$HOME/words"; echo done', "bash", *AWKWARD]
    result = pod.run("tpu_run.sh", *WHERE, "--poll", "0", "--log", "logs/run.log", "--", *echo)
    assert result.returncode == 0, result.stderr
    assert (pod.home / "words").read_bytes().decode().split("\0")[:-1] == AWKWARD
    assert "done" in result.stdout.splitlines()
    assert (pod.home / "logs/run.log").read_text() == result.stdout
    assert pod.calls("ssh", "--worker=0")[0][-1] == f"--command={WORKER} follow prb 0"


def test_detached_found_again_and_stopped(pod: Stubs):
    command = ("--", "bash", "-c", "echo begun; exec sleep 100")
    assert pod.run("tpu_run.sh", *WHERE, "--detach", *command).returncode == 0
    assert "already running" in pod.run("tpu_run.sh", *WHERE, "--detach", *command).stderr
    other = pod.run("tpu_run.sh", *WHERE, "--detach", "--", "sleep", "7")
    assert other.returncode == 2
    assert "job prb runs another command" in other.stderr
    assert pod.run("tpu_job.sh", "status", *WHERE).stdout.endswith(": running\n")
    assert pod.run("tpu_job.sh", "stop", *WHERE).stdout == "stopped\n"
    assert pod.run("tpu_job.sh", "status", *WHERE).stdout.endswith(": stopped\n")
    assert "begun" in pod.run("tpu_job.sh", "log", *WHERE).stdout


def test_failures_keep_their_status(pod: Stubs):
    words = ("--poll", "0", "--grace", "0", "--", "bash", "-c", "echo bad; exit 3")
    result = pod.run("tpu_run.sh", *WHERE, *words)
    assert result.returncode == 3
    assert "the command failed: status 3" in result.stderr


def test_preemption_that_shows_late(pod: Stubs):
    # The neighbours of a machine that went away fail first; what the cloud says follows.
    # The state changes at once: whoever reads it meanwhile must not see half of each.
    late = f"sleep 1; echo PREEMPTED >{pod.folder}/next; mv {pod.folder}/next {pod.folder}/state"
    command = f"({late}) & exit 1"
    result = pod.run("tpu_run.sh", *WHERE, "--poll", "0", "--", "bash", "-c", command)
    assert result.returncode == 75
    assert "pod is PREEMPTED: it was taken away" in result.stderr


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a git checkout"
)
def test_until_done_goes_on_after_a_preemption(cloud: Stubs):
    (cloud.folder / "no_capacity").touch()
    bucket = cloud.folder / "bucket"  # what outlives the machines
    bucket.mkdir()
    command = f"""
        echo "$1" >>{bucket}/starts
        if [ "$(wc -l <{bucket}/starts)" = 1 ]; then echo PREEMPTED >{cloud.folder}/state; exit 1; fi
        ls launch configs >{bucket}/checkout"""
    result = cloud.run(
        "tpu_until_done.sh", *WHERE, "--type", "v6e-16", "--spot", "--bucket", "b", "--wait", "0", "--poll", "0",
        "--", "bash", "-c", command, "bash", "it's me",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert (bucket / "starts").read_text() == "it's me\nit's me\n"
    assert "worker.sh" in (bucket / "checkout").read_text()  # it ran in the checkout that had been copied
    verbs = [call[4] for call in cloud.calls("gcloud") if call[4] in ("create", "delete", "scp")]
    assert verbs == ["create", "create", "scp", "delete", "create", "scp", "delete"]
    assert all("--spot" in call for call in cloud.calls("create"))
    assert len(cloud.calls("gcsfuse")) == 2
    assert not (cloud.folder / "state").exists()
    assert result.stderr.count("next try in 0 seconds") == 1


def test_until_done_leaves_a_failed_run_to_look_at(pod: Stubs):
    words = (*WHERE, "--type", "v6e-16", "--bucket", "b", "--poll", "0", "--grace", "0")
    pod.add("python3", "exit 1")  # the set-up fails
    (pod.home / "prb_jax").unlink()
    result = pod.run("tpu_until_done.sh", *words, "--", "true")
    assert result.returncode == 1
    assert "the set-up failed three times" in result.stderr
    assert "delete it with launch/tpu_delete.sh --name pod" in result.stderr
    assert pod.calls("delete") == []


@pytest.mark.parametrize(
    ("reports", "status", "stops"),
    [
        (["exit 0, exit 0"], 0, False),
        (["exit 0, running", "exit 0, exit 0"], 0, False),
        (["exit 1, interrupted"], 75, True),  # the first lost its neighbour
        (["exit 0, lost"], 75, True),
        (["exit 4, running"], 4, True),  # the other one would wait for it
        (["stopped, stopped"], 143, False),
    ],
)
def test_the_workers_are_judged_together(stubs: Stubs, reports: list[str], status: int, stops: bool):
    (stubs.folder / "reports").write_text("\n".join(reports) + "\n")
    answer = """
case "$*" in
  *describe*) echo READY ;;
  *' report '*)
    head -n 1 "$STUBS/reports" | tr , '\\n' | sed 's/^ */prb-job host: /'
    sed -i 1d "$STUBS/reports" ;;
esac
"""
    stubs.add("gcloud", answer)
    result = stubs.run("tpu_run.sh", *WHERE, "--poll", "0", "--grace", "0", "--", "true")
    assert result.returncode == status, result.stderr
    assert (stubs.folder / "reports").read_text() == ""
    assert any(f"{WORKER} stop prb" in call[-1] for call in stubs.calls("ssh")) == stops
