"""Comparisons whose two sides are the same tokens after the template: counted and named, in evaluation and training."""

from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.training.train import train
from prb_jax.trees.tree import EqualSides, build_tree, has_equal_sides
from tests import tiny_tokenizer as tiny
from tests.json_lines import read_lines, write_lines
from tests.scoring.records import read_json, write_model
from tests.training.tiny import config, rows

TRIMMED = tiny.CHAT.replace("message['content']", "message['content'] | trim")
PAIRS = [
    {"id": "t1", "question": "Tea?", "chosen": "Yes.", "rejected": "Yes.\n\n"},
    {"id": "t2", "question": "Tea?", "chosen": "Yes.", "rejected": "Yes."},
    {"id": "t3", "question": "Tea?", "chosen": "Yes.", "rejected": "No."},
    # equal ones with one label are no fault, an equal one with another label is
    {"id": "k1", "question": "Tea?", "responses": ["Yes.", "No.", "No. "], "labels": [1, 0, 0]},
    {"id": "k2", "question": "Tea?", "responses": ["Yes.", "No.", " Yes."], "labels": [1, 0, 0]},
]
EQUAL = {"comparisons": 3, "ids": ["t1", "t2", "k2"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert TRIMMED != tiny.CHAT
    return write_model(tmp_path_factory.mktemp("model"), "qwen3", template=TRIMMED, num_hidden_layers=1)


def test_equal_responses_of_a_tree() -> None:
    tree = build_tree([[1, 2, 3], [1, 2], [1, 2, 3], [1, 2]])
    assert tree.equal_to == (0, 1, 0, 1)
    assert build_tree([[1, 2, 3], [1, 2, 3]], read=[2, 1]).equal_to == (0, 1)  # read at another token
    assert has_equal_sides(tree.equal_to, [1, 1, 0, 0])
    assert not has_equal_sides(tree.equal_to, [1, 0, 1, 0])
    assert not has_equal_sides((0, 1), [1, 0])
    assert EqualSides.of([]) is None
    told = str(EqualSides.of(f"c{number}" for number in range(5000)))
    assert told == "5,000 comparisons with the same tokens on both sides ('c0', 'c1', 'c2' and 4,997 more)"


@pytest.mark.parametrize("tokens", [64, 4096])
def test_an_evaluation_counts_and_names_them(
    model: Path, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "x.jsonl", PAIRS)
    command = [
        "evaluate",
        str(model),
        "--data",
        str(data),
        "--batch-tokens",
        str(tokens),
        "--no-progress",
        "--out",
    ]
    for _ in range(2):  # the second time the run is finished already
        assert cli.main([*command, str(tmp_path / "run")]) == 0
        told = "3 comparisons with the same tokens on both sides ('t1', 't2', 'k2'): no model can win them"
        assert told in " ".join(capsys.readouterr().out.split())
        summary = read_json(tmp_path / "run" / "summary.json")
        assert summary["equal_after_template"] == EQUAL
        wins = [
            row["id"]
            for row in read_lines(tmp_path / "run" / "scores.jsonl")
            if row["scores"][0] > max(row["scores"][1:])
        ]
        assert not set(wins) & set(EQUAL["ids"])
        assert "equal_after_template" in summary["definitions"]
    page = prb.report(tmp_path / "run", out=tmp_path / "page.html").read_text()
    assert "comparisons with the same tokens on both sides" in page
    parts = [str(tmp_path / f"part{number}") for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        assert cli.main([*command, part, "--part", f"{number}/2"]) == 0
    assert cli.main(["merge", *parts, "--out", str(tmp_path / "merged")]) == 0
    assert cli.main([*command, str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "summary.json").read_bytes() == (
        tmp_path / "run" / "summary.json"
    ).read_bytes()


def test_there_are_none_where_the_template_keeps_them_apart(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    summary = prb.evaluate(model, [PAIRS[0], PAIRS[2]], progress=False).summary
    assert "equal_after_template" not in summary


def test_training_counts_and_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", "qwen3", template=TRIMMED, num_hidden_layers=1)
    data = write_lines(tmp_path / "x.jsonl", [*rows(8), PAIRS[0], PAIRS[2], PAIRS[4]])
    settings = config(model, data, tuning="head", steps=1, validation__fraction=0.0)
    summary = train(settings, out=tmp_path / "run", progress=False).summary
    assert summary is not None
    assert summary["equal_after_template"] == {"comparisons": 2, "ids": ["t1", "k2"]}
    told = "2 comparisons with the same tokens on both sides ('t1', 'k2'), of which nothing can be learned"
    assert told in " ".join(capsys.readouterr().err.split())


def test_the_shared_pairs(model: Path) -> None:
    cases = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases" / "equal_after_template.jsonl"
    if not cases.is_file():
        pytest.skip(f"no pairs at {cases}")
    assert [row["id"] for row in read_lines(cases)] == ["t1", "t2", "t3"]
    summary = prb.evaluate(model, cases, progress=False).summary
    assert summary["equal_after_template"] == {"comparisons": 2, "ids": ["t1", "t2"]}
