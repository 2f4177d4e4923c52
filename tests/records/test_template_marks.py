"""Prompts that a chat template has rendered already are known by its marks, and told once."""

import warnings
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.records import files as json_lines
from prb_jax.records.template_marks import template_mark, without_end_marks
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.view import View
from prb_jax.training.config import default_config, load_settings
from prb_jax.training.data import read_training_data
from tests.json_lines import write_lines
from tests.tiny_tokenizer import write_tokenizer

RENDERED = {
    "<|im_start|>user\nTea?<|im_end|>\n<|im_start|>assistant\n": "<|im_start|>",
    "<s>[INST] Tea? [/INST]": "[INST]",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTea?": "<|start_header_id|>",
    "<start_of_turn>user\nTea?<end_of_turn>\n<start_of_turn>model\n": "<start_of_turn>",
    "<|turn>user\nTea?<turn|>\n<|turn>model\n": "<|turn>",
    "[gMASK]<sop><|user|>\nTea?<|assistant|>\n": "<|user|>",
    "<|im_system|>system<|im_middle|>a<|im_end|><|im_user|>user<|im_middle|>Tea?<|im_end|>": "<|im_user|>",
    "]~!b[]~b]system\na[e~[\n]~b]user\nTea?[e~[\n]~b]ai\n": "]~b]user",
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Tea?<|END_OF_TURN_TOKEN|>": "<|START_OF_TURN_TOKEN|>",
    "<SPECIAL_10>System\n\n<SPECIAL_11>User\nTea?\n<SPECIAL_11>Assistant\n": "<SPECIAL_11>User",
    "<extra_id_0>System\n\n<extra_id_1>User\nTea?\n<extra_id_1>Assistant\n": "<extra_id_1>User",
    "<seed:bos>user\nTea?<seed:eos><seed:bos>assistant\n": "<seed:bos>user",
    "<|startoftext|><|hy_User|>Tea?<|hy_Assistant|>": "<|hy_User|>",
    "<|begin_of_sentence|>User: Tea?\nAssistant: ": "<|begin_of_sentence|>User",
    "<role>HUMAN</role>Tea?<role>ASSISTANT</role>": "<role>HUMAN</role>",
    "<|some_new_mark|>\nuser\nTea?<|some_end|>": "<|some_new_mark|>\nuser",
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
    "What does <|endoftext|> mean?", "<b>user</b> a[b]user",
    "Is <user> a tag, or <|x?", "Continue the dialogue:\n\nHuman: Tea?\n\nAssistant:",
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


def test_rendered_texts_are_taken_as_they_are(tmp_path):
    """One tokenisation of prompt and response, no template; by name, by flag, and in a record."""
    row = {
        "id": "1",
        "prompt": "<|start|>user\nTea?<|end|>\n<|start|>assistant\n",
        "chosen": "Yes.",
        "rejected": "No.",
    }
    row["profile"] = ["I like tea."]
    whole = {"id": "2", "text_chosen": row["prompt"] + "Yes.", "text_rejected": row["prompt"] + "No."}
    data = write_lines(tmp_path / "x.jsonl", [row])
    other = write_lines(tmp_path / "y.jsonl", [whole])
    chat = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    (one,) = prb.read_comparisons(f"{data}?rendered")
    (two,) = prb.read_comparisons(f"{other}?chosen=text_chosen&rejected=text_rejected&rendered")
    given = prb.Comparison(**row, rendered=True)
    assert one == given == prb.Comparison.from_row(one.to_row(), where="f:1")
    expected = [chat.tokenizer(row["prompt"] + text)["input_ids"] for text in ("Yes.", "No.")]
    for comparison in (one, two, given):
        (tree,) = encode_comparisons([comparison], chat, view=View(0))
        assert [tree.sequence(k).tolist() for k in (0, 1)] == expected
    with pytest.raises(
        prb.DataError, match="'1': its text is rendered already, so there is no place for a profile"
    ):
        encode_comparisons([one], chat, view=View(1))
    assert told(lambda: prb.read_comparisons(f"{data}?rendered")) == []
    (text,) = told(
        lambda: prb.read_comparisons(f"{write_lines(tmp_path / 'z.jsonl', [row | {'prompt': '[INST]'}])}")
    )
    assert "--rendered" in text
    command = ["evaluate", "baseline:length", "--data", data, "--rendered", "--out", str(tmp_path / "run")]
    assert cli.main([*command, "--no-progress"]) == 0
    assert '"rendered": true' in (tmp_path / "run" / "run.json").read_text()
    for wrong, message in (
        ({"prompt": [{"role": "user", "content": "a"}]}, "'prompt': expected a string"),
        ({"chosen": [{"role": "assistant", "content": "a"}]}, "'chosen': expected a string"),
        ({"tools": [{"name": "kettle"}]}, "'tools': given beside 'rendered'"),
        ({"rendered": 1}, "'rendered': expected true or false"),
    ):
        with pytest.raises(prb.DataError, match=f"^f:1: field {message}"):
            prb.Comparison.from_row(row | {"rendered": True} | wrong, where="f:1")


TURNS = {
    "{% for m in messages %}{{ '<|start|>' + m.role + m.content + '<|end|>' }}{% endfor %}": (
        "<|start|>of tea?", " <|start|>userTea?<|end|>", "<|bos|><|start|>systema<|end|><|start|>userTea?",
        "Be kind.<|start|>userTea?",
    ),
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}": (
        "<|start|>user<|end|>Tea?", "Be kind.<|start|>user<|end|>Tea?", "So: Tea?<|start|>assistant<|end|>\n",
    ),
    "{% for m in messages %}{{ ('<|start|>' if m.role == 'user' else '<|end|>') + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|end|>' }}{% endif %}": (
        "<|start|>Tea?", "<|bos|>Be kind.<|start|>Tea?", "Be kind.<|start|>Tea?<|end|>",
    ),
}  # fmt: skip
"""Templates with marks of their own, and texts that each of them has rendered."""
ORDINARY = (
    "Tea?", "What does <|start|> mean?", "Is <|start|> before of <|end|>?", "<|end|>", "user: start", "",
    "Which token opens a turn: <|start|>, <|bos|> or <|pad|>?",
)  # fmt: skip


@pytest.mark.parametrize("template", TURNS)
def test_a_template_knows_its_own_marks(template, tmp_path):
    """Also marks of a special token that no other template has; a question that quotes one is not rendered."""
    chat = load_tokenizer(write_tokenizer(tmp_path, template=template, bos=True))
    marks = dict.fromkeys(TURNS[template], "<|start|>") | dict.fromkeys(ORDINARY)
    assert {text: chat.rendered_mark(text) for text in marks} == marks
