"""`prb split`: parts without a common user, or a common question."""

from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.errors import DataError, RunError
from tests import plain_process
from tests.json_lines import read_lines, write_lines

PARTS = ("train", "validation", "test")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {
            "id": f"c{i}", "user_id": f"u{i * 7 % 40}", "question": "Q" * (i % 2) + f" question  {i * 11 % 60}?",
            "chosen": "a", "rejected": "b", "meta": {"kept": i},
        }
        for i in range(400)
    ]  # fmt: skip
    return Path(write_lines(tmp_path / "pairs.jsonl", rows))


def read(folder: Path, part: str) -> list[dict]:
    return read_lines(folder / f"{part}.jsonl")


def key(row: dict, by: str) -> str:
    return row["user_id"] if by == "user" else " ".join(row["question"].casefold().split())


@pytest.mark.parametrize("by", ["user", "question"])
def test_a_process_writes_disjoint_parts_that_hold_everything(data: Path, tmp_path: Path, by: str) -> None:
    out = tmp_path / "parts"
    done = plain_process.prb("split", "--by", by, "--data", data, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    parts = {part: read(out, part) for part in PARTS}
    rows = read_lines(data)
    by_id = {row["id"]: row for part in parts.values() for row in part}
    assert sum(map(len, parts.values())) == len(by_id) == 400
    assert [by_id[row["id"]] for row in rows] == rows  # with fields that are not in the schema
    groups = [{key(row, by) for row in part} for part in parts.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    for part, share in zip(parts.values(), (0.8, 0.1, 0.1)):
        assert abs(len(part) / 400 - share) < 0.05
        assert [row["meta"]["kept"] for row in part] == sorted(row["meta"]["kept"] for row in part)
    other = "question" if by == "user" else "user"
    inside = [{key(row, other) for row in part} for part in parts.values()]
    shared = sum(sum(name in names for names in inside) - 1 for name in set().union(*inside))
    assert f"no {by} is in two parts; {shared} {other}s are" in done.stdout
    assert "No " + by in (out / "README.md").read_text()
    assert [comparison.id for comparison in prb.read_comparisons(out)] == [row["id"] for row in parts["test"]]
    assert len(prb.read_comparisons(out, split="train")) == len(parts["train"])


def test_the_seed_alone_decides(data: Path, tmp_path: Path) -> None:
    def parts(name: str, **options) -> list[list[str]]:
        made = prb.split(data, by="user", out=tmp_path / name, **options)
        return [sorted({row["user_id"] for row in read(made.folder, part)}) for part in made.parts]

    first = parts("a")
    assert parts("a") == parts("b") == first  # again into the same folder too
    assert parts("c", seed=1) != first
    data.write_text("".join(reversed(data.read_text().splitlines(keepends=True))))
    assert parts("d") == first
    halves = prb.split(data, by="user", out=tmp_path / "e", parts={"left": 0.5, "right": 0.5})
    assert [part.comparisons for part in halves.parts.values()] == [200, 200]
    assert [part.users for part in halves.parts.values()] == [20, 20]
    with pytest.raises(RunError, match=r"train\.jsonl: exists already with other contents"):
        prb.split(data, by="user", out=tmp_path / "a", seed=1)


def test_what_cannot_be_split(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(message: str, **options) -> None:
        with pytest.raises(DataError, match=message):
            prb.split(**({"data": data, "by": "user", "out": tmp_path / "x"} | options))

    refused("expected shares that are 1 together, found 0.9", parts={"train": 0.5, "test": 0.4})
    refused("part 'a/b': expected a name", parts={"a/b": 1.0})
    refused("part train: expected a share above 0", parts={"train": 0.0, "test": 1.0})
    refused("by: expected user or question, found 'topic'", by="topic")
    one, other, *_ = read_lines(data)
    few = write_lines(tmp_path / "few.jsonl", [one, other])
    refused("part validation would be empty: 2 users with 2 comparisons are too few", data=few)
    write_lines(tmp_path / "few.jsonl", [one, other | {"user_id": None}])
    refused(r"few\.jsonl:2: field 'user_id': missing", data=few)
    assert not (tmp_path / "x").exists()
    command = ["split", "--by", "user", "--data", str(data), "--out", str(tmp_path / "x"), "--parts"]
    for words, said in ((["train"], "expected PART=SHARE"), (["a=0.5", "a=0.5"], "named twice")):
        with pytest.raises(SystemExit):
            cli.main([*command, *words])
        assert said in capsys.readouterr().err
