"""The judge as a task of Inspect, beside `prb judge` asking the same model; needs the extra `inspect`."""

from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.behaviour.judges.pairs import LETTER_TOKENS
from prb_jax.runs.harness_logs import read_run
from tests.behaviour.judges.stand_in import judged, stand_in
from tests.json_lines import read_lines, write_lines

inspect_ai = pytest.importorskip("inspect_ai", reason="needs the extra inspect")

from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402

TASK = Path(prb.__file__).parent / "behaviour" / "judges" / "inspect_task.py"
PAIRS = 48


def reply_to(text: str) -> str:
    """A judge that likes tea, is careless about A in some places, and sometimes says nothing of use."""
    a, _, b = text.partition("\n\nAnswer B:\n")
    if "silent" in text:
        return "I cannot tell."
    if "careless" in text:
        return "A"
    return "**A**" if ("tea" in a) > ("tea" in b.partition("\n\n")[0]) else "Verdict: B"


def write_pairs(path: Path) -> str:
    """Eight users judge the same six pairs."""
    rows = [
        {
            "id": f"c{i}",
            "question": f"What do I drink{', careless' if i % 5 == 0 else ', silent' if i % 7 == 0 else ''}? {i // 8}",
            "responses": [f"Green tea, {i // 8}.", f"Water, {i // 8}."],
            "labels": [1.0, 0.0] if i % 3 else [0.0, 1.0],
            "user_id": f"u{i % 8}",
            "profile": [{"id": "p", "text": f"I am u{i % 8}."}],
        }
        for i in range(PAIRS)
    ]
    return write_lines(path, rows)


def test_the_task_asks_and_reads_as_prb_judge(tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl")
    asked: list[str] = []

    def answer(messages: Any, tools: Any, choice: Any, config: Any) -> ModelOutput:
        (message,) = messages
        asked.append(message.text)
        assert (config.temperature, config.max_tokens) == (0.0, LETTER_TOKENS)
        output = ModelOutput.from_content("mockllm/model", reply_to(message.text))
        output.usage = ModelUsage()  # counting tokens would need the network
        return output

    (log,) = inspect_ai.eval(
        f"{TASK}@pairwise_judge",
        task_args={"data": data},
        model=get_model("mockllm/model", custom_outputs=answer),
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert log.status == "success", log.error
    with stand_in(lambda text, tries: reply_to(text)) as server:
        run = judged(server, data, tmp_path / "judge")
    seen = [body["messages"][0]["content"] for _, body in server.asked]
    assert sorted(asked) == sorted(seen)  # the same prompts in both orders
    read = read_run(log.location)
    right = {row.id.removeprefix("pairwise_judge/"): row.scores[0] == 1.0 for row in read.rows}
    assert right == {
        row["id"]: row["scores"][int(row["labels"][0] == 0)] > row["scores"][int(row["labels"][0] == 1)]
        for row in read_lines(tmp_path / "judge" / "scores.jsonl")
    }
    (accuracy,) = (log.results.scores[0].metrics["accuracy"].value,)
    assert accuracy == pytest.approx(run.summary["accuracy"])
    assert 0.2 < accuracy < 0.8
    assert read.summary["users"] == 8
    assert read.summary["ci95"] == pytest.approx(run.summary["ci95"])  # clustered by users and pairs
    assert read.clusters.responses is not None
    assert {sample.scores["preferred_in_both_orders"].value for sample in log.samples} == {"C", "I", "N"}
