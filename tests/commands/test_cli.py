"""The command line: spelling, exit statuses, start-up time, one whole run."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import prb_jax
from prb_jax import PrbError, cli
from prb_jax.commands import functions_of
from prb_jax.commands.arguments import keywords
from prb_jax.models.readouts.load_options import LoadChoices
from prb_jax.personal.few_shot.registry import METHODS
from tests.json_lines import write_lines
from tests.plain_process import ROOT, prb, prb_command
from tests.sweeps import sweep


def test_evaluate_prints_a_table_and_writes_the_files_and_the_same_command_changes_nothing(
    data, evaluate, tmp_path, capsys
):
    out = tmp_path / "run"
    assert evaluate() == 0
    captured = capsys.readouterr()
    for shown in ("length", "random", "profile-overlap", "prefers what the user wants", f"written to {out}"):
        assert shown in captured.out
    assert "9 of 9 pairs" in captured.err
    assert sorted(os.listdir(out)) == [
        "clusters.jsonl", "run.json", "scores.jsonl", "summary.json", "users.csv",
    ]  # fmt: skip
    assert json.loads((out / "summary.json").read_text())["n"] == 9
    run = json.loads((out / "run.json").read_text())
    assert run["command"] == ["prb", "evaluate", "baseline:length", "--data", str(data), "--out", str(out)]
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert evaluate() == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_dashes_and_underscores_and_repeated_data(data, tmp_path, capsys):
    row = {"id": "x_y", "question": "?", "chosen": "a", "rejected": "b"}
    other, out = write_lines(tmp_path / "other_file.jsonl", [row]), tmp_path / "under_score"
    arguments = ["--data", str(data), "--data", other, "--too_long=error", "--seed", "7"]
    assert cli.main(["evaluate", "baseline:length", *arguments, f"--out={out}", "--no_progress"]) == 0
    assert capsys.readouterr().err == ""
    inputs = json.loads((out / "run.json").read_text())["inputs"]
    assert inputs["seed"] == 7
    assert inputs["data"]["comparisons"] == 10
    again = ["--too-long", "error", "--seed=7", "--no-progress", "--out", str(out)]
    assert cli.main(["evaluate", "baseline:length", "--data", str(data), other, *again]) == 0


def test_limit_is_for_testing_only_and_says_so(evaluate, capsys):
    assert evaluate("--limit", 2) == 0
    assert "testing only" in capsys.readouterr().out
    assert evaluate() == 2
    assert "limit: 2 -> null" in capsys.readouterr().err
    assert evaluate(model="baseline:best") == 2
    assert "unknown baseline 'baseline:best'" in capsys.readouterr().err


def test_methods_are_listed(capsys):
    assert cli.main(["methods"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in METHODS)


def test_ctrl_c_says_how_to_go_on_and_a_bug_keeps_its_traceback(evaluate, capsys, monkeypatch):
    raised: type[BaseException] = KeyboardInterrupt

    def ended(*_, **__):
        raise raised

    monkeypatch.setattr("prb_jax.scoring.evaluate.run_evaluation", ended)
    assert evaluate() == 130
    assert "the same command continues the run" in capsys.readouterr().err
    raised = ZeroDivisionError
    assert not issubclass(raised, PrbError)
    with pytest.raises(ZeroDivisionError):
        evaluate()


def test_a_reader_that_leaves_is_no_crash(data, tmp_path):
    words = prb_command("evaluate", "baseline:length", "--data", data, "--out", tmp_path / "r")
    done = subprocess.run(
        f"set -o pipefail; {' '.join(words)} | true",
        shell=True, executable="/bin/bash", capture_output=True, text=True, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


HELP = """
for words in {}:
    try:
        cli.main(words + ["--help"])
    except SystemExit:
        pass
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (HELP.format("[[]]"), {"jax", "numpy", "rich", "transformers"}),
        (
            HELP.format("[[name] for names in cli.VERBS.values() for name in names]"),
            {"jax", "flax", "numpy", "optax", "pyarrow", "transformers", "torch", "datasets"},
        ),
        # a model is scored without these; its tokenizer needs transformers, and flax, of which it is a module, optax
        (
            "import prb_jax.scoring.reward_model, prb_jax.scoring.evaluate",
            {"httpx", "transformers", "torch", "datasets"},
        ),
        (
            "cli.main(['evaluate', 'baseline:length', '--data', 'DATA', '--out', 'DATA.run'])",
            {"jax", "flax", "transformers", "torch", "datasets", "httpx"},
        ),
    ],
    ids=["help", "help of verbs", "scoring", "a baseline"],
)
def test_nothing_heavy_is_imported_that_is_not_needed(code, heavy, data):
    code = f"import sys\nfrom prb_jax import cli\n{code.replace('DATA', str(data))}\nprint({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["set()"], done


def test_a_verb_is_two_functions_of_its_file():
    names = [name for verbs in cli.VERBS.values() for name in verbs]
    assert set(next(action.choices for action in cli.parser()._actions if action.choices)) == set(names)
    functions: dict[str, set[str]] = {}
    for function in (function for name in names for function in functions_of(name)):
        functions.setdefault(function.__module__, set()).add(function.__name__)
    for file, expected in functions.items():
        values = vars(sys.modules[file]).values()
        defined = [value.__name__ for value in values if getattr(value, "__module__", "") == file]
        assert {name for name in defined if name[0] != "_"} == expected


@pytest.mark.parametrize(
    ("verb", "function", "handled"),
    [
        (
            "evaluate",
            "evaluate",
            {"columns", "rendered", "no_progress", "distributed", "config", "no_reference"}
            | LoadChoices.__annotations__.keys(),
        ),
        ("correlate", "correlate", set()),
        ("convert", "convert", {"data", "to", "profile_posts", "out"}),
        ("inspect", "inspect", set()),
        ("rank-profiles", "rank_profiles", {"no_progress"}),
        ("leaderboard", "leaderboard", {"format"}),
    ],
)
def test_every_argument_of_a_verb_reaches_its_function(verb, function, handled):
    parser = cli.parser(verb)
    verbs = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    actions = {action.dest: action for action in verbs[verb]._actions if action.dest != "help"}
    passed = keywords(getattr(prb_jax, function), argparse.Namespace(**dict.fromkeys(actions)))
    assert actions.keys() - passed.keys() == handled | {"imports"}  # of every verb


def test_the_version():
    assert prb("--version").stdout.strip() == f"prb {prb_jax.__version__}"


@pytest.mark.parametrize(
    ("number", "status", "message"),
    sweep(
        [
            (signal.SIGINT, 130, "prb: interrupted; all scores are kept"),
            (signal.SIGTERM, 75, "prb: SIGTERM; all scores are kept"),
        ],
        few=(1,),
    ),
)
def test_interrupt_of_a_real_process(tmp_path, number, status, message):
    pairs = ({"id": i, "question": "?", "chosen": "a", "rejected": "b"} for i in range(20_000))
    data, scorer = write_lines(tmp_path / "many.jsonl", pairs), tmp_path / "scorer.py"
    scorer.write_text("import time\n\ndef score(comparison):\n    time.sleep(0.01)\n    return [1.0, 0.0]\n")
    # Where the tests run in the background of a shell they ignore the signal, and so would a process that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        prb_command("evaluate", f"{scorer}:score", "--data", data, "--out", tmp_path / "r"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    while not (tmp_path / "r" / "scores.jsonl").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == status, error
    assert error.strip().splitlines()[-1].startswith(message)
