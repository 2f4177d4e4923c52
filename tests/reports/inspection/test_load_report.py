"""The load report's lengths, and its words on tokenizers that do not fit, against transformers' own tokenisation."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import prb_jax as prb
from prb_jax.cli import main
from prb_jax.models.config.decoder import load_config
from prb_jax.reports.inspection.inspect import inspect
from prb_jax.reports.inspection.words import attention
from tests import tiny_tokenizer as tiny
from tests.scoring.records import WORDS, record, write_model
from tests.tiny_policies import write_policy

LONG = " ".join([*WORDS, *WORDS, *WORDS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pairs without a user's posts; the last one has a long response."""
    rows: list[dict[str, object]] = [
        {"id": f"c{n}", "question": record(n).question, "chosen": "Tea.", "rejected": "No."}
        for n in range(12)
    ]
    rows[11]["rejected"] = LONG
    rows[3]["profile"] = [{"id": str(k), "text": LONG} for k in range(2)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole_lengths(folder: Path, data: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def length(question: str, response: str) -> int:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        return len(tokenizer.apply_chat_template(turns, return_dict=False))

    rows = map(json.loads, data.read_text().splitlines())
    return sorted(max(length(row["question"], row[side]) for side in ("chosen", "rejected")) for row in rows)


def test_lengths_of_the_data(folder: Path, data: Path) -> None:
    facts = inspect(str(folder), data=data, profile_posts=0)
    whole = whole_lengths(folder, data)
    for protocol in ("default", "paper"):
        assert facts[f"lengths, {protocol}"].startswith(
            f"12 comparisons, 0 posts; median {whole[6]} tokens, 95 % up to {whole[11]}, longest {whole[-1]} "
        )
    limit = inspect(str(folder))["too long, default"]
    assert re.match(r"more than [\d,]+ tokens: posts of the profile go", limit)


def test_what_a_limit_does(folder: Path, data: Path) -> None:
    whole = whole_lengths(folder, data)
    facts = inspect(str(folder), data=data, profile_posts=2, max_length=60)
    default, paper = facts["at 60 tokens, default"], facts["at 60 tokens, paper"]
    too_long = sum(length > 60 for length in whole)
    posts, prompts, refused = default.splitlines()
    assert posts == "1 lose posts of the profile (2 posts)"
    assert prompts.startswith(f"{too_long - 1} lose the start of the prompt (")
    assert refused == (
        "1 are refused (--too-long skip leaves them out), as a response leaves no room for the prompt: 'c11'"
    )
    assert "lose the prompt's end" in paper  # two posts fill all of it
    without_posts = inspect(str(folder), data=data, protocol="paper", profile_posts=0, max_length=60)
    assert f"{too_long} lose the end of a response" in without_posts["at 60 tokens, paper"]
    # Scoring does as the report says.
    model = prb.load(folder)
    with pytest.raises(prb.DataError, match="'c11'"):
        model.score(prb.read_comparisons(data), max_length=60)


def test_one_protocol_and_options_without_data(folder: Path, data: Path) -> None:
    facts = inspect(str(folder), data=data, protocol="paper", max_length=60, limit=3)
    assert facts["lengths, paper"].startswith("3 comparisons")
    assert "lengths, default" not in facts
    with pytest.raises(prb.RunError, match="are for data"):
        inspect(str(folder), profile_posts=3)
    with pytest.raises(prb.CheckpointError, match="a baseline has no checkpoint to inspect"):
        inspect("baseline:length")
    with pytest.raises(prb.DataError, match=r"max_length 999999 is more than the \d+ tokens"):
        inspect(str(folder), max_length=999_999)


def test_on_the_command_line(folder: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--data", str(data), "--max-length", "60"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "at 60 tokens, default" in shown
    assert "1 are refused (--too-long skip leaves them out)" in shown


def test_bos_tokens_are_counted_and_one_that_opens_every_turn_is_no_fault(tmp_path: Path) -> None:
    place = write_model(tmp_path / "llama", "llama", template=tiny.CHAT_WITH_BOS, bos=True)
    assert inspect(str(place))["BOS"] == "1 in a conversation; 2 in the paper protocol"
    place = write_model(tmp_path / "qwen3", "qwen3")
    file = place / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": tiny.START}))
    facts = inspect(str(place))
    assert facts["BOS"] == "2 in a conversation of 2 turns: the token opens every turn"
    assert "BOS" not in facts["warnings"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": tiny.BOS}))
    assert "0 BOS in a conversation" in inspect(str(place))["warnings"]


@pytest.mark.parametrize(("window", "slides", "said"), [
    (32, "1111", "every layer sees 32 tokens"),
    (32, "1101", "3 of 4 layers see 32 tokens, the others all"),
    (1 << 20, "1111", "full"),  # no conversation is longer
    (32, "0000", "full"),
])  # fmt: skip
def test_which_layers_slide(folder: Path, window: int, slides: str, said: str) -> None:
    changes = {"num_hidden_layers": 4, "sliding_window": window, "qk_norm": None}
    windows = tuple(digit == "1" for digit in slides)
    assert attention(replace(load_config(folder), **changes, layer_windows=windows)) == said


def test_vocabularies_that_are_smaller_or_larger_than_the_embedding(tmp_path: Path) -> None:
    place = write_model(tmp_path / "smaller", "qwen3", vocab_size=500)
    said = inspect(str(place))["warnings"]
    assert "the tokenizer has 400 ids, the model 500 embeddings: 100 embeddings are never used" in said
    place = write_model(tmp_path / "larger", "qwen3", vocab_size=390)
    for refuse in (inspect, prb.load):
        with pytest.raises(
            prb.CheckpointError, match=r"ids up to 399, but .* only 390 embeddings.*--tokenizer"
        ):
            refuse(str(place))


def test_an_added_token_without_an_embedding_is_refused_where_it_occurs(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    place = write_model(tmp_path / "model", "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens(["<|extra|>"], special_tokens=True)
    tokenizer.save_pretrained(place)
    said = inspect(str(place))["warnings"]
    assert "the tokenizer has 401 ids, the model 400 embeddings: 1 added tokens have none" in said
    model = prb.load(place)
    model.score([prb.Comparison(id="1", question="Tea?", responses=["Yes.", "No."])])
    with pytest.raises(prb.DataError, match=r"token id 400, but .* has only 400 embeddings"):
        model.score([prb.Comparison(id="1", question="Tea <|extra|>?", responses=["Yes.", "No."])])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_language_model_is_described_and_converted(tmp_path, family):
    """`prb inspect` and `prb convert` take the models that `prb sample` takes, and runs of `prb ppo`."""
    write_policy(tmp_path / "run" / "model", family, eos=3)
    (tmp_path / "run" / "train.json").write_text('{"kind": "prb_jax policy training"}')
    facts = inspect(str(tmp_path / "run"))
    assert facts["kind"] == "a language model: prb sample, judge, guide and ppo take it"
    assert "CausalLM" in facts["as a reward model"]
    assert facts["a text ends at"] == "ids 3"
    converted = prb.convert(tmp_path / "run", tmp_path / "half", dtype="bfloat16")
    assert inspect(str(converted))["kind"] == facts["kind"]
    policy = prb.load_policy(converted, dtype="float32")
    assert policy.stop_ids == (3,)
    same = prb.convert(tmp_path / "run" / "model", tmp_path / "same")
    before, after = (
        {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}
        for folder in (tmp_path / "run" / "model", same)
    )
    assert after == before
    with pytest.raises(prb.CheckpointError, match="a language model has no head"):
        prb.convert(tmp_path / "run", tmp_path / "no", layout="value-head")
    with pytest.raises(prb.CheckpointError):
        inspect(str(tmp_path / "run"), readout="first-logit")
