"""Prompts that a chat template has rendered already are known by its marks, and told once."""

import warnings
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax.records import lines as json_lines
from prb_jax.records.template_marks import template_mark, without_end_marks
from prb_jax.training.config import default_config, load_settings
from prb_jax.training.data import read_training_data
from tests.json_lines import write_lines

RENDERED = {
    "<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\n": "<|im_start|>",
    "<s>[INST] Tea? [/INST]": "[INST]",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTea?": "<|start_header_id|>",
    "<start_of_turn>user\nTea?<end_of_turn>\n<start_of_turn>model\n": "<start_of_turn>",
    "<|turn>user\nTea?<turn|>\n<|turn>model\n": "<|turn>",
    "\n\nHuman: Tea?\n\nAssistant:": "Human: ... Assistant:",
    "\n\nHuman: Tea?\n\nAssistant: Yes.\n\nHuman: Why?\n\nAssistant: ": "Human: ... Assistant:",
    "A chat between a user and an assistant. USER: Tea? ASSISTANT:": "USER: ... ASSISTANT:",
    "### Instruction:\nTea?\n\n### Response:\n": "### Instruction: ... ### Response:",
    "Below is an instruction that describes a task. Write a response.\n\n### Instruction:\nTea?\n\n### Response:": (
        "### Instruction: ... ### Response:"
    ),
}
PLAIN = (
    "Tea?", "Write a dialogue with Human: and Assistant: in it.", "What is Assistant:", "Is a[1] < b?", "Human: me",
    "What does <|endoftext|> mean?", "Continue the dialogue:\n\nHuman: Tea?\n\nAssistant:",
)  # fmt: skip


def test_marks():
    assert {text: template_mark(text) for text in RENDERED} == RENDERED
    assert {template_mark(text) for text in PLAIN} == {None}
    assert without_end_marks("Tea.<|im_end|>\n<|endoftext|> ") == "Tea."


def told(read):
    """The warnings of one reading that speak of rendered prompts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return [str(one.message) for one in caught if "rendered by a chat template" in str(one.message)]


def evaluated(data):
    return told(lambda: prb.evaluate("baseline:length", data, progress=False))


def trained(data):
    return told(lambda: read_training_data(load_settings(default_config(), ["model=m", f"data={data}"])))


@pytest.mark.parametrize("read", [evaluated, trained])
@pytest.mark.parametrize("large", [False, True])
def test_rendered_prompts_are_told_once_with_mark_row_and_count(read, large, tmp_path, monkeypatch):
    prompts = [*PLAIN, *RENDERED]
    rows = [
        {"id": i, "user_id": f"u{i}", "prompt": text, "chosen": "a", "rejected": "b"}
        for i, text in enumerate(prompts)
    ]
    rows += [{"id": "m", "prompt": [{"role": "user", "content": "Tea?"}], "chosen": "a", "rejected": "b"}]
    data = write_lines(tmp_path / "x.jsonl", rows)
    if large:
        monkeypatch.setattr(json_lines, "LARGE", 1)
    (text,) = read(data)
    assert text.startswith(
        f"field 'prompt': {len(RENDERED)} of {len(rows)} are rendered by a chat template already (the first, "
        f"{data}:{len(PLAIN) + 1} holds '<|im_start|>')"
    )
    assert (
        read(
            write_lines(
                tmp_path / "y.jsonl",
                [row for row in rows if isinstance(row["prompt"], list) or row["prompt"] not in RENDERED],
            )
        )
        == []
    )


def test_the_shared_prompts():
    cases = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases" / "rendered_prompts.jsonl"
    if not cases.is_file():
        pytest.skip(f"no prompts at {cases}")
    (text,) = evaluated(cases)
    assert (
        f"2 of 2 are rendered by a chat template already (the first, {cases}:1 holds '<|im_start|>')" in text
    )
