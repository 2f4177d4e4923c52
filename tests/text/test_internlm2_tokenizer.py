"""InternLM2's tokenizer from its data alone, against SentencePiece."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from prb_jax.errors import CheckpointError
from prb_jax.records.comparison import Message
from prb_jax.text.internlm2_tokenizer import CONFIG, MODEL
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.template import TextRules
from tests.text.chats import SHARED, as_transformers_has_it

TEXTS = (
    "",
    " ",
    "  two  blanks ",
    "tab\tnew\n\nline",
    "日本語テスト 中文",
    "👩‍👩‍👧 é ﷺ \u0301",
    "a" * 300,
    "\0\1",
    "\uff21\uff42\uff43 mixed",
)
CHAT = (Message("user", "Is it raining?"), Message("assistant", "It is."))


def write(folder: Path, *, charsmap: bytes = b"", model_type: int = 2) -> Path:
    """A model of a few pieces: letters, "he", "ll", "hell", "hello", bytes, and three special ones."""
    from transformers.convert_slow_tokenizer import import_protobuf

    words = ["h", "e", "l", "o", "▁", "he", "ll", "hell", "hello"]
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("[UNUSED_TOKEN_0]", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(word, -float(number), 1) for number, word in enumerate(reversed(words))]
    blanks = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
    model = import_protobuf().ModelProto(
        pieces=[{"piece": text, "score": score, "type": kind} for text, score, kind in pieces],
        trainer_spec={"model_type": model_type},
        normalizer_spec={"name": "identity", "precompiled_charsmap": charsmap, **blanks},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL).write_bytes(model.SerializeToString())
    config = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": {"3": {"content": "<|reward|>"}},
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", "add_bos_token": True,
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}",
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_pieces_bytes_and_special_tokens(tmp_path: Path) -> None:
    chat = load_tokenizer(write(tmp_path), rules=TextRules(append="given", append_id=3))
    first = 4 + 256
    hello, hell = first, first + 1
    assert [ids.tolist() for ids in chat.tokenize(["hello", "hell", "hello hell", "x"])] == [
        [hello], [hell], [hello, first + 4, hell], [4 + ord("x")],
    ]  # fmt: skip
    ids = chat.encode([Message("user", "hello"), Message("assistant", "hell")])
    assert ids == [1, hello, 4 + 10, hell, 4 + 10, 3]
    assert chat.added_before == (1,)


def test_what_is_no_tokenizer_of_internlm2(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="normalises characters"):
        load_tokenizer(write(tmp_path, charsmap=b"x"))
    unreadable = r"tokenizer\.model: cannot be read as a SentencePiece model of byte pairs"
    with pytest.raises(CheckpointError, match=unreadable):
        load_tokenizer(write(tmp_path, model_type=1))
    path = write(tmp_path) / MODEL
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=unreadable):
        load_tokenizer(tmp_path)


def test_the_published_one_as_sentencepiece_reads_it(tmp_path: Path) -> None:
    source, data = (
        SHARED / place for place in ("tokenizers/internlm2-reward", "data/personalised/prefeval.jsonl.gz")
    )
    if not source.exists() or not data.exists():
        pytest.skip("needs the shared tokenizers and data beside the checkout")
    import sentencepiece

    for name in (CONFIG, MODEL):
        shutil.copy(source / name, tmp_path / name)
    chat = load_tokenizer(tmp_path, rules=TextRules(append="given", append_id=92527))
    reference = sentencepiece.SentencePieceProcessor(str(source / MODEL))
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][::10]
    texts = [*TEXTS, *(row[field] for row in rows for field in ("question", "chosen", "rejected"))]
    for text, ids in zip(texts, chat.tokenize(texts), strict=True):
        assert ids.tolist() == reference.encode(text), text
    assert chat.tokenize(["Hello world"])[0].tolist() == [9843, 2028]
    ids = chat.encode(CHAT)
    expected = [1]
    for turn in CHAT:
        text = f"{turn.role}\n{turn.content}"
        expected += [92543, *reference.encode(text), 92542, *reference.encode("\n")]
    assert ids == [*expected, 92527]


def test_converted_it_needs_no_code(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from prb_jax import load
    from prb_jax.training.convert import convert
    from tests.models.readouts.checkpoints import write_row
    from tests.scoring.records import record

    source, _ = write_row("internlm2", tmp_path, config={"reward_token_id": 3})
    for path in (*source.glob("*token*"), *source.glob("*.jinja")):
        path.unlink()
    write(source)
    config = json.loads((source / CONFIG).read_text())
    config["chat_template"] += "{{ '<|reward|>' }}"  # as the published one does
    (source / CONFIG).write_text(json.dumps(config))
    target = convert(source, tmp_path / "standard")
    tokenizer = AutoTokenizer.from_pretrained(target)
    theirs = tokenizer.apply_chat_template(as_transformers_has_it(CHAT), return_dict=False)
    before, after = load(source), load(target)
    assert before.tokenizer.encode(CHAT) == after.tokenizer.encode(CHAT) == theirs
    assert theirs.count(3) == 1
    (old,), (new,) = before.score([record(1)]), after.score([record(1)])
    assert old.tolist() == new.tolist()
