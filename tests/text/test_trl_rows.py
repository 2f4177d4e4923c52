"""`prb convert --data FILE --to trl`: TRL's own code reads the rows as they are scored here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

import prb_jax as prb
from prb_jax import cli
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.view import View
from tests import tiny_tokenizer as tiny
from tests.json_lines import read_lines, write_lines

USER, SYSTEM = {"role": "user", "content": "Tea?"}, {"role": "system", "content": "Be brief."}
GOOD, BAD = {"role": "assistant", "content": "Green."}, {"role": "assistant", "content": "None."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Tea"}, {"type": "text", "text": "?"}]}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "kettle", "arguments": {"cups": 1}}}],
}
ROWS: list[dict[str, Any]] = [
    {"question": "Tea?", "chosen": "Green.", "rejected": "None.", "user_id": "u", "profile": ["I like tea."]},
    {"prompt": [SYSTEM, USER], "chosen": "Green.", "rejected": "None.", "margin": 2.0, "narrative": "SECRET"},
    {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]},
    {"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": [USER], "chosen": [CALL], "rejected": [BAD], "tools": [{"name": "kettle"}]},
    {"prompt": [PARTS], "chosen": "Green.", "rejected": "None."},
    {
        "prompt": "<|start|>user\nTea?<|end|>",
        "chosen": "Green.<|end|>",
        "rejected": "No.<|end|>",
        "rendered": True,
    },
]
DATA = [row | {"id": f"c{k}"} for k, row in enumerate(ROWS)]


@pytest.mark.filterwarnings("ignore")  # of torch, which TRL imports
def test_trl_tokenises_the_rows_as_they_are_scored(tmp_path: Path) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.WITH_TOOLS))
    prepare: Any = RewardTrainer._prepare_dataset
    options = SimpleNamespace(dataset_num_proc=None, max_length=None)
    with_prompt = [row for row in DATA if row["id"] != "c3"]  # c3 has no common first message
    for posts, data in ((0, DATA), (0, with_prompt), (1, DATA[:5]), (1, with_prompt[:4])):
        shown = prb.read_comparisons(data)  # rendered text, the last record, has no place for posts
        rows = list(prb.trl_rows(iter(data), profile_posts=posts))
        trees = encode_comparisons(shown, chat, view=View(posts))
        assert [row["id"] for row in rows] == [one.id for one in shown]
        assert {"prompt" in row for row in rows} == {data[3]["id"] != "c3"}
        for row, tree in zip(rows, trees, strict=True):
            table = Dataset.from_list([row])
            read = prepare(SimpleNamespace(), table, chat.tokenizer, options, "train")
            ids = [tree.sequence(k).tolist() for k in (0, 1)]
            assert [read[0]["chosen_ids"], read[0]["rejected_ids"]] == ids
    assert [row.keys() - {"id", "prompt", "chosen", "rejected"} for row in prb.trl_rows(DATA)] == [
        {"user_id", "profile"}, {"margin"}, set(), set(), {"tools"}, set(), set(),
    ]  # fmt: skip


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several responses are a row for each two with different labels."""
    several = {"id": "m", "question": "Tea?", "responses": ["a", "b", "c"], "labels": [1, 3, 1]}
    data, out = write_lines(tmp_path / "x.jsonl", [DATA[0], several]), tmp_path / "trl.jsonl"
    command = ["convert", "--data", data, "--to", "trl"]
    assert cli.main([*command, "--profile-posts", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"written to {out}: 3 rows\n"
    rows = read_lines(out)
    assert [row["id"] for row in rows] == ["c0", "m#1-0", "m#1-2"]
    assert "I like tea." in rows[0]["prompt"][0]["content"]
    assert [rows[2][side][0]["content"] for side in ("chosen", "rejected")] == ["b", "c"]
    assert cli.main(command) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [
        "c0",
        "m#1-0",
        "m#1-2",
    ]
    for wrong, message in (
        (["--data", data], "--data: expected --to trl"),
        ([*command[1:], "--step", "3"], "--data: expected --to trl with it, found --step"),
        (["--to", "trl", "a", "b"], "--to: requires --data"),
    ):
        assert cli.main(["convert", *wrong]) == 2
        assert message in capsys.readouterr().err
