"""A template that prints the date must render the same on any day."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.errors import CheckpointError
from prb_jax.records.comparison import Message
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.template_clock import fix_clock
from prb_jax.training.export import copy_tokenizer
from tests import tiny_tokenizer as tiny
from tests.text.chats import as_transformers_has_it

EXCHANGE = (Message("user", "A?"), Message("assistant", "B."))


def set_clock(monkeypatch: pytest.MonkeyPatch, year: int) -> None:
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls(year, 3, 4)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def test_the_day_does_not_change_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_tokenizer(tmp_path, template=tiny.DATED)
    ours, theirs, hashes = set(), set(), set()
    for year in (2025, 2031):
        set_clock(monkeypatch, year)
        chat = load_tokenizer(folder)
        ours.add(chat.render([EXCHANGE])[0])
        theirs.add(chat.tokenizer.apply_chat_template(as_transformers_has_it(EXCHANGE), tokenize=False))
        hashes.add(chat.template_hash)
        assert chat.template.reads_clock
    assert len(theirs) == 2  # the two clocks do reach templates
    assert len(ours) == len(hashes) == 1
    assert ours.pop().startswith("<|start|>system\nToday: 26 Jul 2024<|end|>\n<|start|>user\nA?")


def test_a_template_without_a_date_is_left_alone(tmp_path: Path) -> None:
    template = load_tokenizer(tiny.write_tokenizer(tmp_path)).template
    assert template.text == tiny.CHAT
    assert not template.reads_clock


def test_fixing_the_clock_changes_nothing_else(tmp_path: Path) -> None:
    # Leading blanks, newlines and blocks are what whitespace control could disturb.
    for start in ("", "\n", "  ", "  {% if true %}x{% endif %}", "\n\n{%- if true %} y{% endif %}"):
        template = start + "{{ strftime_now('%Y') }}{{ strftime_now(\"%d %b\") }}" + tiny.CHAT
        plain = start + "202426 Jul" + tiny.CHAT
        folder = tiny.write_tokenizer(tmp_path)
        fixed, expected = (load_tokenizer(folder, chat_template=text) for text in (template, plain))
        assert fixed.render([EXCHANGE]) == expected.render([EXCHANGE])


@pytest.mark.parametrize("call", ["strftime_now(form)", "strftime_now ('%d' + x)", "strftime_now('%d\\n')"])
def test_computed_formats_are_refused(call: str) -> None:
    with pytest.raises(CheckpointError, match="model-x: the chat template reads the clock"):
        fix_clock("{{ " + call + " }}", where="model-x")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (5, "chat_template: expected a text, found 5"),
        ({"a": 1}, "chat_template|chat template"),
        (
            tiny.CHAT + "\ud800",
            "chat_template: expected Unicode text, found half of a surrogate pair at character",
        ),
        (
            tiny.CHAT + "{{ '\\ud800' }}",
            "the chat template writes half of a surrogate pair, which is not text",
        ),
    ],
)
def test_a_template_that_is_no_text_is_named(tmp_path: Path, template: object, message: str) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(CheckpointError, match=f"{folder}: .*({message})"):
        load_tokenizer(folder)


@pytest.mark.parametrize("form", ["list", "files"])
def test_named_templates_are_chosen_as_in_transformers(tmp_path: Path, form: str) -> None:
    """With tools the one named tool_use; without a default all names are listed."""
    transformers = pytest.importorskip("transformers")
    with_tools = "{{ 'Tools: ' + tools | tojson + '\n' }}" + tiny.CHAT
    folder = tiny.write_tokenizer(tmp_path / "tokenizer", template=None if form == "list" else tiny.CHAT)
    named = {"default": tiny.CHAT, "tool_use": with_tools, "other": "{{ messages[0].content }}"}
    path = folder / "tokenizer_config.json"
    entries = [{"name": name, "template": text} for name, text in named.items()]
    if form == "list":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": entries}))
    else:
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "other"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    chat, reference = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Green."}]
    tools = [{"type": "function", "function": {"name": "kettle"}}]
    more: dict[str, Any]
    for more in ({}, {"tools": tools}):
        comparison = prb.Comparison(id="1", responses=[turns], **more)
        conversation = [*comparison.prompt, Message("assistant", comparison.responses[0])]
        expected = reference.apply_chat_template(turns, tokenize=False, **more)
        assert chat.render([conversation]) == [expected]
        assert ("Tools: " in expected) == bool(more)
    assert chat.template_hash != load_tokenizer(folder, chat_template="default").template_hash
    copy_tokenizer(chat, folder, tmp_path)
    assert load_tokenizer(tmp_path).template == chat.template
    with pytest.raises(CheckpointError, match="expected 'plain', 'default', 'other' and 1 more or a file"):
        load_tokenizer(folder, chat_template="nothing")
    if form == "list":
        entries = [one for one in entries if one["name"] != "default"]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": entries}))
        with pytest.raises(
            CheckpointError, match="names its chat templates 'other', 'tool_use', and none 'default'"
        ):
            load_tokenizer(folder)
