"""The command line: spelling, exit statuses, start-up time, one whole run."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prb_jax
import prb_jax.plan
from prb_jax import PrbError, cli
from prb_jax.commands import functions_of
from prb_jax.commands.arguments import keywords
from prb_jax.personal.few_shot.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [
        {"id": i, "user_id": f"u{i % 3}", "question": "?", "chosen": "long " * (i % 4), "rejected": "short 2"}
        for i in range(1, 12)
        if i % 4
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def prb(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prb_jax.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)


def test_evaluate_prints_a_table_and_writes_the_files(data, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(["evaluate", "baseline:length", "--data", str(data), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    for shown in ("length", "random", "profile-overlap", "coverage", f"written to {out}"):
        assert shown in captured.out
    assert "9 of 9 pairs" in captured.err
    assert sorted(os.listdir(out)) == [
        "clusters.jsonl", "run.json", "scores.jsonl", "summary.json", "users.csv",
    ]  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["n"] == 9
    run = json.loads((out / "run.json").read_text())
    assert run["command"] == ["prb", "evaluate", "baseline:length", "--data", str(data), "--out", str(out)]


def test_the_same_command_again_changes_nothing(data, tmp_path, capsys):
    command = ["evaluate", "baseline:random", "--data", str(data), "--out", str(tmp_path / "run")]
    contents = []
    for _ in range(2):
        assert cli.main(command) == 0
        contents.append({path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()})
    assert contents[0] == contents[1]


def test_dashes_and_underscores_and_repeated_data(data, tmp_path, capsys):
    other = tmp_path / "other_file.jsonl"
    other.write_text('{"id": "x_y", "question": "?", "chosen": "a", "rejected": "b"}\n')
    out = tmp_path / "under_score"
    arguments = ["--data", str(data), "--data", str(other), "--too_long=error", "--seed", "7"]
    assert cli.main(["evaluate", "baseline:length", *arguments, f"--out={out}", "--no_progress"]) == 0
    assert capsys.readouterr().err == ""
    inputs = json.loads((out / "run.json").read_text())["inputs"]
    assert inputs["seed"] == 7
    assert inputs["data"]["comparisons"] == 10
    again = ["--too-long", "error", "--seed=7", "--no-progress"]
    arguments = ["--data", str(data), str(other), *again, "--out", str(out)]
    assert cli.main(["evaluate", "baseline:length", *arguments]) == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-length", "7"], "max_length"),
        (["--profile-posts", "3"], "profile_posts"),
        (["--protocol", "paper"], "protocol"),
        (["--dtype", "bfloat16", "--mesh", "fsdp=2"], "mesh, dtype"),
    ],
)
def test_what_means_nothing_to_a_baseline_is_refused(flags, named, data, tmp_path, capsys):
    command = ["evaluate", "baseline:length", "--data", str(data), "--out", str(tmp_path / "run")]
    assert cli.main([*command, *flags]) == 2
    assert f"{named}: baseline:length reads the whole text" in capsys.readouterr().err


def test_limit_is_for_testing_only_and_says_so(data, tmp_path, capsys):
    command = ["evaluate", "baseline:length", "--data", str(data), "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--limit", "2"]) == 0
    assert "testing only" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "limit: 2 -> null" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "missing.jsonl"}, "missing.jsonl"),
        ({"MODEL": "baseline:best"}, "unknown baseline 'baseline:best'"),
        ({"--subset": "S"}, "no subset 'S'"),
        ({"--out": "pairs.jsonl"}, "pairs.jsonl: the output folder is a file"),
    ],
)
def test_what_the_user_can_put_right_is_one_line_and_status_2(data, tmp_path, capsys, change, message):
    options = {"MODEL": "baseline:length", "--data": str(data), "--out": "run"} | change
    options |= {name: str(tmp_path / options[name]) for name in ("--data", "--out")}
    model = options.pop("MODEL")
    assert cli.main(["evaluate", model, *(part for option in options.items() for part in option)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prb: error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["evaluate"],
        ["evaluate", "m", "--data", "d"],
        ["evaluate", "m", "--out", "o"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--protocol", "other"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--dtype", "int8"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--quantize", "int4"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--limit", "0"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--profile-posts", "-1"],
        ["evaluate", "m", "--data", "d", "--out", "o", "--profile", "3"],
        ["evaluate", "m", "extra", "--data", "d", "--out", "o"],
        ["quickstart", "--unknown"],
        ["unknown"],
    ],
)
def test_a_command_line_that_cannot_be_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "prb: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["evalute", "m"], "unknown verb 'evalute'; did you mean evaluate? (see `prb --help`)"),
        (["bench", "skore"], "unknown verb 'skore'; did you mean score? (see `prb bench --help`)"),
        (
            ["evaluate", "--limit", "3"],
            "the following arguments are required: MODEL, --data, --out (see `prb evaluate --help`)",
        ),
        (
            ["evaluate", "m", "--data", "d", "--profile-post", "3"],
            "unrecognized arguments: --profile-post 3; did you mean --profile-posts? (see `prb evaluate --help`)",
        ),
        (
            ["evaluate", "m", "--protocol", "papr"],
            "argument --protocol: invalid choice: 'papr'; did you mean paper? (choose from default, paper) "
            "(see `prb evaluate --help`)",
        ),
    ],
)
def test_a_word_that_is_wrong_is_one_line_with_the_nearest(arguments, said, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err == f"prb: error: {said}\n"


def test_help_shows_the_first_steps_and_groups_every_verb(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    first = re.findall(r"^  prb (\S+)", shown, re.MULTILINE)
    assert first == ["quickstart", "evaluate", "report", "compare", "train"]
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == list(cli.VERBS)
    for verb in (verb for verbs in cli.VERBS.values() for verb in verbs):
        assert len(re.findall(rf"^  {verb}(?: |$)", shown, re.MULTILINE)) == 1, verb


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("train", "prb train CONFIG [KEY=VALUE ...] --out DIR [options]"),
        ("evaluate", "prb evaluate MODEL --data NAME_OR_PATH ... --out DIR [options]"),
        ("judge", "prb judge [MODEL] --data NAME_OR_PATH ... --out DIR [options]"),
    ],
)
def test_the_usage_says_what_is_needed(verb, usage, capsys):
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {usage}\n")


def test_methods_are_listed(capsys):
    assert cli.main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in METHODS)


def test_ctrl_c_says_how_to_go_on(data, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("prb_jax.scoring.evaluate.evaluate", interrupted)
    command = ["evaluate", "baseline:length", "--data", str(data), "--out", str(tmp_path / "run")]
    assert cli.main(command) == 130
    assert "the same command continues the run" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(data, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("prb_jax.scoring.evaluate.evaluate", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["evaluate", "baseline:length", "--data", str(data), "--out", str(tmp_path / "run")])
    assert not issubclass(ZeroDivisionError, PrbError)


def test_a_reader_that_leaves_is_no_crash(data, tmp_path):
    command = f"{sys.executable} -m prb_jax.cli evaluate baseline:length --data {data} --out {tmp_path / 'r'}"
    done = subprocess.run(
        f"set -o pipefail; {command} | true",
        shell=True, executable="/bin/bash", capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_help_starts_nothing_heavy():
    code = (
        "import sys\nfrom prb_jax import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print({'jax', 'numpy', 'rich', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_of_verbs_starts_no_jax_and_scoring_no_flax():
    code = (
        "import sys\nfrom prb_jax import cli\n"
        "for verb in [name for verbs in cli.VERBS.values() for name in verbs]:\n"
        "    try:\n        cli.main([verb, '--help'])\n    except SystemExit:\n        pass\n"
        "    heavy = {'jax', 'flax', 'optax', 'transformers', 'torch', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, (verb, heavy)\n"
        "import prb_jax.scoring.reward_model, prb_jax.scoring.evaluate\n"
        "heavy = {'flax', 'optax', 'httpx', 'transformers', 'torch', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"  # a model is scored without them; its tokenizer needs transformers
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_verb_is_two_functions_of_its_file():
    names = [name for verbs in cli.VERBS.values() for name in verbs]
    assert set(next(action.choices for action in cli.parser()._actions if action.choices)) == set(names)
    functions: dict[str, set[str]] = {}
    for function in (function for name in names for function in functions_of(name)):
        functions.setdefault(function.__module__, set()).add(function.__name__)
    for file, expected in functions.items():
        own = [one for one in vars(sys.modules[file]).values() if getattr(one, "__module__", "") == file]
        assert {one.__name__ for one in own if one.__name__[0] != "_"} == expected


@pytest.mark.parametrize(
    ("verb", "function", "handled"),
    [
        ("evaluate", "evaluate", {"columns", "no_progress", "distributed", "config", "no_reference"}),
        ("plan", "plan", {"ppo", "reward", "value_trunk", "sample", "sweep", "json"}),
        ("correlate", "correlate", set()),
        ("convert", "convert", set()),
        ("inspect", "inspect", set()),
        ("rank-profiles", "rank_profiles", {"no_progress"}),
        ("leaderboard", "leaderboard", {"format"}),
    ],
)
def test_every_argument_of_a_verb_reaches_its_function(verb: str, function: str, handled: set[str]) -> None:
    parser = cli.parser(verb)
    verbs = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    actions = {action.dest: action for action in verbs[verb]._actions if action.dest != "help"}
    called = prb_jax.plan.plan if verb == "plan" else getattr(prb_jax, function)
    passed = keywords(called, argparse.Namespace(**dict.fromkeys(actions)))
    assert actions.keys() - passed.keys() == handled | {"imports"}  # of every verb


def test_a_baseline_run_starts_no_jax(data, tmp_path):
    arguments = ["evaluate", "baseline:length", "--data", str(data), "--out", str(tmp_path / "r")]
    code = (
        f"import sys\nfrom prb_jax import cli\ncli.main({arguments!r})\n"
        "print({'jax', 'flax', 'transformers', 'torch', 'datasets', 'httpx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()", done


def test_a_narrow_character_set_is_no_crash(data, tmp_path):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = prb("evaluate", "baseline:length", "--data", data, "--out", tmp_path / "r", env=environment)
    assert done.returncode == 0, done.stderr


def test_the_version():
    from prb_jax import __version__

    done = prb("--version")
    assert done.stdout.strip() == f"prb {__version__}"


def test_real_data_from_the_terminal(tmp_path):
    path = SHARED / "data" / "personalised" / "polis_en.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the repository")
    done = prb("evaluate", "baseline:length", "--data", path, "--limit", 2000, "--out", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    assert "coverage" in done.stdout
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["n"] == 2000
    assert summary["users"] > 100


@pytest.mark.parametrize(
    ("number", "status", "message"),
    [
        (signal.SIGINT, 130, "prb: interrupted; what was scored is kept"),
        (signal.SIGTERM, 75, "prb: SIGTERM; what was scored is kept"),
    ],
)
def test_interrupt_of_a_real_process(tmp_path, number: signal.Signals, status: int, message: str):
    pairs = ({"id": i, "question": "?", "chosen": "a", "rejected": "b"} for i in range(200_000))
    data = tmp_path / "many.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    command = [sys.executable, "-m", "prb_jax.cli", "evaluate", "baseline:length", "--data", data]
    process = subprocess.Popen(
        [*map(str, command), "--out", str(tmp_path / "r")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Where the tests run in the background of a shell, its children would ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not (tmp_path / "r" / "scores.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == status, error
    assert error.strip().splitlines()[-1].startswith(message)
