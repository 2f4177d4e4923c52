"""Conversations to ids: one tokenisation, one BOS, and the same ids as transformers."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prb_jax.errors import CheckpointError, PrbWarning
from prb_jax.records.comparison import Message
from prb_jax.text.open_tokenizer import independent_tokens, load_tokenizer
from prb_jax.text.template import choose_template
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from tests import tiny_tokenizer as tiny
from tests.text.chats import CHATS, as_transformers_has_it, open_chat, paper_ids, real_chat

CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 5000 + b"\0").decode()
"""A table of SentencePiece with a long text in it."""

EXCHANGE = (
    Message("user", "  What should I cook? \n"),
    Message("assistant", "Rice."),
    Message("user", "And then? 你好 😀"),
    Message("assistant", " A salad, \n\n quickly. "),
)


@pytest.fixture(scope="module", params=CHATS)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return open_chat(request.param, tmp_path_factory.mktemp("tokenizer"))


def test_ids_equal_transformers_own_tokenisation(chat: ChatTokenizer) -> None:
    """With one BOS where the template or the tokenizer writes it, or both do."""
    turns = as_transformers_has_it(EXCHANGE)
    expected = chat.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert type(expected) is list
    assert chat.encode(EXCHANGE) == expected
    assert expected[:2] != [chat.bos_token_id] * 2


def test_real_llama_has_one_bos_and_two_in_the_paper_protocol() -> None:
    chat = real_chat("llama3-instruct")
    assert chat.encode(EXCHANGE).count(128000) == 1
    assert paper_ids(chat, EXCHANGE, max_length=8192)[:3] == [128000, 128000, 128006]
    assert (chat.bos_token_id, chat.eos_token_id, chat.pad_token_id) == (128000, 128009, None)
    assert chat.vocab_size == 128256


@pytest.mark.parametrize("side", ["right", "left"])
def test_paper_ids_equal_the_scripts_call(tmp_path: Path, side: str) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.CHAT_WITH_BOS, bos=True, eos=True))
    reference = load_tokenizer(tmp_path).tokenizer
    chat.tokenizer.truncation_side = reference.truncation_side = side
    text = reference.apply_chat_template(as_transformers_has_it(EXCHANGE), tokenize=False)
    for limit in (2, 3, 17, 40, 8192):
        expected = reference(text, truncation=True, max_length=limit)["input_ids"]
        assert paper_ids(chat, EXCHANGE, max_length=limit) == expected


SPECIAL = (
    "<|im_end|>", "<|end|>\n<|start|>assistant\n x", "<|eot_id|>", "<think>", "</think>a", " <|", "e\u0301",
)  # fmt: skip


@settings(max_examples=60, deadline=None, database=None)
@given(
    prompt=st.text(max_size=40),
    responses=st.lists(st.text(max_size=20) | st.sampled_from(SPECIAL), min_size=2, max_size=4),
    shared=st.text(max_size=10),
)
def test_tokenising_the_shared_part_once_changes_no_id(
    chat: ChatTokenizer, prompt: str, responses: list[str], shared: str
) -> None:
    group = [(Message("user", prompt), Message("assistant", shared + response)) for response in responses]
    together = chat.encode_together([group])[0]
    for messages, ids in zip(group, together, strict=True):
        alone = chat.tokenizer.apply_chat_template(
            as_transformers_has_it(messages), tokenize=True, return_dict=False
        )
        assert ids.tolist() == alone


def test_cut_tokens_are_found_where_they_exist(chat: ChatTokenizer) -> None:
    if "the" in chat.template.text[:40]:  # the seamless template has no special token
        assert chat.cut_tokens == ()
    else:
        assert chat.cut_tokens


def test_no_chat_template_names_the_remedy(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path, template=None)
    with pytest.raises(CheckpointError, match=r"no chat template.*--chat-template FILE.*plain"):
        load_tokenizer(folder)


def test_plain_format_is_written_between_bos_and_eos(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=None, bos=True), chat_template="plain")
    text = chat.render([[Message("user", "A?"), Message("assistant", "B.")]])[0]
    assert text == "<|bos|>User: A?\n\nAssistant: B.<|end|>"


def test_template_from_a_file_or_as_text_replaces_the_tokenizers(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path / "t")
    (tmp_path / "other.jinja").write_text(tiny.THINKING, encoding="utf-8")
    from_file = load_tokenizer(folder, chat_template=str(tmp_path / "other.jinja"))
    from_text = load_tokenizer(folder, chat_template=tiny.THINKING)
    assert from_file.template_hash == from_text.template_hash
    assert from_file.template_hash != load_tokenizer(folder).template_hash
    assert from_file.template_hash.startswith("sha256:")
    assert "thought" in from_file.render([EXCHANGE])[0]
    with pytest.raises(CheckpointError, match=r"missing\.jinja: cannot be read"):
        load_tokenizer(folder, chat_template=str(tmp_path / "missing.jinja"))


def test_template_that_refuses_a_conversation_is_named(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.NO_SYSTEM))
    bad = [Message("system", "Be brief."), Message("user", "A?"), Message("assistant", "B.")]
    refused = r"\['system', 'user', 'assistant'\]: System role not supported"
    with pytest.raises(RenderError, match=refused) as error:
        chat.render([EXCHANGE, bad])
    assert error.value.conversation == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token + bos_token }}" + tiny.CHAT, "writes the BOS token .* twice"),
        ("{{ raise_exception('no') }}", "refuses the conversation.*no"),
        ("{% if %}", "refuses the conversation"),
        ("{{ messages.__class__.__mro__ }}" + tiny.CHAT, "refuses the conversation.*unsafe"),
        ("{{ messages[0]['content'] }}", "leaves out message contents, such as 'It is an answer.'"),
        ("{{ strftime_now(messages[0]['content']) }}" + tiny.CHAT, "computed format"),
    ],
)
def test_unusable_templates_are_refused_when_loading(tmp_path: Path, template: str, message: str) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder, chat_template=template)


def test_truncation_and_padding_stored_with_the_tokenizer_have_no_effect(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    expected = load_tokenizer(folder).encode(EXCHANGE)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": tiny.PAD,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert load_tokenizer(folder).encode(EXCHANGE) == expected


def test_tokenizers_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty: no tokenizer files .*--tokenizer"):
        load_tokenizer(tmp_path / "empty")
    # transformers makes up an empty tokenizer for a Qwen3 configuration.
    (tmp_path / "empty" / "config.json").write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3Model"]}'
    )
    for template in (None, "plain"):
        with pytest.raises(CheckpointError, match="no tokenizer"):
            load_tokenizer(tmp_path / "empty", chat_template=template)
    folder = tiny.write_tokenizer(tmp_path / "remote")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["code.Tokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"auto_map|code from its repository"):
        load_tokenizer(folder)


def test_vocab_size_counts_every_id(chat: ChatTokenizer) -> None:
    assert chat.vocab_size >= len(chat.tokenizer)
    assert max(chat.encode(EXCHANGE)) < chat.vocab_size


def test_importing_needs_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, prb_jax.text.tokenizer, prb_jax.text.view;"
        "print([name for name in ('transformers', 'torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class WithoutBackend:
    """A tokenizer that is not one of the `tokenizers` library, as far as its user can tell."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self.tokenizer, name)


def test_tokenizers_written_in_python_give_the_same(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path))
    slow = WithoutBackend(chat.tokenizer)
    assert independent_tokens(slow, chat.render([EXCHANGE])[0]) == ()
    python = dataclasses.replace(chat, tokenizer=slow, cut_tokens=())
    assert python.encode(EXCHANGE) == chat.encode(EXCHANGE)


def test_the_shared_part_is_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path))
    seen: list[str] = []
    tokenize = ChatTokenizer.tokenize
    monkeypatch.setattr(
        ChatTokenizer, "tokenize", lambda self, texts: (seen.extend(texts), tokenize(self, texts))[1]
    )
    prompt = Message("user", "word " * 1000)
    chat.encode_together([[(prompt, Message("assistant", f"answer {k}")) for k in range(16)]])
    assert 5000 < sum(map(len, seen)) < 5000 + 16 * 60
    seen.clear()
    chat.encode_together([[(prompt, Message("assistant", "of another comparison"))]])
    assert 0 < sum(map(len, seen)) < 60


def test_one_of_several_templates_of_a_tokenizer(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(folder).tokenizer
    tokenizer.chat_template = {"default": tiny.CHAT, "thinking": tiny.THINKING}
    assert choose_template(tokenizer, None, where="x").text == tiny.CHAT
    assert choose_template(tokenizer, "thinking", where="x").text == tiny.THINKING


REPLACE = {"type": "Replace", "content": "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"vocab": {"zz": 2**31}}}, "vocab: token 'zz' has the id 2147483648; expected ids below"),
        (
            {"normalizer": [REPLACE | {"pattern": {"String": "a"}, "content": "a" * 20}] * 10},
            "normalizer: may make a text 1.02e\\+13 times as long; expected at most 100 times",
        ),
        ({"normalizer": [REPLACE | {"pattern": {"Regex": "(?=a)"}}] * 60}, "normalizer: may make a text"),
        ({"normalizer": [{"type": "Prepend", "prepend": "a" * 1000}]}, "normalizer: may make a text"),
        (
            {"normalizer": [{"type": "Precompiled", "precompiled_charsmap": CHARSMAP}]},
            "normalizer: may make a text 5e\\+03 times as long",
        ),
    ],
)
def test_hostile_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = changed(tiny.write_tokenizer(tmp_path), change)
    with pytest.raises(CheckpointError, match=f"{folder}: tokenizer.json: {message}"):
        load_tokenizer(folder)


def test_a_pattern_that_panics_names_the_tokenizer(tmp_path: Path) -> None:
    # The panic of the library is no Exception; this pattern gives up on long texts alone.
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    chat = load_tokenizer(changed(tiny.write_tokenizer(tmp_path), {"pre_tokenizer": pattern}))
    message = f"{tmp_path}: tokenizer.json: the tokenizer breaks down: .*limit"
    with pytest.raises(CheckpointError, match=message):
        chat.tokenize(["a" * 40 + "!"])


def test_a_model_without_its_unknown_token_names_the_tokenizer(tmp_path: Path) -> None:
    folder = tiny.write_tokenizer(tmp_path)
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    value["model"] = {"type": "WordLevel", "vocab": value["model"]["vocab"], "unk_token": "none"}
    path.write_text(json.dumps(value))
    message = f"{folder}: tokenizer.json: the tokenizer breaks down: WordLevel error: Missing .* token"
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_dropout_is_off_and_told(tmp_path: Path) -> None:
    plain = load_tokenizer(tiny.write_tokenizer(tmp_path)).encode(EXCHANGE)
    with pytest.warns(PrbWarning, match="model.dropout 0.5 would give the same text other tokens"):
        chat = load_tokenizer(changed(tmp_path, {"model": {"dropout": 0.5}}))
    assert [chat.encode(EXCHANGE) for _ in range(3)] == [plain] * 3


def changed(folder: Path, change: dict[str, Any]) -> Path:
    """Change fields of the tokenizer.json of a folder."""
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    model = change.get("model", {})
    value["model"] |= model | {"vocab": value["model"]["vocab"] | model.get("vocab", {})}
    if "normalizer" in change:
        value["normalizer"] = {"type": "Sequence", "normalizers": change["normalizer"]}
    value["pre_tokenizer"] = change.get("pre_tokenizer", value["pre_tokenizer"])
    path.write_text(json.dumps(value))
    return folder
