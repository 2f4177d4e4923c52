"""Folders of strangers: a record runs no Python, and its numbers are those that were written."""

from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import DataError, cli
from prb_jax.auditing.folder import open_folder
from prb_jax.generation.sample import RUNS as SAMPLES
from prb_jax.judges.best_of_n import best_of_n
from prb_jax.runs.kind import as_recorded
from prb_jax.scoring.inputs import read_inputs
from tests.json_lines import write_lines

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
    with pytest.warns(prb.PrbWarning, match=f"{message}.*the audit goes on with its own copy"):
        open_folder(tmp_path / "audit")
    assert not python.exists()

    assert cli.main(["distil", "best", "--data", named, "--out", "named"]) == 0
    assert cli.main(["distil", "best", "--import", "x.py", "--out", "imported"]) == 0
    assert Path("named/pairs.jsonl").read_bytes() == Path("imported/pairs.jsonl").read_bytes()
    assert cli.main(["report", "run", "--data", named, "--out", "named.html"]) == 0
    assert "tea 7?" in Path("named.html").read_text()
    assert python.exists()
