"""URLs where a path is expected: on the command line, in configs and in Python."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import fsspec
import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import RunError
from prb_jax.platform.paths import localised, names_url, shown
from prb_jax.platform.storage import urls
from prb_jax.platform.storage.urls import session
from prb_jax.scoring.evaluate import evaluate as inner_evaluate
from prb_jax.training.config import TrainSettings
from tests.platform.storage.stores import below, contents, failing, files_in, put

ROWS = [
    {"id": str(n), "question": "q", "chosen": "a" * (n % 7 + 1), "rejected": "bbb", "user_id": str(n % 8)}
    for n in range(80)
]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def without_times(files: dict[str, bytes]) -> dict[str, bytes]:
    """What two runs of the same have in common: the record alone says when, where and by which words."""
    return {name: data for name, data in files.items() if name != "run.json"}


def test_a_run_from_and_to_urls_is_continued_elsewhere(tmp_path, store, monkeypatch, capsys):
    monkeypatch.setenv("PRB_JAX_PUSH_SECONDS", "0.02")
    put("gs://b/data/pairs.jsonl", DATA)
    (tmp_path / "pairs.jsonl").write_bytes(DATA)
    assert evaluate(str(tmp_path / "pairs.jsonl"), str(tmp_path / "local")) == 0
    store.fail = staticmethod(failing(0.05))
    assert evaluate("gs://b/data/pairs.jsonl", "gs://b/runs/x") == 0
    assert "written to gs://b/runs/x" in capsys.readouterr().out
    wanted = without_times(files_in(tmp_path / "local"))
    assert without_times(below("gs://b/runs/x")) == wanted
    record = json.loads(below("gs://b/runs/x")["run.json"])
    assert record["data"] == ["gs://b/data/pairs.jsonl"]
    assert record["command"][-4:] == ["gs://b/data/pairs.jsonl", "--out", "gs://b/runs/x", "--no-progress"]

    # The score fails half-way; a machine that knows nothing of the first one goes on.
    scored = []

    def score(comparison: prb.Comparison) -> list[float]:
        scored.append(comparison.id)
        if len(scored) == 50:
            raise KeyboardInterrupt
        return [float(len(text)) for text in comparison.responses]

    def run(copies: str) -> prb.Evaluation:
        monkeypatch.setenv("PRB_JAX_STORAGE", str(tmp_path / copies))
        return prb.evaluate(score, "gs://b/data/pairs.jsonl", out="gs://b/runs/y", name="l", progress=False)

    with pytest.raises(KeyboardInterrupt):
        run("first")
    assert any("manifest" in name for name in below("gs://b/runs/y"))
    result = run("second")
    assert len(scored) < 50 + len(ROWS)  # not all were scored twice
    assert below("gs://b/runs/y")["scores.jsonl"] == wanted["scores.jsonl"]
    assert result.out is not None
    assert (result.out / "scores.jsonl").read_bytes() == wanted["scores.jsonl"]

    assert cli.main(["compare", "gs://b/runs/x", "gs://b/runs/y", "--out", "s3://b/compared"]) == 0
    assert list(below("gs://b/compared")) == ["compare.json"]
    assert str(tmp_path) not in below("gs://b/compared")["compare.json"].decode()
    assert prb.compare("gs://b/runs/x", "gs://b/runs/y")
    assert cli.main(["report", "gs://b/runs/x", "--out", "s3://b/page.html"]) == 0
    assert contents()["/b/page.html"].startswith(b"<!")
    assert cli.main(["leaderboard", "gs://b/runs"]) == 0


def evaluate(data: str, out: str, *more: str) -> int:
    return cli.main(["evaluate", "baseline:length", "--data", data, "--out", out, "--no-progress", *more])


def test_urls_stand_in_configs_and_other_verbs_write_to_them(tmp_path, store, monkeypatch):
    put("gs://b/data/pairs.jsonl", DATA)
    config = tmp_path / "run.py"
    values = {"model": "baseline:length", "data": ["gs://b/data/pairs.jsonl"], "out": "gs://b/runs/c"}
    config.write_text(f"def get_config():\n    return {values!r}\n")
    assert cli.main(["evaluate", "--config", str(config), "--no-progress"]) == 0
    record = json.loads(below("gs://b/runs/c")["run.json"])
    assert record["command"][:2] == ["prb", "evaluate"]
    assert "gs://b/data/pairs.jsonl" in record["command"]
    assert "gs://b/runs/c" in record["command"]

    for verb in (["prepare"], ["split", "--by", "user"]):
        out = f"gs://b/{verb[0]}"
        assert cli.main([*verb, "--data", "gs://b/data/pairs.jsonl", "--out", out]) == 0
        assert cli.main([*verb, "--data", str(write(tmp_path)), "--out", str(tmp_path / verb[0])]) == 0
        assert below(out).keys() == files_in(tmp_path / verb[0]).keys()
    assert evaluate("gs://b/prepare", "gs://b/runs/prepared") == 0
    assert below("gs://b/runs/prepared")["scores.jsonl"] == below("gs://b/runs/c")["scores.jsonl"]

    monkeypatch.chdir(tmp_path)
    for part in ("1", "2"):
        assert evaluate("gs://b/data/pairs.jsonl", f"gs://b/part{part}", "--part", f"{part}/2") == 0
    assert cli.main(["merge", "gs://b/part1", "gs://b/part2", "--out", "gs://b/whole"]) == 0
    assert evaluate("gs://b/data/pairs.jsonl", "gs://b/whole") == 0
    assert without_times(below("gs://b/whole")) == without_times(below("gs://b/runs/c"))
    assert not (tmp_path / "gs:").exists()
    with pytest.raises(RunError, match="gs://b/inner: a URL of object storage"):
        inner_evaluate("baseline:length", str(write(tmp_path)), out="gs://b/inner", progress=False)

    settings = localised(TrainSettings(model="scratch", data="gs://b/data/pairs.jsonl"))
    assert Path(settings.data or "").read_bytes() == DATA


def write(folder: Path) -> Path:
    (folder / "pairs.jsonl").write_bytes(DATA)
    return folder / "pairs.jsonl"


def test_where_a_url_may_stand(tmp_path, store):
    put("gs://b/d/p.jsonl", b"1")
    put("gs://b/d/q.jsonl", b"2")
    p, q = localised("gs://b/d/p.jsonl"), localised("gs://b/d/q.jsonl")
    assert (Path(p).name, Path(p).read_bytes(), Path(q).read_bytes()) == ("p.jsonl", b"1", b"2")
    table = {
        "rewardbench:gs://b/d/p.jsonl": f"rewardbench:{p}",
        "gs://b/d/p.jsonl?user_id=voter": f"{p}?user_id=voter",
        "data=gs://b/d/p.jsonl,gs://b/d/q.jsonl": f"data={p},{q}",
        'data=["gs://b/d/p.jsonl", "s3://b/d/q.jsonl"]': f'data=["{p}", "{localised("s3://b/d/q.jsonl")}"]',
        "https://example.org/gs://b": "https://example.org/gs://b",
        "org/name": "org/name",
    }
    for text, expected in table.items():
        assert localised(text) == expected
        assert shown(localised(text)) == text
    assert localised(Path("gs://b/d/p.jsonl")) == Path(p)
    assert localised(["gs://b/d/p.jsonl", "x"]) == [p, "x"]
    assert localised("gs://b/d/p.jsonl") == p  # not fetched twice: its version is the same
    put("gs://b/d/p.jsonl", b"3")
    assert Path(localised("gs://b/d/p.jsonl")).read_bytes() == b"3"
    question = prb.Comparison(id="1", question="gs://b/d/p.jsonl", responses=["a", "b"])
    assert localised(question) is question
    assert localised([question]) == [question]
    assert not names_url(dataclasses.asdict(question))
    assert not names_url(None)
    assert localised("gs://b/d/p.jsonl").startswith(str(tmp_path))
    assert pickle.loads(pickle.dumps(prb.evaluate)) is prb.evaluate


def test_an_input_that_is_changed_while_it_is_fetched_is_of_one_version(tmp_path, store):
    put("gs://b/d/p.jsonl", b"old")
    changes = [b"new", b"newest"]

    def change(request: str, path: str) -> None:
        if request == "after cat" and changes:
            put("gs://b/d/p.jsonl", changes.pop(0))

    store.fail = staticmethod(change)
    assert Path(localised("gs://b/d/p.jsonl")).read_bytes() == b"newest"
    changes[:] = [b"1", b"2"]
    assert (Path(localised("gs://b/d")) / "p.jsonl").read_bytes() == b"2"


def test_what_cannot_be_done_is_said_in_one_line(tmp_path, store, monkeypatch, capsys):
    put("gs://b/data/pairs.jsonl", DATA)
    data, length = "gs://b/data/pairs.jsonl", "evaluate baseline:length --data"
    parts, every = "model=x data=y --distributed --out gs://b/t", "--distributed: every process of"
    table = {
        "gs://b/none: no such object, and none below it": f"{length} gs://b/none --out {tmp_path}/out",
        "gs://b: names only a bucket; expected gs://b/NAME": f"{length} {data} --out gs://b",
        f"{data}: the output folder is a file": f"{length} {data} --out {data}",
        "audit: gs://b/audit: its judgements are a database": "audit gs://b/audit",
        f"{every} prb train writes a part": f"train bt_user_blind {parts}",
        f"{every} prb ppo writes a part": f"ppo x {parts}",
    }
    before = contents()
    for message, words in table.items():
        assert cli.main(words.split()) == 2
        assert f"prb: error: {message}" in capsys.readouterr().err
    assert contents() == before
    with pytest.raises(prb.RunError, match="gs://b/none: no such object"):
        prb.read_comparisons("gs://b/none")

    monkeypatch.setenv("PRB_JAX_PUSH_SECONDS", "often")
    with pytest.raises(RunError, match="PRB_JAX_PUSH_SECONDS: expected a number of seconds"), session():
        localised("gs://b/out", output=True)

    def lacking(name: str, **options: object) -> None:
        raise ImportError("No module named 'gcsfs'")

    monkeypatch.setattr(fsspec, "filesystem", lacking)
    no_package = r"needs gcsfs, which is not installed: pip install 'prb-jax\[storage\]'"
    with pytest.raises(RunError, match=no_package):
        localised("gs://b/data/pairs.jsonl")


def test_local_copies_are_in_the_cache(monkeypatch):
    for name in ("PRB_JAX_STORAGE", "PRB_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert urls.storage_folder() == Path("/c/prb_jax/storage")
    monkeypatch.setenv("PRB_JAX_CACHE", "/own")
    assert urls.storage_folder() == Path("/own/storage")
    monkeypatch.setenv("PRB_JAX_STORAGE", "/scratch")
    assert urls.storage_folder() == Path("/scratch")
