"""Folders of strangers: a record runs no Python, and its numbers are those that were written."""

import json
import shutil
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import DataError, RunError, cli
from prb_jax.behaviour.generation.sample import RUNS as SAMPLES
from prb_jax.behaviour.judges.best_of_n import best_of_n
from prb_jax.building.auditing.folder import open_folder
from prb_jax.records import digests
from prb_jax.records.large_lines import OF_BLOCKS
from prb_jax.runs.kind import as_recorded
from prb_jax.scoring.inputs import read_inputs
from tests.json_lines import read_lines, write_lines

PAIRS = [
    {
        "id": f"p{n}", "user_id": f"u{n % 7}", "subset": "ab"[n % 2], "question": f"tea {n}?",
        "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3), "profile": [{"text": f"post {n % 7}"}],
    }
    for n in range(42)
]  # fmt: skip
PYTHON = """
import json, pathlib
with open({marker!r}, "a") as file:
    file.write("ran")
pairs = [json.loads(line) for line in open({data!r})]
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A Python file with the pairs, and the file in which it notes that it was run."""
    monkeypatch.chdir(tmp_path)
    data = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    marker = tmp_path / "marker"
    (tmp_path / "x.py").write_text(PYTHON.format(marker=str(marker), data=data))
    return marker


def write_samples(out: Path, data: str) -> Path:
    """A finished run of `prb sample`, without a policy."""
    drawn_from = as_recorded(read_inputs([data]).to_json())
    inputs = {"model": {}, "data": drawn_from, "limit": None, "sampling": {"n": 2}}
    unknown = dict.fromkeys(("prompt_token_ids", "token_ids", "logprob", "sampled_logprob"))
    rows = [
        {
            "id": pair["id"],
            "sample": k,
            "text": f"{'yes ' * (k + 1)}{pair['id']}",
            "finish": "stop",
            **unknown,
        }
        for pair in PAIRS
        for k in range(2)
    ]
    with SAMPLES.open(out, inputs, notes={"data": [data]}) as run:
        run.file.append(rows)
        run.finish({})
    return out


def test_python_that_a_record_names_is_not_run(python, tmp_path, capsys):
    """In every verb that opens the data of a record, unless the command line names the file too."""
    named = "x.py:pairs"
    prb.evaluate("baseline:length", named, out="run", progress=False)
    samples = write_samples(tmp_path / "samples", named)
    chosen = {"rewards": ["baseline:length"], "quality": "baseline:length", "progress": False}
    best_of_n(samples, out=tmp_path / "best", data=[named], **chosen)
    (tmp_path / "audit").mkdir()
    open_folder(tmp_path / "audit", data=[named])
    python.unlink()

    message = (
        "names the Python file of x.py:pairs, which a record cannot run: to run it, name it again, --data"
    )
    prb.report("run", out="page.html")
    assert message in Path("page.html").read_text()
    for call in (
        lambda: best_of_n(samples, out=tmp_path / "again", **chosen),
        lambda: prb.distil("best", out="pairs"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    with pytest.warns(prb.PrbWarning, match=f"{message}.*the audit uses its own copy"):
        open_folder(tmp_path / "audit")
    assert not python.exists()

    assert cli.main(["distil", "best", "--data", named, "--out", "named"]) == 0
    assert cli.main(["distil", "best", "--import", "x.py", "--out", "imported"]) == 0
    assert Path("named/pairs.jsonl").read_bytes() == Path("imported/pairs.jsonl").read_bytes()
    assert cli.main(["report", "run", "--data", named, "--out", "named.html"]) == 0
    assert "tea 7?" in Path("named.html").read_text()
    assert python.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", ["a"], r"run\.json: field 'samples': expected a string"),
        ("samples", None, r"run\.json: expected the field 'samples', found none; give --samples DIR"),
        ("sessions", [{"started": 3}], r"run\.json: field 'sessions"),
        ("sessions", [{"settings": 3}], r"run\.json: field 'sessions"),
        ("inputs.rewards", {}, "reward: expected one of the rewards of"),
    ],
)
def test_fields_that_are_read_of_a_record_have_their_types(field, value, message, tmp_path):
    samples = write_samples(tmp_path / "samples", write_lines(tmp_path / "pairs.jsonl", PAIRS))
    best = tmp_path / "best"
    chosen = {"quality": "baseline:length", "progress": False}
    best_of_n(samples, ["baseline:length"], out=best, **chosen)
    unseal(best / "run.json")
    record = json.loads((best / "run.json").read_text())
    *above, last = field.split(".")
    place = record[above[0]] if above else record
    place.pop(last)
    if value is not None:
        place[last] = value
    (best / "run.json").write_text(json.dumps(record))
    with pytest.raises((DataError, RunError), match=message):
        prb.distil(best, out=tmp_path / "pairs")


TAMPERED = (
    "accuracy",
    "ci95",
    "ties",
    "mean_margin",
    "user_accuracy",
    "n",
    "by_subset",
    "coverage",
    "controls",
)


def longer(comparison):
    return [float(len(text) + len(comparison.profile)) for text in comparison.responses]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Two runs of the same data, one of them with a control."""
    folder = tmp_path_factory.mktemp("scored")
    data = write_lines(folder / "pairs.jsonl", PAIRS)
    prb.evaluate(longer, data, out=folder / "run", controls="blind", progress=False)
    prb.evaluate("baseline:length", data, out=folder / "other", progress=False)
    return folder


def readers(folder: Path):
    """The verbs that print the figures of a run."""
    return (
        lambda: prb.leaderboard(folder),
        lambda: prb.report(folder / "run", out=folder / "page.html"),
        lambda: prb.compare(folder / "run", folder / "other"),
    )


def unseal(record: Path) -> None:
    """Make a record one of an earlier version, which had no digests."""
    run = json.loads(record.read_text())
    record.write_text(json.dumps({name: run[name] for name in run if name != "files"} | {"format": 1}))


def test_files_are_compared_by_the_kind_of_digest_that_the_record_has(scored, tmp_path, monkeypatch):
    """The summary of many people may be as large as the files whose digests are of blocks."""
    folder = shutil.copytree(scored, tmp_path / "runs")
    right = prb.leaderboard(folder)
    monkeypatch.setattr(digests, "LARGE", 1)
    assert digests.digests_of(folder / "run", ["summary.json"])["summary.json"].startswith(OF_BLOCKS)
    assert prb.leaderboard(folder) == right


@pytest.mark.parametrize("name", TAMPERED)
def test_an_edited_summary_is_never_shown(name, scored, tmp_path):
    """Neither with digests nor, as of an earlier version, without them."""
    folder = shutil.copytree(scored, tmp_path / "runs")
    path = folder / "run" / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["accuracy"] < 0.95
    right = prb.leaderboard(folder)
    page = prb.report(folder / "run", out=folder / "page.html").read_text()
    wrong = {"n": 41, "ties": 7, "ci95": [0.973, 0.991], "by_subset": {}, "controls": {}}.get(name, 0.991)
    if name == "controls":
        wrong = {"blind": summary["controls"]["blind"] | {"accuracy": 0.113, "difference": 0.777}}
    path.write_text(json.dumps(summary | {name: wrong}))
    for read in readers(folder):
        with pytest.raises(RunError, match=r"summary\.json: is not the file that the run wrote"):
            read()
    unseal(folder / "run" / "run.json")
    if name in ("ci95", "by_subset", "coverage", "controls"):  # recomputed
        assert prb.leaderboard(folder) == right
        again = prb.report(folder / "run", out=folder / "page.html").read_text()
        shown = ("0.973", "0.991", "0.113", "0.777")
        assert [number in again for number in shown] == [number in page for number in shown] == [False] * 4
        return
    for read in readers(folder):
        with pytest.raises(RunError, match=r"the files of a\s+run belong together"):
            read()


@pytest.mark.parametrize("text", ["7.5", "NaN", "1e400", "null", '"0.5"', "true"])
def test_an_accuracy_that_is_none_is_refused(text, scored, tmp_path):
    folder = shutil.copytree(scored, tmp_path / "runs")
    path = folder / "run" / "summary.json"
    accuracy = json.dumps(json.loads(path.read_text())["accuracy"])
    path.write_text(path.read_text().replace(f'"accuracy": {accuracy}', f'"accuracy": {text}', 1))
    unseal(folder / "run" / "run.json")
    for read in readers(folder):
        with pytest.raises(RunError, match=r"summary\.json: (field 'accuracy'|not valid JSON)"):
            read()


@pytest.mark.parametrize("places", [range(0, 42, 9), pytest.param(range(42), marks=pytest.mark.slow)])
def test_every_tampered_score_is_found(scored, tmp_path, places):
    """Also where the verdict stays: a run of an earlier version is found out by its mean margin."""
    for sealed in (True, False):
        for place in places:
            folder = tmp_path / f"{sealed}{place}"
            shutil.copytree(scored / "run", folder / "run")
            shutil.copytree(scored / "other", folder / "other")
            path = folder / "run" / "scores.jsonl"
            rows = read_lines(path)
            rows[place]["scores"][0] += 0.5
            write_lines(path, rows)
            if not sealed:
                unseal(folder / "run" / "run.json")
            for read in readers(folder)[:1] if sealed else (readers(folder)[0], readers(folder)[2]):
                with pytest.raises(RunError, match=r"scores\.jsonl"):
                    read()
