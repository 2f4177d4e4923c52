"""The server when its scorer is slow, busy or broken, and clients that are slow; padded batches; addresses."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.serving import engine as engine_module
from prb_jax.serving import tree_scorer
from prb_jax.serving.app import ServedModel, ServerMetrics, make_app
from prb_jax.serving.engine import Engine
from prb_jax.serving.items import ChatItem, Item, NotFiniteError, RenderedItem, Score, TreeMaker, ended_once
from prb_jax.serving.jobs import BusyError
from prb_jax.serving.options import Limits, ServeOptions
from prb_jax.serving.request_reader import RequestReader
from prb_jax.serving.serve import make_served, serve
from prb_jax.serving.sizes import Sizes, TooLargeError
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.tree import TooLongError, build_tree
from tests.scoring.cudnn_model import over_cudnn_streams
from tests.scoring.records import record
from tests.serving.local_server import start_app

GOOD = {"response_text": "a SECRET answer", "query": "?"}


class StubEngine:
    """Stands for the engine: each request is answered by `answer`."""

    def __init__(self, answer: Callable[[Sequence[Item]], Any]) -> None:
        self.answer, self.waiting, self.failure = answer, 0, None

    async def score(self, items: Sequence[Item]) -> list[Score]:
        scores = self.answer(items)
        return await scores if asyncio.iscoroutine(scores) else scores


def app_with(answer: Callable[[Sequence[Item]], Any], **limits: Any) -> Any:
    engine, options = (
        cast(Engine, StubEngine(answer)),
        ServeOptions(limits=Limits(**limits), host="testserver"),
    )
    reader = RequestReader(Sizes(items=options.limits.items))
    return make_app(ServedModel("m", engine, reader, ServerMetrics(), options))


def scores(items: Sequence[Item]) -> list[Score]:
    return [Score(1.0, 1, False) for _ in items]


def fails(error: Exception) -> Callable[[Sequence[Item]], Any]:
    def answer(items: Sequence[Item]) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (lambda items: asyncio.sleep(60), 503, "not done within 0.05 seconds"),
        (fails(BusyError(9, 8)), 429, "9 responses wait"),
        (fails(ValueError("SECRET")), 500, "scoring failed"),
        (fails(NotFiniteError("the model's score is nan")), 422, "nan"),
    ],
)
def test_what_the_scorer_cannot_do_has_its_status_and_no_default(
    answer: Callable[[Sequence[Item]], Any], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TestClient(app_with(answer, seconds=0.05)) as client:
        refused = client.post("/score", json=GOOD)
    assert (refused.status_code, message in refused.json()["error"]["message"]) == (status, True)
    assert ("retry-after" in refused.headers) == (status in (429, 503))
    assert refused.json().keys() == {"error"}
    log = capsys.readouterr().err
    line = json.loads(log.splitlines()[0])
    assert (line["path"], line["status"], line["items"]) == ("/score", status, 1)
    assert "SECRET" not in log + refused.text


def test_slow_clients_are_not_waited_for() -> None:
    url = start_app(app_with(scores, seconds=0.3), Limits(seconds=0.3, connections=3))
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(address, timeout=300) as head, socket.create_connection(address) as body:
        head.sendall(b"POST /score HTTP/1.1\r\nHost:")
        typed = b"Host: localhost\r\nContent-Type: application/json\r\n"
        body.sendall(b"POST /score HTTP/1.1\r\n" + typed + b"Content-Length: 50\r\n\r\n{")
        assert b" 408 " in body.recv(1000)
        assert head.recv(1000) == b""  # closed
        assert httpx.post(f"{url}/score", json=GOOD).json() == {"score": 1.0}
        many = [socket.create_connection(address, timeout=300) for _ in range(4)]
        many[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 503 " in many[-1].recv(1000)
        for connection in many:
            connection.close()


VIEW = ViewOptions(max_length=160)
SEVERAL = [record(number, 3) for number in range(6)]


def rendered(model: prb.RewardModel) -> list[RenderedItem]:
    """The conversations of the comparisons above, as token ids."""
    trees = model.reader.encode(SEVERAL, view=model.reader.view(VIEW))
    return [RenderedItem(tuple(tree.sequence(k).tolist())) for tree in trees for k in range(3)]


def ask_together(engine: Any, *requests: Sequence[Item]) -> list[Any]:
    """The scores of requests that are made at the same time, or why one has none."""

    async def ask() -> list[Any]:
        return await asyncio.gather(*map(engine.score, requests), return_exceptions=True)

    return asyncio.run(ask())


def test_whatever_comes_nothing_is_compiled_for_it_and_few_wait(model: prb.RewardModel) -> None:
    expected = model.score(SEVERAL, max_length=160)
    options = ServeOptions(batch_tokens=512, view=VIEW, limits=Limits(waiting=18), prefix_cache=0)
    engine = make_served(model, options).engine
    programs, items = cast(Any, model.score_fn)._cache_size(), rendered(model)
    *answers, refused = ask_together(engine, *([item] for item in items), items[:1])
    engine.close()
    assert isinstance(refused, BusyError)
    values = [score.value for (score,) in answers]
    np.testing.assert_allclose(values, np.concatenate(expected), atol=1e-5)
    assert cast(Any, model.score_fn)._cache_size() == programs
    assert engine.waiting == 0


def test_streams_with_tables_of_keys_have_fixed_shapes_too(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: a program for each length, whatever conversations come."""
    expected = np.concatenate(model.score(SEVERAL, max_length=160))
    streams = over_cudnn_streams(model, monkeypatch)
    scorer = tree_scorer.open_tree_scorer(streams, VIEW, batch_tokens=1024)
    scorer.compile()
    compiled = cast(Any, streams.score_fn)._cache_size
    assert compiled() == len(tree_scorer.PARTS)
    items = rendered(model)
    values = [cast(Any, score).value for size in (1, 4, 13) for score in scorer(items[:size])]
    np.testing.assert_allclose(values, [*expected[:1], *expected[:4], *expected[:13]], atol=1e-5)
    assert compiled() == len(tree_scorer.PARTS)


def test_conversations_that_begin_alike_are_computed_together_however_many_wait(
    model: prb.RewardModel,
) -> None:
    """The second response of a pair is never left for a later batch, which would read the prompt again."""
    zeros = cast(Any, lambda params, batch: np.zeros(batch.reads.shape, np.float32))
    served = make_served(replace(model, score_fn=zeros), ServeOptions(batch_tokens=512, prefix_cache=0))
    prompts = np.random.default_rng(0).integers(4, 90, (40, 150)).tolist()
    pairs = [[RenderedItem((*prompt, *range(k, k + 10))) for k in (5, 6)] for prompt in prompts]
    assert [len(answer) for answer in ask_together(served.engine, *pairs)] == [2] * 40
    served.close()
    tokens = sum(build_tree([cast(Any, item).content for item in pair]).tokens for pair in pairs)
    computed = re.search(r"^prb_\w*tokens_total (\S+)", served.metrics.text().decode(), re.MULTILINE)
    assert computed is not None
    assert float(computed[1]) == tokens


def test_a_batch_that_fails_fails_its_requests_and_no_others(model: prb.RewardModel) -> None:
    calls: list[int] = []

    def score(params: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the three before it are those that compile
            raise RuntimeError("out of memory")
        return np.full(batch.reads.shape, np.nan if len(calls) == 5 else 2.0, np.float32)

    served = make_served(
        replace(model, score_fn=cast(Any, score)), ServeOptions(batch_tokens=1024, prefix_cache=0)
    )
    with TestClient(make_app(served), base_url="http://127.0.0.1") as client:
        answers = [client.post("/score", json=GOOD) for _ in range(3)]
    served.close()
    assert [answer.status_code for answer in answers] == [500, 422, 200]
    assert answers[-1].json() == {"score": 2.0}


def test_a_cpu_computes_two_batches_side_by_side(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "lanes", lambda mesh: 2)
    # passed by two batches at the same time, and broken by one alone
    both = threading.Barrier(2, timeout=300)
    warm_up = [True]

    def score(params: Any, batch: Any) -> Any:
        if not warm_up:
            both.wait()
        return cast(Any, model.score_fn)(params, batch)

    options = ServeOptions(batch_tokens=256, prefix_cache=0)
    engine = make_served(replace(model, score_fn=cast(Any, score)), options).engine
    warm_up.clear()
    encoded = [model.encode([record(number, 1)])[0] for number in (1, 2)]
    filling = [np.resize(tree.sequence(0), 200).tolist() for tree in encoded]  # each a stream
    answers = ask_together(engine, *([RenderedItem(tuple(ids))] for ids in filling))
    engine.close()
    expected = model.score_fn(model.params, model.batch([build_tree([ids]) for ids in filling]))
    np.testing.assert_allclose([score.value for (score,) in answers], np.asarray(expected)[:2, 0], atol=1e-5)


def test_others_than_this_machine_need_a_token_and_an_address_must_be_free() -> None:
    def start(model: str = "/no/model", **options: Any) -> None:
        serve(model, options=ServeOptions(**options), loading=LoadOptions())

    for host in ("0.0.0.0", "", "::", "example.org"):
        with pytest.raises(RunError, match="set PRB_SERVE_TOKEN"):
            start(host=host, port=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RunError, match=r"cannot serve at 127.0.0.1:\d+: "):
            start(port=taken.getsockname()[1])
    with pytest.raises(RunError, match=r"cannot serve at 127\.0\.0\.1:70000"):
        start(port=70_000)
    with pytest.raises(RunError, match="max_length: no effect on baseline:length"):
        start("baseline:length", port=0, view=ViewOptions(max_length=9))


def test_marks_around_a_text_are_taken_off_in_one_pass() -> None:
    for text, expected in (
        ("<pad><pad>a<eos>b<eos><pad>", "a<eos>b<eos>"), ("a", "a<eos>"), ("<pad>", "<eos>"), ("", "<eos>"),
        ("<pad", "<pad<eos>"),
    ):  # fmt: skip
        assert ended_once(text, eos="<eos>", pad="<pad>") == expected
    assert ended_once("a</s></s>", eos="</s>", pad="</s>") == "a</s>"
    assert ended_once("a", eos=None, pad=None) == "a"
    begun = time.monotonic()
    assert ended_once("<pad>" * 250_000 + "a" + "<eos>" * 250_000, eos="<eos>", pad="<pad>") == "a<eos>"
    assert time.monotonic() - begun < 5


def test_long_texts_are_refused_before_they_are_tokenised_and_nothing_is_tried_twice(
    model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = model.reader
    view = reader.view(ViewOptions(max_length=64))
    maker, calls, sizes = TreeMaker(reader, view, 4), list[int](), Sizes(posts=10, tokens=64)
    tokenize = ChatTokenizer.tokenize

    def counted(self: ChatTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        calls.append(len(texts))
        return tokenize(self, texts)

    monkeypatch.setattr(ChatTokenizer, "tokenize", counted)
    question = (prb.Message("user", "?"),)
    posts = (prb.Post(id="1", category="", text="a" * 100_001),)
    lengthy = (prb.Message("user", "a" * 100_001),)
    for item, message in (
        (
            ChatItem(question, "a" * 1025),
            "response 0: its response has 1,025 characters; at most 1,024 are read where",
        ),
        (ChatItem(lengthy, "a"), "its prompt has 100,001 characters; at most 100,000"),
        (ChatItem(question, "a", profile=posts), "its profile has 100,001 characters"),
        (RenderedItem("a" * 1025), "its input has 1,025 characters; at most 1,024"),
        (RenderedItem("a" * 100_001, keep=5), "its input has 100,001 characters; at most 100,000"),
    ):
        with pytest.raises(TooLargeError, match=message):
            sizes.check_texts([item])
    assert not calls
    sizes.check_texts(
        [ChatItem(question, "a" * 1024), RenderedItem((1,) * 10_000), RenderedItem("a" * 100_000, keep=5)]
    )

    long = ChatItem(question, "word " * 100)
    reader.encode_each([prb.Comparison(id="1", prompt=question, responses=[long.response])], view=view)
    once = len(calls)
    calls.clear()
    trees, errors = maker.make_trees([long])
    assert (trees, list(errors), len(calls)) == ([], [0], once)
    assert isinstance(errors[0], TooLongError)
    first, second = (ChatItem(question, text) for text in "ab")
    trees, errors = maker.make_trees([first, long, second, RenderedItem((1,) * 65)])
    assert ([tree.members for tree in trees], sorted(errors)) == ([(0,), (2,)], [1, 3])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://testserver"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_pages_of_other_sites_are_refused_without_a_token(headers: dict[str, str], status: int) -> None:
    with TestClient(app_with(scores)) as client:
        sent = {"Content-Type": "application/json"} | headers
        assert client.post("/score", content=json.dumps(GOOD), headers=sent).status_code == status
        if "Content-Type" not in headers:
            for path in ("/v1/models", "/metrics"):
                assert client.get(path, headers=headers).status_code == status


def test_fields_that_change_nothing_are_named_and_near_misses_refused() -> None:
    with TestClient(app_with(scores)) as client:
        odd = {"model": "m", "r\u00e9ponse": 1, "a\r\nX-Evil: 1": 2, "texts": ["b"], "user": None}
        answer = client.post("/score", json=GOOD | odd)
        ignored = "model, texts, user, and 2 more"
        assert (answer.status_code, answer.headers["X-PRB-Ignored"]) == (200, ignored)
        answer = client.post("/score", json=GOOD | {"user_id": "u", "profile": []})
        assert "X-PRB-Ignored" not in answer.headers
        for name, meant in (
            ("user", "user_id"), ("userId", "user_id"), ("profiles", "profile"), ("history", "profile"),
            ("profil", "profile"), ("uesr_id", "user_id"),
        ):  # fmt: skip
            answer = client.post("/score", json=GOOD | {name: "u"})
            expected = f"field '{name}': unknown; expected '{meant}'"
            assert (answer.status_code, expected in answer.json()["error"]["message"]) == (400, True)


def test_a_profile_of_broken_json_is_refused_and_an_end_mark_is_no_text() -> None:
    seen: list[Item] = []

    def remembered(items: Sequence[Item]) -> list[Score]:
        seen.extend(items)
        return scores(items)

    with TestClient(app_with(remembered)) as client:
        answer = client.post("/score", json=GOOD | {"profile": '[{"id": "1"'})
        assert answer.status_code == 400
        assert "field 'profile': begins like JSON, but is not valid JSON" in answer.json()["error"]["message"]
        assert client.post("/slime", json={"prompt": "q", "response": "a<|im_end|>"}).status_code == 200
    assert [item.response for item in seen if isinstance(item, ChatItem)] == ["a"]


def test_what_a_template_would_read_is_not_dropped() -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    call = [{"type": "function", "function": {"name": "kettle"}}]
    with TestClient(app_with(scores)) as client:
        for path, body, field in (
            ("/classify", {"messages": [turns[0], turns[1] | {"images": ["a.png"]}]}, "messages[1].images"),
            ("/classify", {"input": "q a", "tools": call}, "tools"),
            ("/get_reward", {"query": ["q a"], "chat_template_kwargs": {"x": 0}}, "chat_template_kwargs"),
            ("/pooling", {"messages": turns, "documents": [{"text": "d"}]}, "documents"),
            ("/score", {"queries": [[turns[0] | {"videos": ["v"]}]], "documents": ["a"]}, "queries[0][0].videos"),
            ("/slime", {"prompt": "q", "response": "a", "functions": call}, "functions"),
        ):  # fmt: skip
            answer = client.post(path, json=body)
            told = f"field '{field}': is not rendered"
            assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), (
                answer.json()
            )
        nothing = {
            "tools": [],
            "chat_template_kwargs": {},
            "messages": [turn | {"tool_calls": None} for turn in turns],
        }
        assert client.post("/classify", json=nothing).status_code == 200
        for path, body in (
            ("/classify", {"messages": [turns[0], turns[1] | {"tool_calls": call, "thinking": "r"}]}),
            ("/rerank", {"query": "q", "documents": ["a"], "chat_template_kwargs": {"x": 0}}),
        ):
            assert client.post(path, json=body | {"tools": call}).status_code == 200


def test_whatever_scores_is_served() -> None:
    """A baseline, and a function that fails for some: one request after another, with the same answers and errors."""

    def score(comparison: prb.Comparison) -> list[float]:
        if comparison.user_id == "stranger":
            raise RunError("SECRET")
        return [len(response) + len(comparison.profile) for response in comparison.responses]

    for model, more in (("baseline:length", 0), (score, 1)):
        served = make_served(open_scorer(model, LoadOptions()), ServeOptions())
        with TestClient(make_app(served), base_url="http://127.0.0.1") as client:
            asked = {"queries": "?", "documents": ["a", "bcd"], "profile": [{"text": "tea"}]}
            data = client.post("/score", json=asked | {"user_id": ["u", None]}).json()["data"]
            assert [entry["score"] for entry in data] == [1 + more, 3 + more]
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ab"}]
            assert client.post("/classify", json={"messages": messages}).json()["data"][0]["probs"] == [2]
            answer = client.post("/classify", json={"input": "a"})
            assert (answer.status_code, "send messages" in answer.text) == (400, True)
            assert client.get("/v1/models").json()["data"][0]["identity"]["name"]
            if more:
                answer = client.post("/score", json=GOOD | {"user_id": "stranger"})
                assert (answer.status_code, "SECRET" in answer.text) == (500, False)
        served.close()
