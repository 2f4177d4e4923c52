"""A run in parts, merged, has the bytes of a run in one piece, also where a part was killed."""

import json
import random
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import RunError, cli, evaluate
from prb_jax.scoring.run import EvaluationFolder
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import read_json
from tests.scoring.slow_scorer import SlowScorer, comparisons
from tests.sweeps import sweep
from tests.tiny_models import write_model_without_torch
from tests.tiny_policies import write_policy
from tests.tiny_tokenizer import write_tokenizer

SAME = ("scores.jsonl", "summary.json", "users.csv", "clusters.jsonl")


def bytes_of(folder: Path) -> dict[str, bytes]:
    names = (*SAME, "controls/blind/scores.jsonl", "controls/blind/summary.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(write_model_without_torch(folder, "qwen3", vocab_size=512))
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, "qwen3", eos=1)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs of unequal lengths, in several windows of batches' members."""
    rng = random.Random(0)
    words = ["tea", "milk", "sugar", "please", "never", "always", "cake", "green", "black"]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 30)))

    rows = [
        {
            "id": number, "question": text(), "chosen": text() + " yes", "rejected": text() + " no",
            "user_id": f"u{number % 9}", "profile": [{"text": f"{number % 9} {words[number % 9]}"}],
        }
        for number in range(120)
    ]  # fmt: skip
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def test_four_parts_merged_by_the_command_are_one_run(model, data, tmp_path, capsys, monkeypatch):
    words = ["evaluate", str(model), "--data", data, "--limit", "60", "--batch-tokens", "512"]
    words += ["--dtype", "float32"]
    assert cli.main([*words, "--out", str(tmp_path / "whole")]) == 0
    parts = [str(tmp_path / f"part{number}") for number in range(1, 5)]
    for number, part in enumerate(parts, start=1):
        assert cli.main([*words, "--part", f"{number}/4", "--out", part]) == 0
        assert not (Path(part) / "summary.json").exists()
    sizes = [read_json(Path(part) / "part.json")["rows"] for part in parts]
    assert sum(sizes) == 60
    assert max(sizes) < 40
    killed = Path(parts[2])
    kill(killed)
    merging = ["merge", *reversed(parts), "--out", str(tmp_path / "merged")]
    assert cli.main(merging) == 2
    assert f"{killed}: part 3/4 is not finished: repeat its command" in capsys.readouterr().err
    assert cli.main([*words, "--part", "3/4", "--out", str(killed)]) == 0
    assert cli.main(merging) == 0
    finishing = [*words, "--out", str(tmp_path / "merged")]
    assert shlex.join(["prb", *finishing]) in capsys.readouterr().out
    computed = []
    monkeypatch.setattr(EvaluationFolder, "append_computed", lambda self, **batch: computed.append(batch))
    assert cli.main(finishing) == 0
    assert not computed
    whole = bytes_of(tmp_path / "whole")
    assert len(whole) >= 5
    assert bytes_of(tmp_path / "merged") == whole
    records = [read_json(tmp_path / name / "run.json") for name in ("whole", "merged")]
    for field in ("inputs", "computed_tokens"):
        assert records[0][field] == records[1][field]
    for again in (merging, finishing):  # once more changes nothing
        assert cli.main(again) == 0
        assert bytes_of(tmp_path / "merged") == whole


def kill(part: Path) -> None:
    """Leave a part as if it had been killed: half of its rows and the mark are gone; its command continues it."""
    lines = (part / "scores.jsonl").read_bytes().splitlines(keepends=True)
    (part / "scores.jsonl").write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"id": "torn')
    (part / "part.json").unlink()


def test_parts_from_python_are_finished_by_the_same_call(tmp_path):
    items = comparisons(61)
    evaluate(SlowScorer(), items, out=tmp_path / "whole", progress=False)
    parts = [tmp_path / f"part{number}" for number in range(1, 8)]
    scored: list[set[int]] = []
    for number, part in enumerate(parts, start=1):
        scorer = SlowScorer()
        result = evaluate(scorer, items, out=part, part=f"{number}/7", progress=False)
        assert result.summary == {"model": "slow", "part": f"{number}/7", "n": len(scorer.scored)}
        assert len(result.rows) == len(scorer.scored)
        scored.append(set(scorer.scored))
    assert all(not a & b for a, b in pairwise([*scored, scored[0]]))
    kill(parts[3])
    again = SlowScorer()
    evaluate(again, items, out=parts[3], part="4/7", progress=False)
    assert set(again.scored) == scored[3]  # the one batch that was torn
    prb.merge(parts, out=tmp_path / "merged")
    finishing = SlowScorer()
    evaluate(finishing, items, out=tmp_path / "merged", progress=False)
    assert not finishing.scored
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("verb", "files", "arguments"),
    sweep(
        [
            (
                "judge",
                "judgements.jsonl scores.jsonl summary.json users.csv",
                "--controls blind --min-mass 0",
            ),
            ("sample", "samples.jsonl summary.json", "--rows 2 --n 2 --temperature 0.9 --max-new-tokens 6"),
            (
                "features",
                "features.json answers.keys.npy posts-000000.npy rewards-000000.npy",
                "--file-rows 16",
            ),
        ],
        few=(1, 2),
    ),
)
def test_parts_of_other_verbs(verb, files, arguments, policy, model, data, tmp_path, monkeypatch):
    """The merged folder has the files of a run in one piece, nothing is computed twice, and a kill costs nothing."""
    monkeypatch.setattr("prb_jax.behaviour.judges.scorer.TOGETHER", 8)
    files, opened = files.split(), str(model if verb == "features" else policy)
    words = [verb, opened, "--data", data, "--limit", "36", "--dtype", "float32", "--no-progress"]
    words += arguments.split()
    assert cli.main([*words, "--out", str(tmp_path / "whole")]) == 0
    parts = [str(tmp_path / f"part{number}") for number in (1, 2, 3)]
    for number, part in enumerate(parts, start=1):
        assert cli.main([*words, "--part", f"{number}/3", "--out", part]) == 0
        assert not (Path(part) / files[1]).exists() or verb == "judge"
    done = [read_json(Path(part) / "part.json")["rows"] for part in parts]
    assert all(0 < rows < sum(done) for rows in done)
    # The merge was killed before its record was whole: it is repeated.
    merged = tmp_path / "merged"
    prb.merge(parts, out=merged)
    record = read_json(merged / "run.json")
    (merged / "run.json").write_text(json.dumps(record | {"merging": True}))
    for path in merged.glob("*.jsonl"):
        path.unlink()
    before = {path: path.read_bytes() for part in parts for path in Path(part).glob("*") if path.is_file()}
    for _ in range(2):  # once more changes nothing
        assert cli.main(["merge", *parts[::-1], "--out", str(merged)]) == 0
        assert cli.main([*words, "--out", str(merged)]) == 0
        for name in (*files, *("controls/blind/scores.jsonl" for _ in range(verb == "judge"))):
            assert (merged / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert before == {path: path.read_bytes() for path in before}
    assert read_json(merged / "run.json")["inputs"] == record["inputs"]
    with pytest.raises(RunError, match="holds this run, but not merged from parts"):
        prb.merge(parts, out=tmp_path / "whole")


def test_what_is_no_part_is_refused(tmp_path):
    def run(name, part=None, weights="sha256:0"):
        scorer = SlowScorer(weights=weights)
        return evaluate(scorer, comparisons(20), out=tmp_path / name, part=part, progress=False).out

    p1, p2, foreign = (run(f"p{number}", f"{number}/3") for number in (1, 2, 3))
    whole, other = run("whole"), run("other", "3/3", weights="sha256:1")
    (foreign / "part.json").write_text(
        '{"part": "3/3", "rows": 1, "rows_of_all": 20, "files": ["../scores.jsonl"]}'
    )
    for parts, message in (
        ([p1, p2], "part 3/3 is missing: 2 of 3 parts are given"),
        ([p1, shutil.copytree(p1, tmp_path / "copy")], "copy: holds part 1/3, but so does .*p1"),
        ([p1, p2, whole], "whole: not a part of a run"),
        ([p1, p2, other], "other holds another run; .*weights"),
        ([], "found none"),
        ([p1, p2, foreign], r"p3/part.json: files: expected names .* found '../scores.jsonl"),
    ):
        with pytest.raises(RunError, match=f"(?s){message}"):
            prb.merge(parts, out=tmp_path / "merged")
    with pytest.raises(RunError, match='part: "1/3" -> "2/3"'):
        run("p1", "2/3")
    for part in ("0/3", "4/3", "2", "1/3/3", ""):
        with pytest.raises(RunError, match=r"part: expected I/N with 1 <= I <= N, e\.g\. 2/7, found"):
            run("new", part)
    with pytest.raises(RunError, match="part: requires out"):
        evaluate(SlowScorer(), comparisons(20), part="1/3", progress=False)


def test_merging_opens_nothing_and_names_the_part_that_lacks_rows(tmp_path, monkeypatch, capsys):
    """Not the model, not the data, no endpoint; and what is begun is removed."""
    monkeypatch.chdir(tmp_path)
    data = write_lines(Path("pairs.jsonl"), [one.to_row() for one in comparisons(20)])
    registers = "import prb_jax\nprb_jax.register_plugin('rewards', 'calm', lambda c: [1, 0])\n"
    (tmp_path / "calm.py").write_text(registers)
    words = ["evaluate", "plugin:calm", "--data", data, "--import", "calm.py"]
    for number in (1, 2):
        assert cli.main([*words, "--part", f"{number}/2", "--out", f"p{number}"]) == 0
    assert cli.main([*words, "--out", "whole"]) == 0
    for name in ("calm.py", "pairs.jsonl"):
        Path(name).rename(f"gone {name}")
    assert cli.main(["merge", "p1", "p2", "--out", "merged"]) == 0
    assert shlex.join(["prb", *words, "--out", "merged"]) in capsys.readouterr().out
    assert {row["id"] for row in read_lines(Path("merged/scores.jsonl"))} == {
        one.id for one in comparisons(20)
    }
    assert not Path("merged/summary.json").exists()
    for name in ("calm.py", "pairs.jsonl"):
        Path(f"gone {name}").rename(name)
    assert cli.main([*words, "--out", "merged"]) == 0
    assert bytes_of(Path("merged")) == bytes_of(Path("whole"))

    part, scores = read_json(Path("p2/part.json")), Path("p2/scores.jsonl").read_text()
    earlier = {name: part[name] for name in ("part", "rows", "files")}
    line = scores.splitlines(keepends=True)[0]
    capsys.readouterr()
    for record, text, message in (
        (part, scores.removeprefix(line), "p2/scores.jsonl: is not the file that the run wrote"),
        (
            part | {"digests": {}},
            scores.removeprefix(line),
            f"part 2/2 has {part['rows'] - 1} rows, expected",
        ),
        (part | {"rows_of_all": 21}, scores, "p2: is a part of 21 rows, but p1 of 20"),
        (part | {"rows": "7"}, scores, "p2/part.json: field 'rows': expected a whole number, found '7'"),
        (part | {"files": ["summary.json"]}, scores, "expected names of row files"),
        (
            part | {"digests": {}},
            scores.replace(line, "[1]\n"),
            "p2/scores.jsonl:1: not a row: expected an object",
        ),
        (earlier, scores, "p2: is a part of None rows, but p1 of 20"),
    ):
        Path("p2/part.json").write_text(json.dumps(record))
        Path("p2/scores.jsonl").write_text(text)
        assert cli.main(["merge", "p1", "p2", "--out", "broken"]) == 2
        assert message in capsys.readouterr().err
        assert not Path("broken").exists()
    Path("p2/scores.jsonl").write_text(scores)
    for place in (Path("p1"), Path("p2")):  # parts of an earlier version
        said = read_json(place / "part.json")
        (place / "part.json").write_text(json.dumps({name: said[name] for name in earlier}))
    assert cli.main(["merge", "p1", "p2", "--out", "earlier"]) == 0
    record = json.loads(Path("p2/run.json").read_text())
    Path("p2/run.json").write_text(json.dumps(record | {"sessions": 7}))
    assert cli.main(["merge", "p1", "p2", "--out", "broken"]) == 2
    assert "p2/run.json: field 'sessions': expected a list, found 7" in capsys.readouterr().err
    assert not Path("broken").exists()
