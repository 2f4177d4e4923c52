"""`prb compare` and `prb report` on logs of lm-evaluation-harness, written here as its version 0.4.13 writes them."""

import json
import math
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import prb_jax as prb
from prb_jax import cli
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.paired import compare_rows
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.runs.harness_logs import read_run

DATE = "2026-11-24T02-07-23.192906"
ITEMS, USERS = 12, 8


def write_log(
    folder: Path,
    *,
    columns: Mapping[str, Callable[[int], Any]],
    task: str = "toy_mc",
    docs: int = ITEMS * USERS,
    more: Mapping[str, Any] = {"user_id": lambda i: f"u{i % USERS}"},
    stated: Mapping[str, float] | None = None,
) -> Path:
    """One task with a row for each doc and filter; columns are called "metric,filter" as in the results."""
    folder.mkdir(parents=True, exist_ok=True)
    filters = dict.fromkeys(column.partition(",")[2] for column in columns)
    lines, sums = [], dict.fromkeys(columns, 0.0)
    for kept in filters:
        metrics = [column.partition(",")[0] for column in columns if column.endswith(f",{kept}")]
        for i in range(docs):
            doc = {"question": f"What is {i} plus one?", "choices": [str(i + 1), str(i)], "answer": 0}
            doc |= {name: make(i) for name, make in more.items()}
            row: dict[str, Any] = {
                "doc_id": i,
                "doc": doc,
                "target": "0",
                "arguments": {"gen_args_0": {"arg_0": doc["question"], "arg_1": " 1"}},
                "filtered_resps": [["-0.1", "False"]],
                "filter": kept,
                "metrics": metrics,
                "doc_hash": sha256(json.dumps(doc).encode()).hexdigest(),
                "target_hash": sha256(b"0").hexdigest(),
            }
            for name in metrics:
                row[name] = columns[f"{name},{kept}"](i)
                sums[f"{name},{kept}"] += row[name] if isinstance(row[name], float) else math.nan
            lines.append(json.dumps(row) + "\n")
    (folder / f"samples_{task}_{DATE}.jsonl").write_text("".join(lines))
    path = folder / f"results_{DATE}.json"
    known = json.loads(path.read_text()) if path.exists() else {"results": {}, "higher_is_better": {}}
    means = {name: value / docs for name, value in sums.items() if not math.isnan(value)}
    known["results"][task] = {"alias": task, "sample_len": docs, **means, **(stated or {})}
    known["higher_is_better"][task] = {
        column.partition(",")[0]: "perplexity" not in column for column in columns
    }
    known |= {"config": {"model": "hf", "model_args": {"pretrained": folder.name}, "gen_kwargs": None}}
    known |= {"model_name": folder.name, "n-shot": {task: 0}, "lm_eval_version": "0.4.13"}
    path.write_text(json.dumps(known))
    return folder


WINS = {
    name: (np.random.default_rng(seed).random(ITEMS * USERS) < rate).astype(float)
    for seed, (name, rate) in enumerate({"good": 0.9, "fair": 0.6, "poor": 0.4}.items())
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    for name, of_run in WINS.items():
        write_log(folder / name, columns={"acc,none": lambda i, of_run=of_run: of_run[i]})
    return folder


def test_verdicts_of_a_log_are_compared_as_those_of_pairs(logs: Path) -> None:
    compared = prb.compare(logs / "good", logs / "fair", logs / "poor")
    pairs = {
        name: [
            ScoredRow(f"toy_mc/{i}", None, f"u{i % USERS}", [win, 0.5], [1.0, 0.0])
            for i, win in enumerate(of_run)
        ]
        for name, of_run in WINS.items()
    }
    expected = compare_rows(pairs)
    assert [{name: run[name] for name in expected["runs"][0]} for run in compared["runs"]] == expected["runs"]
    for ours, theirs in zip(compared["pairs"], expected["pairs"], strict=True):
        assert {**ours, "scores": None} == {**theirs, "scores": None}
        assert ours["ci95"] is not None
        assert ours["users"] == USERS
    assert compared["runs"][0]["model"] == "good"
    assert compared["runs"][0]["accuracy"] == WINS["good"].mean()
    results = json.loads((logs / "good" / f"results_{DATE}.json").read_text())
    assert compared["runs"][0]["accuracy"] == pytest.approx(results["results"]["toy_mc"]["acc,none"])
    # the folder, the results file and the one samples file are the same run
    differences = {
        prb.compare(logs / "good" / path, logs / "fair")["pairs"][0]["difference"]
        for path in ("", f"results_{DATE}.json", f"samples_toy_mc_{DATE}.jsonl")
    }
    assert len(differences) == 1


def test_grades_that_are_no_verdicts_have_t_intervals_and_items_cross(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 5, (2, ITEMS * USERS)) * 2.5  # from 0 to 10
    more = {"user_id": lambda i: f"u{i % USERS}", "item_id": lambda i: i // USERS}
    for name, grades in zip("ab", values, strict=True):
        write_log(tmp_path / name, columns={"score,none": lambda i, g=grades: float(g[i])}, more=more)
    run = read_run(tmp_path / "a")
    keys = tuple((str(i // USERS),) for i in range(ITEMS * USERS))
    assert run.clusters == Clusters(tuple(f"u{i % USERS}" for i in range(ITEMS * USERS)), keys)
    gains = values[0] - values[1]
    (pair,) = prb.compare(tmp_path / "a", tmp_path / "b")["pairs"]
    sign = 1 if pair["a"] == "a" else -1
    assert pair["difference"] == pytest.approx(sign * gains.mean())
    assert pair["ci95"][0] < pair["difference"] < pair["ci95"][1]
    # clustered by users alone
    (pair,) = prb.compare(tmp_path / "a", tmp_path / "b", cluster=["user_id"])["pairs"]
    alone = mean_interval(sign * gains, run.clusters.users)
    assert pair["ci95"] == pytest.approx(alone.bounds)
    assert pair["p"] == pytest.approx(2 * stats.t.sf(abs(gains.mean()) / alone.standard_error, alone.degrees))
    assert pair["flips"] == int((gains != 0).sum())
    assert run.summary["user_accuracy"] == pytest.approx(values[0].mean())
    expected = mean_interval(values[0], run.clusters.users, responses=keys).bounds  # users have as many rows
    assert run.summary["user_accuracy_ci95"] == pytest.approx(expected)


def test_several_tasks_filters_and_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generated = {"exact_match,strict": lambda i: 0.0, "exact_match,flexible": lambda i: float(i % 2)}
    for name, shift in (("a", 0), ("b", 1)):
        chosen = {"acc,none": lambda i, s=shift: float(i % 3 > s), "acc_norm,none": lambda i: 1.0}
        write_log(tmp_path / name, columns=chosen)
        write_log(tmp_path / name, task="toy_gen", columns=generated, docs=10)
    both = [str(tmp_path / name) for name in "ab"]
    metric = ["--metric", "acc", "exact_match,flexible"]
    assert cli.main(["compare", *both, *metric, "--format", "json"]) == 0
    runs = {run["name"]: run["accuracy"] for run in json.loads(capsys.readouterr().out)["runs"]}
    assert runs["a"] == pytest.approx((64 + 5) / 106)
    run = read_run(tmp_path / "a", metric=["acc", "exact_match,flexible"])
    by_task = {name: part["accuracy"] for name, part in run.summary["by_subset"].items()}
    assert by_task == pytest.approx({"toy_mc": 64 / 96, "toy_gen": 0.5})
    assert cli.main(["report", *both, *metric, "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Ranks on the same 106 comparisons" in page
    assert "toy_gen" in page
    assert "nan" not in page


def ones(*columns: str, **more: Any) -> Callable[[Path], Path]:
    """Writes a log whose grades are all 1."""
    return lambda folder: write_log(
        folder, columns={name: lambda i: 1.0 for name in columns or ("acc,none",)}, **more
    )


def replaced(text: str, *, name: str = f"samples_toy_mc_{DATE}.jsonl") -> Callable[[Path], object]:
    """Writes such a log with another file of samples."""
    return lambda folder: (ones()(folder) / name).write_text(text)


DOC = json.dumps({"doc_id": 1, "acc": 1.0, "doc": {}}) + "\n"
REFUSED: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "several metrics": (
        ones("acc,none", "f1,none"), [], "expected one metric, found 2; --metric names one of: acc,none; f1,none"
    ),
    "a metric that is not there": (
        ones(), ["--metric", "f1"], "expected one metric of f1, found 0; --metric names one of: acc,none"
    ),
    "a metric of the whole corpus": (
        lambda folder: write_log(folder, columns={"bleu,none": lambda i: ["a", "b"]}), [],
        "doc 0: bleu: expected a number for each sample, found ['a', 'b']",
    ),
    "lower is better": (ones("perplexity,none"), [], "lower is better for the metric perplexity"),
    "a file that lost its end": (
        ones(stated={"acc,none": 0.5}), [],
        "acc,none: the mean of its 96 samples is 1, its results report 0.5: the file is incomplete",
    ),
    "another doc of one id": (
        ones(more={"user_id": lambda i: f"u{i % USERS + (i == 3)}"}), [],
        "good and other are runs on different data, which cannot be compared; these differ: data.samples.toy_mc/3: ",
    ),
    "fewer docs": (ones(docs=90), [], "data.samples.toy_mc/93: "),
    "no such field": (
        ones(), ["--cluster", "topic"],
        "no sample has the field topic to cluster by; they have question, choices, answer, user_id",
    ),
    "two runs in one folder": (
        replaced("{}", name=f"samples_toy_mc_{DATE.replace('02-', '03-')}.jsonl"), [],
        "holds samples of 2 runs of lm-evaluation-harness",
    ),
    "a doc twice": (replaced(2 * DOC), [], "two samples 'toy_mc/1'"),
    "no samples": (
        lambda folder: (ones()(folder) / f"samples_toy_mc_{DATE}.jsonl").unlink(), [],
        "found no run.json in it, and no samples_TASK_DATE.jsonl",
    ),
    "no sample": (
        replaced('{"id": 1}\n'), [], ".jsonl:1: expected a sample of lm-evaluation-harness, an object with doc_id"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_paired_is_refused(
    case: str, logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, options, message = REFUSED[case]
    make(tmp_path / "other")
    assert cli.main(["compare", str(logs / "good"), str(tmp_path / "other"), *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
