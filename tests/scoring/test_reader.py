"""Comparisons to trees: the ids of K separate conversations, and truncation counted exactly."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prb_jax.errors import DataError
from prb_jax.records.comparison import Comparison, Message
from prb_jax.records.conversation import turns_of
from prb_jax.records.intake import read_comparisons
from prb_jax.scoring.paper import last_non_pad
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import TextProtocol, View, visible
from prb_jax.trees.tree import TooLongError, Tree, Truncation
from tests import tiny_tokenizer as tiny
from tests.text.chats import CHATS, REAL, SHARED, as_transformers_has_it, open_chat, real_chat


@pytest.fixture(scope="module", params=CHATS)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return open_chat(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return load_tokenizer(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def comparison(responses: list[str], *, posts: int = 0, question: str = "What should I cook?") -> Comparison:
    profile = [
        {"id": str(i), "category": "food" * (i % 2), "text": f"I wrote post {i}. " + "More text. " * (i % 5)}
        for i in range(posts)
    ]
    return Comparison(id="c1", question=question, responses=responses, profile=profile)


def alone(chat: ChatTokenizer, record: Comparison, posts: int) -> list[list[int]]:
    """The ids of each conversation as transformers makes them."""
    seen = visible(record, profile_posts=posts, protocol=TextProtocol.DEFAULT)
    context = json.loads(record.context or "{}")
    template = functools.partial(
        chat.tokenizer.apply_chat_template,
        tools=context.get("tools"),
        tokenize=True,
        return_dict=False,
        **context.get("chat_template_kwargs", {}),
    )
    groups = ((*seen.prefix_messages, *turns_of(response)) for response in seen.responses)
    return [template(as_transformers_has_it(messages)) for messages in groups]


def encode_comparison(record: Comparison, chat: ChatTokenizer, **options: Any) -> Tree:
    (tree,) = encode_comparisons([record], chat, **options)
    return tree


def assert_same(a: Tree, b: Tree) -> None:
    np.testing.assert_array_equal(a.prefix, b.prefix)
    assert [x.tolist() for x in a.responses] == [x.tolist() for x in b.responses]
    assert (a.read, a.truncation) == (b.read, b.truncation)


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_tree_holds_the_ids_of_its_conversations(chat: ChatTokenizer, count: int) -> None:
    responses = [f"{'A thing' if k % 3 else 'another'} number {k}.\n\n" + "so " * k for k in range(count)]
    for posts in (0, 3, 10):
        record = comparison(responses, posts=5)
        tree = encode_comparison(record, chat, view=View(posts))
        for k, ids in enumerate(alone(chat, record, posts)):
            assert tree.sequence(k).tolist() == ids
            assert tree.read[k] == len(tree.responses[k]) - 1
        assert not tree.truncation.any


def test_equal_responses_and_one_that_starts_another(chat: ChatTokenizer) -> None:
    for responses in (["Same.", "Same."], ["Rice", "Rice and beans"], ["an", "another", "an"]):
        record = comparison(responses)
        tree = encode_comparison(record, chat, view=View(0))
        assert [tree.sequence(k).tolist() for k in range(len(responses))] == alone(chat, record, 0)
        assert min(len(response) for response in tree.responses) >= 1


def test_merging_at_the_edge_moves_the_split_not_the_ids(tmp_path: Path) -> None:
    # The template writes "an" right before the response, which merges with what follows.
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.SEAMLESS))
    record = comparison(["other", "d then"], question="re?")
    sequences = alone(chat, record, 0)
    edge = len(chat.tokenizer("there?an", add_special_tokens=False)["input_ids"])
    assert any(sequence[:edge] != sequences[0][:edge] for sequence in sequences)  # the tokens do merge
    tree = encode_comparison(record, chat, view=View(0))
    assert [tree.sequence(k).tolist() for k in range(2)] == sequences
    assert len(tree.prefix) < edge


def test_many_at_once_equal_one_by_one(chat: ChatTokenizer) -> None:
    records = [
        comparison(
            [f"yes {i}", "no " * (1 + i % 20), "perhaps"], posts=i % 12, question="Why? " * (1 + i % 7)
        )
        for i in range(70)
    ]
    for max_length in (None, 170):
        together = encode_comparisons(records, chat, view=View(10, max_length=max_length))
        for record, tree in list(zip(records, together, strict=True))[::7]:
            assert_same(tree, encode_comparison(record, chat, view=View(10, max_length=max_length)))
    assert encode_comparisons([], chat, view=View(10)) == []


def test_whole_posts_go_first_and_as_few_as_possible(chat: ChatTokenizer) -> None:
    record = comparison(["Rice.", "A very long answer about rice."], posts=9)
    lengths = [max(map(len, alone(chat, record, posts))) for posts in range(10)]
    for limit in range(lengths[0], lengths[9] + 2, 3):
        tree = encode_comparison(record, chat, view=View(9, max_length=limit))
        kept = max(posts for posts in range(10) if lengths[posts] <= limit)
        assert tree.truncation == Truncation(posts_dropped=9 - kept)
        assert [tree.sequence(k).tolist() for k in range(2)] == alone(chat, record, kept)
    # Posts beyond the number asked for were never shown, so they are not counted as dropped.
    assert encode_comparison(record, chat, view=View(4, max_length=lengths[3])).truncation.posts_dropped == 1


def test_then_the_prompt_is_cut_from_its_start(tiny_chat: ChatTokenizer) -> None:
    question = " ".join(f"word{i}" for i in range(200)) + " the end?"
    record = comparison(["Rice.", "A longer answer."], posts=3, question=question)
    whole = max(map(len, alone(tiny_chat, record, 0)))
    tree = encode_comparison(record, tiny_chat, view=View(3, max_length=100))
    lengths = [len(tree.sequence(k)) for k in range(2)]
    assert 90 < max(lengths) <= 100  # no more was cut than a word needs
    assert tree.truncation == Truncation(posts_dropped=3, prompt_tokens_dropped=whole - max(lengths))
    text = tiny_chat.tokenizer.decode(tree.sequence(1))
    assert text.startswith("<|start|>user\nword")  # the template is intact
    assert text.endswith("the end?<|end|>\n<|start|>assistant\nA longer answer.<|end|>\n")


def test_responses_beyond_the_limit_are_an_error(tiny_chat: ChatTokenizer) -> None:
    record = comparison(["Rice.", "Rice " * 50], posts=1)
    with pytest.raises(DataError, match=r"comparison 'c1': .*no room for the prompt within max_length 40"):
        encode_comparison(record, tiny_chat, view=View(1, max_length=40))
    with pytest.raises(DataError, match="max_length: expected at least 1, found 0"):
        encode_comparison(record, tiny_chat, view=View(1, max_length=0))


def test_a_text_a_little_over_the_limit_is_encoded_once(
    tiny_chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(f"word{n}" for n in range(40))
    record = Comparison(
        id="7", prompt="What is the weather like today?", responses=["Fine.", text], labels=[1, 0]
    )
    tokens = len(tiny_chat.tokenize([text])[0])
    passes: list[int] = []
    tokenize = ChatTokenizer.tokenize

    def counted(self: ChatTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        passes.append(sum(text in other for other in texts))
        return tokenize(self, texts)

    monkeypatch.setattr(ChatTokenizer, "tokenize", counted)
    with pytest.raises(
        TooLongError, match=rf"responses alone \d+ to {tokens}; .* within max_length {tokens}"
    ):
        encode_comparison(record, tiny_chat, view=View(0, max_length=tokens))
    assert sum(passes) == 1, passes


USER, MORE = {"role": "user", "content": "Weather in Rome?"}, {"role": "user", "content": "And then?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
}
RESULT = {"role": "tool", "name": "weather", "content": "22 degrees, no rain"}
SUNNY, UNKNOWN = (
    {"role": "assistant", "content": "Sunny."},
    {"role": "assistant", "content": "I cannot know."},
)
THOUGHT = {"reasoning_content": "The user asks for the weather."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONTEXT = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "thoughts": {"chosen": [USER, SUNNY | THOUGHT], "rejected": [USER, SUNNY]},
    "thoughts off": {"chosen": [USER, SUNNY | THOUGHT], "rejected": [USER, UNKNOWN], **CONTEXT},
    "a call": {"chosen": [USER, CALL], "rejected": [USER, SUNNY], "tools": CONTEXT["tools"]},
    "a result": {"prompt": [USER, CALL, RESULT], "chosen": "22.", "rejected": "?", "tools": CONTEXT["tools"]},
    "parted early": {"chosen": [USER, SUNNY, MORE, SUNNY], "rejected": [USER, UNKNOWN, MORE, UNKNOWN]},
    "uneven": {"prompt": [USER], "chosen": [CALL, RESULT, SUNNY], "rejected": [UNKNOWN]},
    "systems": {"chosen": [SYSTEM, USER, SUNNY], "rejected": [USER, SUNNY], "tools": CONTEXT["tools"]},
    "prefill": {"prompt": [USER, SUNNY], "chosen": [SUNNY], "rejected": [UNKNOWN]},
}


@pytest.mark.parametrize("name", ["tools", "qwen3", "minimind"])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_conversations_have_the_ids_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    """Tools, calls, results, thoughts, and conversations that part at any turn; with a profile and without."""
    if name == "tools":
        chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.WITH_TOOLS))
    else:
        chat = real_chat(name)
    if name == "minimind" and kind == "thoughts off":
        pytest.skip("minimind's template has no switch for thoughts")
    posts = [{"id": "1", "text": "I live in Rome."}]
    record = Comparison(id="c1", profile=posts, **CONVERSATIONS[kind])
    for shown in (0, 1):
        tree = encode_comparison(record, chat, view=View(shown))
        sequences = [tree.sequence(k).tolist() for k in (0, 1)]
        assert sequences == alone(chat, record, shown)
        assert ("I live in Rome." in chat.tokenizer.decode(sequences[1])) == bool(shown)
    assert sequences[0] != sequences[1] or (name, kind) == ("qwen3", "thoughts off")


def test_the_shared_cases_have_the_tokens_of_transformers_and_trl() -> None:
    folder = SHARED / "data" / "cases"
    if not folder.is_dir():
        pytest.skip(f"no cases at {folder}")
    chat = real_chat("qwen3")
    counts = {}
    for file in ("message_fields", "tools", "early_split", "multi_completion"):
        records = read_comparisons(folder / f"{file}.jsonl")
        trees = encode_comparisons(records, chat, view=View(0))
        assert [[tree.sequence(k).tolist() for k in (0, 1)] for tree in trees] == [
            alone(chat, record, 0) for record in records
        ]
        counts[file] = [(len(tree.sequence(0)), len(tree.sequence(1))) for tree in trees]
    assert counts == {
        "message_fields": [(27, 27), (41, 22), (141, 140)],
        "tools": [(187, 184)],
        "early_split": [(40, 39)],
        "multi_completion": [(36, 20)],
    }


@pytest.mark.parametrize(
    ("row", "unknown"),
    [
        ({"chosen": [USER, SUNNY | THOUGHT], "rejected": [USER, SUNNY]}, "does not read 'reasoning_content'"),
        ({"chosen": [USER, CALL], "rejected": [USER, SUNNY]}, "does not read 'tool_calls'"),
        (
            {"prompt": [USER], "chosen": "a", "rejected": "b", "tools": CONTEXT["tools"]},
            "does not read 'tools'",
        ),
        (
            {"prompt": [USER], "chosen": "a", "rejected": "b", "chat_template_kwargs": {"effort": "low"}},
            "does not read 'chat_template_kwargs.effort'",
        ),
    ],
)
def test_what_a_template_does_not_know_is_named(row: Any, unknown: str, tiny_chat: ChatTokenizer) -> None:
    with pytest.raises(DataError, match=f"^comparison 'c1': the chat template of .*: it {unknown}"):
        encode_comparison(Comparison(id="c1", **row), tiny_chat, view=View(0))


def test_a_template_that_leaves_out_a_role_is_named(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.WITH_TOOLS))
    told = [{"role": "developer", "content": "Be brief."}, USER]
    with pytest.raises(DataError, match=r"'c1': .* it leaves out messages of the role 'developer'"):
        encode_comparison(Comparison(id="c1", prompt=told, chosen="a", rejected="b"), chat, view=View(0))


def test_parts_are_read_as_the_template_reads_them(tmp_path: Path) -> None:
    """As one text by a template that knows texts only, for which transformers writes a list in the style of Python."""
    parts = [{"type": "text", "text": text} for text in (" Weather", " in Rome?")]
    record = Comparison(id="c1", prompt=[USER | {"content": parts}], chosen="a", rejected="b")
    joined = Comparison(id="c1", prompt=" Weather in Rome?", chosen="a", rejected="b")
    for template, same in ((tiny.CHAT, joined), (tiny.PARTS, record)):
        chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=template))
        tree = encode_comparison(record, chat, view=View(0))
        assert [tree.sequence(k).tolist() for k in (0, 1)] == alone(chat, same, 0)


def test_a_long_conversation_keeps_its_tools_and_calls(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.WITH_TOOLS))
    prompt = [SYSTEM, MORE, UNKNOWN, USER | {"content": "Please. " * 30 + "Weather?"}, CALL, RESULT]
    record = Comparison(id="c1", prompt=prompt, chosen="Sunny.", rejected="?", tools=CONTEXT["tools"])
    whole = encode_comparison(record, chat, view=View(0))
    for limit in (len(whole.sequence(0)) - 2, len(whole.sequence(0)) - 60):
        tree = encode_comparison(record, chat, view=View(0, max_length=limit))
        text = chat.tokenizer.decode(tree.sequence(0))
        assert len(tree.sequence(0)) <= limit < len(whole.sequence(0))
        assert "And then?" not in text
        for kept in (
            '"parameters"',
            "Be brief.",
            "Weather?<|end|>",
            '"city"',
            "22 degrees, no rain",
            "Sunny.",
        ):
            assert kept in text
    apart = Comparison(id="c1", chosen=[SYSTEM, USER, SUNNY], rejected=[USER, SUNNY])
    with pytest.raises(TooLongError, match="'c1': its longest conversation has"):
        encode_comparison(apart, chat, view=View(0, max_length=9))


def test_a_record_the_template_refuses_is_named(tmp_path: Path) -> None:
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=tiny.NO_SYSTEM))
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    records = [
        comparison(["a", "b", "c"]),
        Comparison(id="bad-one", prompt=turns, responses=["a", "b"]),
        comparison(["a", "b"]),
    ]
    for protocol in TextProtocol:
        with pytest.raises(DataError, match=r"comparison 'bad-one': .*System role not supported"):
            encode_comparisons(records, chat, view=View(0, protocol))


def test_different_responses_with_equal_tokens_are_an_error(tmp_path: Path) -> None:
    deaf = "{{ messages[0]['content'] }}<|start|>{{ messages[1]['content'][:16] | trim }}<|end|>"
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=deaf))
    record = comparison(["x", "the same start, good", "the same start, bad"])
    with pytest.raises(DataError, match=r"'c1': responses\[1\] and responses\[2\] differ as text"):
        encode_comparison(record, chat, view=View(0))
    # Surrounding blanks, which many templates trim, do not count as a difference.
    tree = encode_comparison(comparison(["Rice. ", "Rice."]), chat, view=View(0))
    assert tree.responses[0].tolist() == tree.responses[1].tolist()
    # Nor do thoughts, which the templates of thinking models take out of earlier turns.
    forgets = (
        "{{ messages[0].content }}<|start|>{{ messages[1].content.split('</think>')[-1] | trim }}<|end|>"
    )
    chat = load_tokenizer(tiny.write_tokenizer(tmp_path, template=forgets))
    thoughts = comparison(["<think>a</think>Rice.", "<think>b</think>\n\nRice.", "Beans."])
    assert encode_comparison(thoughts, chat, view=View(0)).equal_to == (0, 0, 2)


class TestPaper:
    """The quirks of the released scripts."""

    def encode(
        self, chat: ChatTokenizer, record: Comparison, *, posts: int = 0, limit: int | None = None, **pad: Any
    ) -> Tree:
        return encode_comparison(record, chat, view=View(posts, TextProtocol.PAPER, limit), **pad)

    def test_every_tokenizer_as_the_script_calls_it(self, chat: ChatTokenizer) -> None:
        record = comparison(["Rice and " + "more rice. " * 12, "Beans."], posts=3)
        for posts, limit in ((0, None), (2, None), (2, 60)):
            tree = self.encode(chat, record, posts=posts, limit=limit, pad_token_id=-1)
            prompt = visible(record, profile_posts=posts, protocol=TextProtocol.PAPER).prefix_messages
            for k, response in enumerate(record.responses):
                turns = as_transformers_has_it([*prompt, Message("assistant", response)])
                text = chat.tokenizer.apply_chat_template(turns, tokenize=False)
                ids = chat.tokenizer(text, truncation=True, max_length=limit or 8192)["input_ids"]
                chat.tokenizer.backend_tokenizer.no_truncation()
                assert tree.sequence(k).tolist() == ids

    def test_the_end_of_the_answer_is_cut_and_counted(self, tiny_chat: ChatTokenizer) -> None:
        record = comparison(["Rice " * 60, "Beans."])
        whole = self.encode(tiny_chat, record)
        lengths = [len(whole.sequence(k)) for k in range(2)]
        tree = self.encode(tiny_chat, record, limit=50)
        for k in range(2):
            assert tree.sequence(k).tolist() == whole.sequence(k)[:50].tolist()
        assert lengths[1] < 50
        assert tree.truncation == Truncation(response_tokens_dropped=lengths[0] - 50)

    def test_a_prompt_beyond_the_limit_makes_responses_equal(self, tiny_chat: ChatTokenizer) -> None:
        record = comparison(["Rice.", "Beans are good."])
        whole = self.encode(tiny_chat, record)
        limit = len(whole.prefix) - 5
        tree = self.encode(tiny_chat, record, limit=limit)
        assert tree.sequence(0).tolist() == tree.sequence(1).tolist() == whole.prefix[:limit].tolist()
        lost = sum(len(response) for response in whole.responses)
        assert tree.truncation == Truncation(prompt_tokens_dropped=5, response_tokens_dropped=lost)

    def test_left_truncation_loses_the_prompt(self, tmp_path: Path) -> None:
        chat = load_tokenizer(tiny.write_tokenizer(tmp_path))
        chat.tokenizer.truncation_side = "left"
        record = comparison(["Rice.", "Beans are good."])
        whole = self.encode(chat, record)
        tree = self.encode(chat, record, limit=len(whole.sequence(1)) - 3)
        assert tree.sequence(1).tolist() == whole.sequence(1)[3:].tolist()
        assert tree.truncation == Truncation(prompt_tokens_dropped=3)

    def test_default_length_limit(self, tiny_chat: ChatTokenizer) -> None:
        record = comparison(["Rice.", "Beans."], question="so " * 9000)
        tree = self.encode(tiny_chat, record)
        assert [len(tree.sequence(k)) for k in range(2)] == [8192, 8192]

    def test_read_at_the_last_token_that_is_not_padding(self, tmp_path: Path) -> None:
        record = comparison(["Rice.", "Beans are good."])
        own, shared, none = (
            load_tokenizer(tiny.write_tokenizer(tmp_path / str(pad), template=tiny.CHAT_WITH_BOS, pad=pad))
            for pad in (tiny.PAD, tiny.END, None)
        )
        # Padding is end-of-turn by the tokenizer, or by the model's configuration; else the last token is read.
        for chat, pad, behind in (
            (own, None, 1),
            (none, None, 1),
            (shared, None, 2),
            (own, own.eos_token_id, 2),
        ):
            tree = self.encode(chat, record, pad_token_id=pad)
            assert tree.read == tuple(len(response) - behind for response in tree.responses)
            assert [tree.sequence(k)[-1] for k in range(2)] == [chat.eos_token_id] * 2

    def test_last_non_pad(self) -> None:
        ids = np.asarray([4, 9, 5, 9, 9], np.int32)
        assert [last_non_pad(ids, pad) for pad in (9, 5, None)] == [2, 4, 4]
        assert last_non_pad(ids[3:], 9) == 0


@pytest.mark.parametrize("name", REAL)
def test_real_rows(name: str) -> None:
    data, chat = SHARED / "data" / "personalised" / "ukpconvarg1.jsonl.gz", real_chat(name)
    if not data.is_file():
        pytest.skip(f"needs {data}")
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        records = [
            Comparison.from_row(json.loads(line), where=f"line {i}") for i, line in zip(range(25), lines)
        ]
    for limit in (None, 600):
        trees = encode_comparisons(records, chat, view=View(10, max_length=limit))
        for record, tree in zip(records, trees, strict=True):
            kept = min(10, len(record.profile)) - tree.truncation.posts_dropped
            ids = alone(chat, record, kept)
            assert [tree.sequence(k).tolist() for k in range(2)] == ids
            if limit is None:
                assert kept == min(10, len(record.profile))
                continue
            assert max(map(len, ids)) <= limit
            if tree.truncation.posts_dropped:
                assert max(map(len, alone(chat, record, kept + 1))) > limit
