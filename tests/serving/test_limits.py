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
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.load import open_scorer
from prb_jax.serving import engine as engine_module
from prb_jax.serving import tree_scorer
from prb_jax.serving.app import Figures, Served, make_app
from prb_jax.serving.engine import BusyError, Engine, Scores
from prb_jax.serving.http_server import bind, run_app
from prb_jax.serving.items import (
    ChatItem,
    Item,
    NotFiniteError,
    RenderedItem,
    Score,
    TooManyCharactersError,
    TreeMaker,
    ended_once,
)
from prb_jax.serving.options import Limits, ServeOptions
from prb_jax.serving.serve import make_served, serve
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import build_tree
from tests.scoring.cudnn_model import over_cudnn_streams
from tests.scoring.records import record, write_model

GOOD = {"response_text": "a SECRET answer", "query": "?"}


class StubEngine:
    """Stands for the engine: each request is answered by `answer`."""

    def __init__(self, answer: Callable[[Sequence[Item]], Any]) -> None:
        self.answer, self.waiting, self.failure = answer, 0, None

    async def score(self, items: Sequence[Item]) -> Scores:
        found = self.answer(items)
        return await found if asyncio.iscoroutine(found) else found


def app_with(answer: Callable[[Sequence[Item]], Any], **limits: Any) -> Any:
    engine = cast(Engine, StubEngine(answer))
    return make_app(Served("m", engine, Figures(), ServeOptions(limits=Limits(**limits), host="testserver")))


def scores(items: Sequence[Item]) -> Scores:
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
        (lambda items: [NotFiniteError("the model's score is nan")], 422, "nan"),
    ],
)
def test_what_the_scorer_cannot_do_has_its_status_and_no_default(
    answer: Callable[[Sequence[Item]], Any], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with TestClient(app_with(answer, seconds=0.05)) as client:
        found = client.post("/score", json=GOOD)
    assert (found.status_code, message in found.json()["error"]["message"]) == (status, True)
    assert ("retry-after" in found.headers) == (status in (429, 503))
    assert found.json().keys() == {"error"}
    assert "SECRET" not in capsys.readouterr().err + found.text


def test_slow_clients_are_not_waited_for() -> None:
    app = app_with(lambda items: [Score(1.0, 1, False)], seconds=0.3)
    listening = bind("127.0.0.1", 0)
    address, ready = listening.getsockname(), threading.Event()
    thread = threading.Thread(
        target=lambda: run_app(app, listening, limits=Limits(seconds=0.3, connections=3), ready=ready.set),
        daemon=True,
    )
    thread.start()
    assert ready.wait(300)
    with socket.create_connection(address, timeout=300) as head, socket.create_connection(address) as body:
        head.sendall(b"POST /score HTTP/1.1\r\nHost:")
        typed = b"Host: localhost\r\nContent-Type: application/json\r\n"
        body.sendall(b"POST /score HTTP/1.1\r\n" + typed + b"Content-Length: 50\r\n\r\n{")
        assert b" 408 " in body.recv(1000)
        assert head.recv(1000) == b""  # closed
        assert httpx.post(f"http://127.0.0.1:{address[1]}/score", json=GOOD).json() == {"score": 1.0}
        many = [socket.create_connection(address, timeout=300) for _ in range(4)]
        many[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 503 " in many[-1].recv(1000)
        for each in many:
            each.close()


def test_padded_batches_and_many_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, where trees are padded to fixed shapes: whatever comes, nothing is compiled for it."""
    monkeypatch.setattr(tree_scorer, "BUCKETS", ((64,), (1, 4), (64,)))
    folder = write_model(tmp_path, "llama", num_hidden_layers=1)
    model = prb.load(folder)
    several = [record(number, 3) for number in range(6)]
    expected = model.score(several, max_length=160)
    padded = replace(model, stream_fn=None)
    options = ServeOptions(batch_tokens=512, view=ViewOptions(max_length=160), limits=Limits(waiting=18))
    engine = make_served(padded, options).engine
    programs = cast(Any, model.score_fn)._cache_size()
    view = model.reader.view(options.view)
    items = [
        RenderedItem(tuple(tree.sequence(k).tolist()))
        for tree in model.reader.encode(several, view=view)
        for k in range(3)
    ]

    async def ask() -> list[Scores | BaseException]:
        one = [engine.score([item]) for item in items]
        return await asyncio.gather(*one, engine.score(items[:1]), return_exceptions=True)

    *found, refused = asyncio.run(ask())
    engine.close()
    assert isinstance(refused, BusyError)
    values = [cast(Any, each)[0].value for each in found]
    np.testing.assert_allclose(values, np.concatenate(expected), atol=1e-5)
    assert cast(Any, model.score_fn)._cache_size() == programs
    assert engine.waiting == 0


def test_streams_with_tables_of_keys_have_fixed_shapes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs with the attention "streams": a program for each length, whatever conversations come."""
    model = prb.load(write_model(tmp_path, "llama", num_hidden_layers=1))
    several = [record(number, 3) for number in range(6)]
    expected = model.score(several, max_length=160)
    streams = over_cudnn_streams(model, monkeypatch)
    view = ViewOptions(max_length=160)
    scorer = tree_scorer.open_tree_scorer(streams, view, batch_tokens=1024)
    scorer.compile()
    compiled = cast(Any, streams.stream_fn)._cache_size
    assert compiled() == len(tree_scorer.PARTS)
    trees = model.reader.encode(several, view=model.reader.view(view))
    items = [RenderedItem(tuple(tree.sequence(k).tolist())) for tree in trees for k in range(3)]
    found = [cast(Any, score).value for size in (1, 4, 13) for score in scorer(items[:size])]
    wanted = np.concatenate(expected)
    np.testing.assert_allclose(found, [*wanted[:1], *wanted[:4], *wanted[:13]], atol=1e-5)
    assert compiled() == len(tree_scorer.PARTS)


def test_conversations_that_begin_alike_are_computed_together_however_many_wait(tmp_path: Path) -> None:
    """The second response of a pair is never left for a later batch, which would read the prompt again."""
    model = prb.load(write_model(tmp_path, "llama", num_hidden_layers=1))
    silent = replace(
        model, stream_fn=cast(Any, lambda params, batch: np.zeros(batch.reads.shape, np.float32))
    )
    served = make_served(silent, ServeOptions(batch_tokens=512))
    engine = served.engine
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 90, 150).tolist() for _ in range(40)]
    pairs = [[RenderedItem((*prompt, *range(k, k + 10))) for k in (5, 6)] for prompt in prompts]

    async def ask() -> list[Scores]:
        return await asyncio.gather(*map(engine.score, pairs))

    assert [len(found) for found in asyncio.run(ask())] == [2] * 40
    engine.close()
    tokens = sum(build_tree([cast(Any, item).content for item in pair]).tokens for pair in pairs)
    computed = re.search(r"^prb_\w*tokens_total (\S+)", served.figures.text().decode(), re.MULTILINE)
    assert computed is not None
    assert float(computed[1]) == tokens


def test_a_batch_that_fails_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    model = prb.load(write_model(tmp_path, "llama", num_hidden_layers=1))
    calls: list[int] = []

    def score(params: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the three before it are those that compile
            raise RuntimeError("out of memory")
        return np.full(batch.reads.shape, np.nan if len(calls) == 5 else 2.0, np.float32)

    broken = replace(model, stream_fn=cast(Any, score))
    served = make_served(broken, ServeOptions(batch_tokens=1024))
    with TestClient(make_app(served), base_url="http://127.0.0.1") as client:
        asked = [client.post("/score", json=GOOD) for _ in range(3)]
    served.engine.close()
    assert [each.status_code for each in asked] == [500, 422, 200]
    assert asked[-1].json() == {"score": 2.0}


def test_a_cpu_computes_two_batches_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "lanes", lambda mesh: 2)
    model = prb.load(write_model(tmp_path, "llama", num_hidden_layers=1))
    both = threading.Barrier(
        2, timeout=300
    )  # passed by two batches at the same time, and broken by one alone
    warm_up = [True]

    def score(params: Any, batch: Any) -> Any:
        if not warm_up:
            both.wait()
        return cast(Any, model.stream_fn)(params, batch)

    engine = make_served(replace(model, stream_fn=cast(Any, score)), ServeOptions(batch_tokens=256)).engine
    warm_up.clear()
    encoded = [model.encode([record(number, 1)])[0] for number in (1, 2)]
    trees = [
        build_tree([np.resize(tree.sequence(0), 200).tolist()]) for tree in encoded
    ]  # each fills a stream
    items = [RenderedItem(tuple(tree.sequence(0).tolist())) for tree in trees]

    async def ask() -> list[Scores]:
        return await asyncio.gather(*(engine.score([item]) for item in items))

    found = [cast(Any, each)[0].value for each in asyncio.run(ask())]
    engine.close()
    expected = model.score_fn(model.params, model.batch(trees))
    np.testing.assert_allclose(found, np.asarray(expected)[:2, 0], atol=1e-5)


def test_others_than_this_machine_need_a_token_and_an_address_must_be_free() -> None:
    def start(**options: Any) -> None:
        serve("/no/model", options=ServeOptions(**options), loading=LoadOptions())

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
    with pytest.raises(RunError, match="max_length: without effect on baseline:length"):
        serve(
            "baseline:length",
            options=ServeOptions(port=0, view=ViewOptions(max_length=9)),
            loading=LoadOptions(),
        )


def test_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with TestClient(app_with(lambda items: [Score(1.0, 1, False)])) as client:
        client.post("/score", json=GOOD)
    line = json.loads(capsys.readouterr().err.splitlines()[0])
    assert (line["path"], line["status"], line["items"]) == ("/score", 200, 1)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = prb.load(write_model(tmp_path, "llama", num_hidden_layers=1)).reader
    view = reader.view(ViewOptions(max_length=64))
    maker, calls = TreeMaker(reader, view, 4), list[int]()
    tokenize = ChatTokenizer.tokenize

    def counted(self: ChatTokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        calls.append(len(texts))
        return tokenize(self, texts)

    monkeypatch.setattr(ChatTokenizer, "tokenize", counted)
    question = (prb.Message("user", "?"),)
    posts = (prb.Post(id="1", category="", text="a" * 100_001),)
    for item, message in (
        (
            ChatItem(question, "a" * 1025),
            "response 0: its response has 1,025 characters; at most 1,024 are read where",
        ),
        (
            ChatItem((prb.Message("user", "a" * 100_001),), "a"),
            "its prompt has 100,001 characters; at most 100,000",
        ),
        (ChatItem(question, "a", profile=posts), "its profile has 100,001 characters"),
        (RenderedItem("a" * 1025), "its input has 1,025 characters; at most 1,024"),
        (RenderedItem("a" * 100_001, keep=5), "its input has 100,001 characters; at most 100,000"),
    ):
        with pytest.raises(TooManyCharactersError, match=message):
            maker.check_sizes([item])
    assert not calls
    maker.check_sizes(
        [ChatItem(question, "a" * 1024), RenderedItem((1,) * 10_000), RenderedItem("a" * 100_000, keep=5)]
    )

    long = ChatItem(question, "word " * 100)
    reader.encode_each([prb.Comparison(id="1", prompt=question, responses=[long.response])], view=view)
    once = len(calls)
    calls.clear()
    trees, errors = maker.make_trees([long])
    assert (trees, list(errors), len(calls)) == ([], [0], once)
    assert isinstance(errors[0], TooLongError)
    trees, errors = maker.make_trees(
        [ChatItem(question, "a"), long, ChatItem(question, "b"), RenderedItem((1,) * 65)]
    )
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
        odd = {"model": "m", "r\u00e9ponse": 1, "a\r\nX-Evil: 1": 2, "documents": ["b"], "user": None}
        found = client.post("/score", json=GOOD | odd)
        assert (found.status_code, found.headers["X-PRB-Ignored"]) == (
            200,
            "model, documents, user, and 2 more",
        )
        assert (
            "X-PRB-Ignored" not in client.post("/score", json=GOOD | {"user_id": "u", "profile": []}).headers
        )
        for name, meant in (
            ("user", "user_id"), ("userId", "user_id"), ("profiles", "profile"), ("history", "profile"),
        ):  # fmt: skip
            found = client.post("/score", json=GOOD | {name: "u"})
            expected = f"field '{name}': unknown; expected '{meant}'"
            assert (found.status_code, expected in found.json()["error"]["message"]) == (400, True)


def test_whatever_scores_is_served() -> None:
    """A baseline, and a function that fails for some: one request after another, with the same answers and errors."""

    def score(comparison: prb.Comparison) -> list[float]:
        if comparison.user_id == "stranger":
            raise RunError("SECRET")
        return [len(response) + len(comparison.profile) for response in comparison.responses]

    for model, more in (("baseline:length", 0), (score, 1)):
        served = make_served(open_scorer(model, LoadOptions()), ServeOptions())
        with TestClient(make_app(served), base_url="http://127.0.0.1") as client:
            asked = {
                "queries": "?",
                "documents": ["a", "bcd"],
                "profile": [{"text": "tea"}],
                "user_id": ["u", None],
            }
            found = client.post("/score", json=asked).json()["data"]
            assert [answer["score"] for answer in found] == [1 + more, 3 + more]
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ab"}]
            assert client.post("/classify", json={"messages": messages}).json()["data"][0]["probs"] == [2]
            found = client.post("/classify", json={"input": "a"})
            assert (found.status_code, "send messages" in found.text) == (400, True)
            assert client.get("/v1/models").json()["data"][0]["identity"]["name"]
            if more:
                found = client.post("/score", json=GOOD | {"user_id": "stranger"})
                assert (found.status_code, "SECRET" in found.text) == (500, False)
        served.engine.close()
