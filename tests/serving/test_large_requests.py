"""Work of a request: bounded by what it may score, off the event loop, and never in the way of small requests."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import DataError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records import comparison as comparison_module
from prb_jax.records import fields as checks
from prb_jax.records.comparison import Post
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.serving import request_reader
from prb_jax.serving.engine import Engine
from prb_jax.serving.items import ChatItem, Item, NotFiniteError, Score, TreeMaker
from prb_jax.serving.options import ServeOptions
from prb_jax.serving.request_reader import LARGE, RequestReader, understand
from prb_jax.serving.routes import ROUTES
from prb_jax.serving.scorer_engine import ScorerEngine
from prb_jax.serving.serve import make_served
from prb_jax.serving.sizes import PARTS, Sizes, TooLargeError
from tests.serving.local_server import serving

QUESTION = "Tea or coffee?"
PROMPT = (prb.Message("user", QUESTION),)
SIZES = Sizes(items=1024, posts=10, tokens=2048)


def body_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """A list that grows by one with each call."""
    calls, before = list[int](), getattr(owner, name)

    def count(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return before(*args, **more)

    monkeypatch.setattr(owner, name, count)
    return calls


@pytest.fixture
def engine(model: prb.RewardModel) -> Any:
    served = make_served(model, ServeOptions(batch_tokens=512, view=prb.ViewOptions(max_length=512)))
    yield served.engine
    served.close()


def test_a_profile_is_read_and_hashed_once_however_many_responses_share_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts, hashes = (
        counted(monkeypatch, *place) for place in ((comparison_module, "_post"), (Post, "__hash__"))
    )
    documents = [f"{k} tea" for k in range(1024)]
    body = body_of(query=QUESTION, documents=documents, profile=[{"text": f"{k} tea"} for k in range(5000)])
    wanted = understand("/rerank", body, SIZES)
    assert len(posts) == 5000
    assert {len(item.profile) for item in wanted.items if isinstance(item, ChatItem)} == {10}  # those shown
    values = asyncio.run(engine.score(wanted.items))
    assert len(values) == 1024
    groups = 1024 // engine._scorer.maker.most
    assert len(posts) <= 5000 + 10 * groups
    assert len(hashes) <= 10 * (1 + groups)


def test_limits_are_checked_before_anything_is_made_of_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, posts = counted(monkeypatch, checks, "text"), counted(monkeypatch, comparison_module, "_post")
    many, turns = ["a"] * 1025, [{"role": "user", "content": ""}] * (PARTS + 1)
    items, parts = "at most 1024 responses, found 1025", f"at most {PARTS:,} entries, found {PARTS + 1:,}"
    for path, fields, message in (
        ("/rerank", {"query": "?", "documents": many}, items),
        ("/score", {"queries": "?", "documents": many}, items),
        ("/classify", {"input": many}, items),
        ("/get_reward", {"query": many}, items),
        ("/classify", {"messages": turns}, f"messages: expected {parts}"),
        ("/slime", {"prompt": turns, "response": "a"}, f"prompt: expected {parts}"),
        (
            "/score",
            {"query": "?", "response_text": "a", "profile": [{}] * (PARTS + 1)},
            f"profile: expected {parts}",
        ),
        ("/score", {"queries": ["?"] * 5000, "documents": ["a"]}, "as many as the 1 documents, found 5000"),
    ):
        with pytest.raises(DataError, match=message):
            understand(path, body_of(**fields), SIZES)
        assert len(texts) <= 3, path
        assert not posts
        texts.clear()


def test_what_has_no_characters_of_its_own_counts_too() -> None:
    empty = [{"role": "user", "content": ""}] * 6251
    with pytest.raises(TooLargeError, match=r"1,000,001 characters; at most 1,000,000 are read$"):
        understand("/slime", body_of(prompt="?", response="a" * 1_000_001), Sizes())
    for fields, message in (
        ({"queries": [empty], "documents": ["a"]}, "its prompt has 6,251 messages; at most 6,250"),
        ({"profile": [{"text": "", "category": "a" * 100_001}]}, "its profile has 100,001 characters"),
        (
            {
                "queries": [f"{k}?" for k in range(1024)],
                "documents": ["a"] * 1024,
                "profile": [{"text": "a"}] * 100,
            },
            "103,424 messages and posts; at most 100,000",
        ),
    ):
        given = {"queries": "?", "documents": ["a"]} | fields
        with pytest.raises(TooLargeError, match=message):
            understand("/score", body_of(**given), replace(SIZES, posts=None))


def test_tools_count_as_a_part_of_their_conversation_once() -> None:
    """Tools of 40,000 characters beside a prompt, and beside responses that are whole conversations."""
    tool = {"type": "function", "function": {"name": "kettle", "description": "a" * 40_000}}
    shared = {"queries": [[{"role": "user", "content": "?"}]], "documents": ["a", "b", "c"]}
    wanted = understand("/score", body_of(**shared, tools=[tool, tool]), SIZES)
    prompts = {id(item.prompt) for item in wanted.items if isinstance(item, ChatItem)}
    assert len(prompts) == 1  # looked at once, and one tree
    with pytest.raises(TooLargeError, match=r"its prompt has 120,\d{3} characters; at most 100,000"):
        understand("/score", body_of(**shared, tools=[tool] * 3), SIZES)
    whole = {
        "queries": [[]],
        "documents": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]],
    }
    with pytest.raises(TooLargeError, match=r"its response has 40,\d{3} characters; at most 32,768"):
        understand("/score", body_of(**whole, tools=[tool]), SIZES)


LARGE_BODIES: dict[str, dict[str, Any]] = {
    "/score": {"response_text": "a", "query": "?", "odd": 1},
    "/v1/score": {"queries": ["?", "!"], "documents": ["a", "b"], "user_id": ["u", None]},
    "/rerank": {"query": "?", "documents": ["a", "b"], "profile": [{"text": "tea"}], "top_n": 1},
    "/classify": {"input": [[1, 2], [3]]},
    "/pooling": {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]},
    "/v1/embeddings": {"input": "tea", "encoding_format": "base64"},
    "/get_reward": {"query": ["?a"], "prompts": ["?"], "labels": ['{"question": "?", "user_id": "u"}']},
    "/slime": {"prompt": "?", "response": "a", "activation": True},
    "/compare": {
        "conversation_history": [{"role": "user", "content": "?"}],
        "response_objs": [
            {"output": [{"type": "message", "content": [{"type": "output_text", "text": "a"}]}]}
        ],
    },
    "/verify": {
        "responses_create_params": {"input": "?", "instructions": "Be brief."},
        "response": {"output": [{"type": "message", "content": [{"type": "output_text", "text": "a"}]}]},
        "user_id": "u",
    },
}


def test_another_process_understands_large_bodies_as_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, scores = RequestReader(SIZES), [Score(0.5, 3, False), Score(1.5, 4, True)]
    bodies = {path: body_of(**fields, padding="x" * LARGE) for path, fields in LARGE_BODIES.items()}
    expected = {path: understand(path, body, SIZES) for path, body in bodies.items()}
    here = counted(monkeypatch, request_reader, "understand")

    def plain(answer: Any) -> str:
        """Without what differs from answer to answer."""
        return json.dumps({name: value for name, value in answer.items() if name not in ("id", "created")})

    try:
        for path, body in bodies.items():
            found = asyncio.run(reader.read(path, body))
            count = len(found.items)
            assert found.ignored == expected[path].ignored != ""
            for item, other in zip(found.items, expected[path].items, strict=True):
                assert str(item) == str(other)
            answers = [one.reply(scores[:count], "m") for one in (found, expected[path])]
            if isinstance(answers[0], dict):
                answers = [plain(answer) for answer in answers]
            assert answers[0] == answers[1]
        with pytest.raises(TooLargeError, match="at most 1024 responses"):
            asyncio.run(reader.read("/rerank", body_of(query="?", documents=["a"] * 100_000)))
        with pytest.raises(DataError, match="not valid JSON"):
            asyncio.run(reader.read("/rerank", b" " * LARGE + b"{"))
        assert not here
        asyncio.run(reader.read("/slime", body_of(prompt="?", response="a")))
        assert len(here) == 1
        process = reader._large._process
        assert process is not None
        process.kill()
        with pytest.raises(RuntimeError, match="has ended"):
            asyncio.run(reader.read("/slime", bodies["/slime"]))
        assert len(asyncio.run(reader.read("/slime", bodies["/slime"])).items) == 1
    finally:
        reader.close()
    assert ROUTES.keys() - {"/v1/rerank", "/v2/rerank", "/v1/classify"} == LARGE_BODIES.keys()


def test_a_large_request_has_the_offline_scores(model: prb.RewardModel) -> None:
    documents = [f"{k} {'tea and bread ' * 30}" for k in range(300)]
    given = prb.Comparison(id="1", question=QUESTION, responses=documents)
    with serving(model, batch_tokens=1024) as url:
        answer = httpx.post(f"{url}/score", json={"queries": QUESTION, "documents": documents}, timeout=300)
    values = [entry["score"] for entry in answer.json()["data"]]
    np.testing.assert_allclose(values, model.score(given), atol=1e-5)


def large_request(count: int = 300) -> list[Item]:
    """A request of several pieces: responses to one prompt, some hundred characters each."""
    return [ChatItem(PROMPT, f"{k} {'tea ' * 60}") for k in range(count)]


def blocked_trees(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[int]]:
    """Whether trees of several responses begin to be made, what lets them go on, and how many are made of each call."""
    begun, go_on, sizes = threading.Event(), threading.Event(), list[int]()
    make = TreeMaker.make_trees

    def wait(self: TreeMaker, items: Sequence[Item], *more: Any) -> Any:
        sizes.append(len(items))
        if len(items) > 1:
            begun.set()
            assert go_on.wait(300)
        return make(self, items, *more)

    monkeypatch.setattr(TreeMaker, "make_trees", wait)
    return begun, go_on, sizes


def test_a_small_request_does_not_wait_for_the_texts_of_a_large_one(
    engine: Engine, model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, _ = blocked_trees(monkeypatch)

    async def ask() -> tuple[float, list[Score]]:
        large = asyncio.create_task(engine.score(large_request()))
        assert await asyncio.to_thread(begun.wait, 300)
        (small,) = await asyncio.wait_for(engine.score([ChatItem(PROMPT, "Tea.")]), 300)
        assert not large.done()
        go_on.set()
        return small.value, await large

    small, large = asyncio.run(ask())
    assert small == pytest.approx(model.reward(QUESTION, "Tea."), abs=1e-5)
    responses = [item.response for item in large_request() if isinstance(item, ChatItem)]
    expected = model.score(prb.Comparison(id="1", question=QUESTION, responses=responses), max_length=512)
    np.testing.assert_allclose([score.value for score in large], expected, atol=1e-5)


def test_a_large_request_that_nobody_waits_for_is_not_read_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, sizes = blocked_trees(monkeypatch)

    async def ask(items: list[Item], end: Callable[[asyncio.Task[Any]], Any]) -> Any:
        large = asyncio.create_task(engine.score(items))
        assert await asyncio.to_thread(begun.wait, 300)
        end(large)
        go_on.set()
        return (await asyncio.gather(large, return_exceptions=True))[0]

    many = large_request(1024)
    assert isinstance(asyncio.run(ask(many, lambda task: task.cancel())), asyncio.CancelledError)
    assert len(asyncio.run(engine.score([ChatItem(PROMPT, "Tea.")]))) == 1
    assert sum(sizes) < 1024
    for event in (begun, go_on):
        event.clear()
    sizes.clear()
    many[5] = ChatItem(PROMPT, "tea " * 2000)
    refused = asyncio.run(ask(many, lambda task: None))  # whole or not at all: the other pieces are left
    assert isinstance(refused, DataError)
    assert str(refused).startswith("response 5: ")
    assert len(asyncio.run(engine.score([ChatItem(PROMPT, "Tea.")]))) == 1
    assert sum(sizes) < 1024
    assert engine.waiting == 0


def test_a_prompt_is_cut_to_fit_the_responses_of_its_own_request(
    engine: Engine, model: prb.RewardModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two clients ask about one prompt that is too long, with responses of other lengths: as if each were alone."""
    prompt = (prb.Message("user", "tea or coffee " * 300),)
    requests = [[ChatItem(prompt, "bread " * count)] for count in (1, 60)]
    blocker, held = threading.Event(), threading.Event()
    make = TreeMaker.make_trees

    def wait(self: TreeMaker, items: Sequence[Item], *more: Any) -> Any:
        if not held.is_set():
            held.set()
            assert blocker.wait(300)
        return make(self, items, *more)

    monkeypatch.setattr(TreeMaker, "make_trees", wait)

    async def ask() -> list[list[Score]]:
        first = asyncio.create_task(engine.score([ChatItem(PROMPT, "Tea.")]))
        await asyncio.to_thread(held.wait, 300)
        both = [asyncio.create_task(engine.score(request)) for request in requests]
        await asyncio.sleep(0.1)  # both wait, and become trees together
        blocker.set()
        await first
        return [await task for task in both]

    for request, (score,) in zip(requests, asyncio.run(ask()), strict=True):
        one = prb.Comparison(id="1", prompt=prompt, responses=[request[0].response])
        assert score.truncated
        assert score.value == pytest.approx(model.score(one, max_length=512).item(), abs=1e-5)


def test_other_scorers_score_a_piece_of_each_request_in_turn() -> None:
    order, begun, go_on = list[str](), threading.Event(), threading.Event()

    def score(comparison: prb.Comparison) -> list[float]:
        order.append(comparison.question)
        begun.set()
        assert go_on.wait(300)
        return [float(len(response)) for response in comparison.responses]

    served = make_served(open_scorer(score, LoadOptions()), ServeOptions())

    def request(name: str, count: int) -> list[Item]:
        return [ChatItem((prb.Message("user", f"{name} {k}"),), "a" * 15_000) for k in range(count)]

    async def ask() -> list[Any]:
        large = asyncio.create_task(served.engine.score(request("large", 8)))
        await asyncio.to_thread(begun.wait, 300)
        small = asyncio.create_task(served.engine.score([ChatItem((prb.Message("user", "small"),), "ab")]))
        await asyncio.sleep(0.1)
        go_on.set()
        return list(await asyncio.gather(large, small))

    large, small = asyncio.run(ask())
    assert ([score.value for score in large], small[0].value) == ([15_000.0] * 8, 2.0)
    assert order.index("small") < 3
    served.close()

    asked = list[int]()

    def fail(chats: Sequence[ChatItem]) -> list[Score | prb.PrbError]:
        asked.append(len(chats))
        return [Score(1.0, 0, False)] * (len(chats) - 1) + [NotFiniteError("nan")]

    engine = ScorerEngine(fail, most=100)
    with pytest.raises(NotFiniteError, match="response 0: nan"):
        asyncio.run(engine.score(request("large", 8)))
    assert asked == [1]  # the others are not scored any more
    engine.close()


def test_what_goes_between_processes_is_small() -> None:
    """Of a profile only the posts that are shown; token ids as an array."""
    posts = [{"text": f"{k} tea"} for k in range(50_000)]
    wanted = understand("/score", body_of(response_text="a", query="?", profile=posts), SIZES)
    assert len(pickle.dumps(wanted)) < 3000
    ids = understand("/classify", body_of(input=[[5] * 2000] * 100), SIZES)
    assert len(pickle.dumps(ids)) < 4 * 2000 * 100 + 20_000
