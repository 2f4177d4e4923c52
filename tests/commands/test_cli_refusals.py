"""What is wrong with a model, its mesh or a record is one line on the command line, and leaves nothing behind."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from prb_jax import cli
from tests.scoring.records import write_model
from tests.tiny_tokenizer import NO_SYSTEM

ROWS = [
    {"id": "a", "user_id": "u", "question": "Tea?", "chosen": "Green tea.", "rejected": "No."},
    {"id": "b", "user_id": "u", "question": "Rain? " * 50, "chosen": "Yes.", "rejected": "No rain."},
]


def configured(**changes: object) -> Callable[[Path, Path], list[str]]:
    def change(model: Path, data: Path) -> list[str]:
        raw = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(raw))
        return []

    return change


def truncated(model: Path, data: Path) -> list[str]:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1000])
    return []


def pickled(model: Path, data: Path) -> list[str]:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    return []


def without_weights(model: Path, data: Path) -> list[str]:
    (model / "model.safetensors").unlink()
    return []


def relabelled(model: Path, data: Path) -> list[str]:
    configured(num_labels=3, id2label=None, label2id=None)(model, data)
    return ["--readout", "first-logit"]


def rows(*changed: dict[str, object]) -> Callable[[Path, Path], list[str]]:
    def change(model: Path, data: Path) -> list[str]:
        data.write_text("".join(json.dumps(row) + "\n" for row in changed))
        return []

    return change


def options(*words: str) -> Callable[[Path, Path], list[str]]:
    return lambda model, data: list(words)


def gone(model: Path, data: Path) -> list[str]:
    data.unlink()
    return []


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model") / "tiny", "llama", template=NO_SYSTEM, num_hidden_layers=1
    )


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in intact.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tea?"}]
REFUSED: dict[str, tuple[Callable[[Path, Path], list[str]], tuple[str, ...]]] = {
    "architecture": (configured(model_type="mamba"), ("config.json", "unknown architecture", "'mamba'")),
    "causal model": (configured(architectures=["LlamaForCausalLM"]), ("causal language model",)),
    "rope": (configured(rope_parameters={"rope_type": "longrope"}), ("config.json", "rope_type", "longrope")),
    "truncated weights": (truncated, ("model.safetensors", "truncated")),
    "pickled weights": (pickled, ("pytorch_model.bin", "safetensors")),
    "no weights": (without_weights, ("safetensors",)),
    "wrong shape": (configured(vocab_size=401), ("embed_tokens.weight", "[401, 64]", "[400, 64]")),
    "labels": (relabelled, ("score.weight", "[3, 64]", "[1, 64]")),
    "mesh axis": (options("--mesh", "model=2"), ("mesh 'model=2'", "unknown axis 'model'")),
    "mesh size": (options("--mesh", "tensor=3"), ("takes 3 devices, but 1 are present",)),
    "length": (options("--max-length", "5000"), ("max_length 5000", "4096")),
    "readout": (options("--readout", "last-softmax"), ("needs several labels",)),
    "response beyond the limit": (options("--max-length", "8"), ("comparison 'a'", "responses are never cut")),
    "refused by the template": (
        rows(ROWS[0], {"id": "s", "prompt": SYSTEM, "chosen": "Tea.", "rejected": "No."}),
        ("comparison 's'", "System role not supported"),
    ),
    "one response": (
        rows({"id": "x", "question": "?", "responses": ["a"], "labels": [1]}),
        ("pairs.jsonl:1:", "'responses'"),
    ),
    "duplicate ids": (rows(ROWS[0], ROWS[0]), ("pairs.jsonl:2", "'a'", "already used at", "pairs.jsonl:1")),
    "empty response": (rows(ROWS[0] | {"rejected": ""}), ("pairs.jsonl:1:", "'rejected'", "empty")),
    "no data": (gone, ("pairs.jsonl",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_and_nothing_left_behind(name: str, model: Path, tmp_path: Path, capsys) -> None:
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spoil, words = REFUSED[name]
    extra = spoil(model, data)
    capsys.readouterr()
    command = ["evaluate", str(model), "--data", str(data), "--out", str(out), "--no-progress", *extra]
    assert cli.main(command) == 2
    error = capsys.readouterr().err.strip()
    last = error.splitlines()[-1]
    assert last.startswith("prb: error: ")
    assert "Traceback" not in error
    for word in words:
        assert word in last
    # What a later attempt could not use is not there; an early refusal leaves no folder at all.
    assert not (out / "scores.jsonl").exists() or (out / "scores.jsonl").read_bytes() == b""
    assert not (out / "summary.json").exists()


def test_the_intact_model_is_scored(model: Path, tmp_path: Path, capsys) -> None:
    """So that each refusal above has its one cause; a prompt beyond the limit is cut and reported."""
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["evaluate", str(model), "--data", str(data), "--out", str(out), "--max-length", "60"]
    assert cli.main(command) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["n"] == 2
    rows_ = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert [bool(row["truncated"]) for row in rows_] == [False, True]
