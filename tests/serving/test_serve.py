"""`prb serve`: every request shape has the offline scores; bad clients get their status and change nothing."""

from __future__ import annotations

import base64
import http.client
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.remote.score_server import open_remote
from prb_jax.runs.behaviour import reward_identity
from prb_jax.runs.kind import as_recorded
from prb_jax.text.tokenizer import ChatTokenizer
from tests.rl.tiny import BANDIT, comparisons, settings, write_tiny_policy
from tests.scoring.records import write_model

QUESTION, ANSWERS = "Tea or coffee?", ["Tea, of course.", "Coffee.", "Neither of the two."]
POSTS = [{"id": "1", "category": "food", "text": "Coffee keeps me awake in the hills."}]
SECRET = "never to be logged"


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    port: int
    model: prb.RewardModel
    log: Path

    def ask(
        self, path: str, body: Any = None, *, token: str | None = "secret", raw: bytes | None = None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if "json" in answer.headers["Content-Type"] else text

    def offline(
        self, *, question: str = QUESTION, posts: Any = (), answers: Any = ANSWERS, **options: Any
    ) -> Any:
        given = prb.Comparison(id="1", question=question, responses=answers, profile=posts)
        found = self.model.score(given, **options).tolist()
        return pytest.approx(found, abs=1e-5)

    def figure(self, name: str) -> float:
        lines = self.ask("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    command = [
        sys.executable, "-m", "prb_jax", "serve", str(folder), "--port", "0", "--max-bytes", "20000", "--max-items",
        "40", "--batch-tokens", "1024", "--max-length", "512",
    ]  # fmt: skip
    log = folder / "log.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PRB_SERVE_TOKEN": "secret"},
        )
    model = prb.load(folder)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"serving {folder} at http://127.0.0.1:"), log.read_text()
    yield Server(process, int(line.rsplit(":", 1)[1]), model, log)
    process.kill()
    process.wait()


def test_the_paper_s_server_has_the_offline_scores(server: Server) -> None:
    assert server.ask("/health", token=None) == (200, {"status": "ok"})
    found = [server.ask("/score", {"response_text": a, "query": QUESTION, "profile": ""}) for a in ANSWERS]
    assert [status for status, _ in found] == [200] * 3
    assert [answer["score"] for _, answer in found] == server.offline()
    _, found = server.ask(
        "/score", {"response_text": ANSWERS[0], "query": QUESTION, "profile": "Post 1: tea"}
    )
    assert [found["score"]] == server.offline(question=QUESTION + "Post 1: tea", answers=ANSWERS[:1])


def test_a_profile_of_posts_is_shown_as_offline(server: Server) -> None:
    expected = server.offline(posts=POSTS)
    assert expected.expected != server.offline()
    _, found = server.ask("/v1/score", {"queries": QUESTION, "documents": ANSWERS, "profile": POSTS})
    assert [each["score"] for each in found["data"]] == expected
    several = {"queries": QUESTION, "documents": ANSWERS[:2], "profile": [POSTS, []], "user_id": ["a", "b"]}
    _, found = server.ask("/score", several)
    values = [each["score"] for each in found["data"]]
    assert values == pytest.approx([expected.expected[0], server.offline().expected[1]], abs=1e-5)


def test_vllm_and_sglang_shapes_have_the_offline_scores(server: Server) -> None:
    expected = server.offline()
    values = expected.expected
    _, found = server.ask("/rerank", {"query": QUESTION, "documents": ANSWERS, "top_n": 2})
    order = np.argsort(values)[::-1][:2].tolist()
    assert [each["index"] for each in found["results"]] == order
    assert [each["document"]["text"] for each in found["results"]] == [ANSWERS[k] for k in order]
    assert [each["relevance_score"] for each in found["results"]] == pytest.approx([values[k] for k in order])

    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWERS[1]}]
    (tree,) = server.model.encode([prb.Comparison(id="1", question=QUESTION, responses=ANSWERS)])
    ids = [tree.sequence(k).tolist() for k in range(3)]
    _, found = server.ask("/classify", {"model": "m", "messages": messages, "activation": False})
    (data,) = found["data"]
    assert data == {
        "index": 0,
        "label": "LABEL_0",
        "probs": [pytest.approx(values[1], abs=1e-5)],
        "num_classes": 1,
    }
    assert found["usage"]["prompt_tokens"] == len(ids[1])
    _, found = server.ask("/v1/classify", {"messages": messages, "use_activation": True})
    assert found["data"][0]["probs"] == [pytest.approx(1 / (1 + math.exp(-values[1])), abs=1e-6)]
    text = server.model.tokenizer.tokenizer.decode(ids[0])
    long = server.model.tokenizer.tokenizer.decode([7] * 100) + text
    shortened = {"input": long, "truncate_prompt_tokens": len(ids[0])}
    for body, places in (
        ({"input": ids}, [0, 1, 2]),
        ({"input": ids[2]}, [2]),
        ({"input": text}, [0]),
        ({"input": [text, text]}, [0, 0]),
        (shortened, [0]),
    ):
        _, found = server.ask("/pooling", {"task": "classify", **body})
        assert [each["data"][0] for each in found["data"]] == pytest.approx(
            [values[k] for k in places], abs=1e-5
        )
    _, found = server.ask("/v1/embeddings", {"input": ids[2]})
    assert found["data"][-1]["embedding"][-1] == pytest.approx(values[2], abs=1e-5)
    _, found = server.ask("/v1/embeddings", {"input": ids[2], "encoding_format": "base64"})
    assert np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4") == pytest.approx(
        values[2], abs=1e-5
    )


def test_clients_of_rl_trainers_get_their_rewards(server: Server) -> None:
    """The way in which verl, OpenRLHF and slime ask, and how they read the answer."""
    expected = server.offline()
    values, url = expected.expected, f"http://127.0.0.1:{server.port}"
    chat = server.model.tokenizer
    assert isinstance(chat, ChatTokenizer)
    texts = chat.render(
        [[prb.Message("user", QUESTION), prb.Message("assistant", answer)] for answer in ANSWERS]
    )
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=300) as client:
        # verl renders the conversation, drops BOS from its front, posts it, and reads the last class of the last entry
        for text, value in zip(texts, values, strict=True):
            answer = client.post("/classify", json={"model": "rm", "input": text, "activation": False})
            answer.raise_for_status()
            assert answer.json()["data"][-1]["probs"][-1] == pytest.approx(value, abs=1e-5)
        # OpenRLHF posts decoded texts with their end-of-text token and reads "rewards"
        eos = chat.tokenizer.eos_token or ""
        body = {"query": [text + eos for text in texts], "prompts": ["-"] * 3, "labels": ["-"] * 3}
        answer = client.post("/get_reward", json=body, timeout=180)
        rewards = answer.json()
        assert rewards["rewards"] == rewards["scores"]
        plain = client.post("/pooling", json={"input": body["query"], "add_special_tokens": False}).json()
        assert rewards["rewards"] == pytest.approx([each["data"][0] for each in plain["data"]], abs=1e-5)
        # OpenRLHF carries the user and the profile in the labels
        label = {"user_id": "u", "profile": POSTS, "question": QUESTION}
        starts = [text[: text.index(answer)] for text, answer in zip(texts, ANSWERS, strict=True)]
        body |= {"prompts": starts, "labels": [label, json.dumps(label), "-"]}
        found = client.post("/get_reward", json=body).json()["rewards"]
        personal = server.offline(posts=POSTS).expected
        assert found == pytest.approx([*personal[:2], rewards["rewards"][2]], abs=1e-5)
        # slime takes the whole body as the number
        prompt = [{"role": "user", "content": QUESTION}]
        for given in (QUESTION, prompt):
            answer = client.post("/slime", json={"prompt": given, "response": ANSWERS[0], "label": "x"})
            assert float(answer.text) == pytest.approx(values[0], abs=1e-5)


def test_a_policy_is_trained_by_the_served_model(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rewards of `prb ppo` are the offline scores of its rollouts, conversations, users and profiles included."""
    url, policy = f"http://127.0.0.1:{server.port}", tmp_path / "policy"
    with pytest.raises(prb.RunError, match=r"status 401: .*set PRB_SERVE_TOKEN to the server's token"):
        open_remote(url)
    monkeypatch.setenv("PRB_SERVE_TOKEN", "secret")
    remote = open_remote(url)
    assert reward_identity(remote.identity()) == reward_identity(as_recorded(server.model.identity()))
    write_tiny_policy(policy)
    turns = [{"role": role, "content": f"{role} says tea"} for role in ("user", "assistant", "user")]
    people = [
        *comparisons(2),
        prb.Comparison(id="t", prompt=turns, responses=["a", "b"], profile=POSTS, profile_order="recency"),
    ]
    given = (
        settings(policy) | BANDIT | {"steps": 1, "batch.prompts": 3, "rollout.keep": 3, "scoring.empty": -9.0}
    )
    given |= {"rollout.n": 2, "rollout.max_new_tokens": 4}
    prb.ppo(given, out=tmp_path / "run", data=people, overrides=[f"reward={url}"], progress=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    prompts = {each.id: each for each in people}
    for row in rows:
        each = prompts[row["id"]]
        if row["text"].strip():
            one = prb.Comparison(
                id="1",
                prompt=each.prompt,
                responses=[row["text"]],
                user_id=each.user_id,
                profile=each.profile,
                profile_order=each.profile_order,
            )
            assert row["reward"] == pytest.approx(server.model.score(one).item(), abs=1e-5)
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["inputs"]["reward"]["view"]["max_length"] == 512


def test_many_clients_at_once_share_prompts_and_have_the_same_scores(server: Server) -> None:
    posts = [
        {"id": str(k), "category": "food", "text": f"Post {k}: tea and bread in the rain."} for k in range(4)
    ]
    expected = server.offline(posts=posts, answers=ANSWERS * 2)
    before, scored = server.figure("prb_tokens_total"), server.figure("prb_scores_total")

    def one(number: int) -> float:
        body = {"prompt": QUESTION, "response": ANSWERS[number % 3], "profile": posts}
        status, found = server.ask("/slime", body)
        assert status == 200
        return found

    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(one, range(96)))
    assert found == pytest.approx([expected.expected[number % 3] for number in range(96)], abs=1e-5)
    assert server.figure("prb_scores_total") - scored == 96
    (tree,) = server.model.encode(
        [prb.Comparison(id="1", question=QUESTION, responses=ANSWERS[:1], profile=posts)]
    )
    assert server.figure("prb_tokens_total") - before < 96 * len(
        tree.prefix
    )  # prompts were computed together


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/score", {"query": "?"}, 400, "'documents': expected a text or a list of texts, found null"),
        ("/score", {"response_text": 3, "query": "?"}, 400, "'response_text': expected a string, found 3"),
        ("/score", {"response_text": "", "query": "?"}, 400, "responses[0]"),
        ("/score", {"response_text": "\ud800", "query": "?"}, 400, "lone surrogate"),
        ("/score", {"response_text": "a", "query": "?", "profile": [{"x": 1}]}, 400, "profile[0].text"),
        ("/score", {"queries": ["?"] * 2, "documents": ["a"] * 3}, 400, "as many as the 3 documents"),
        (
            "/score",
            {"queries": "?", "documents": ["a"], "user_id": ["u", "v"]},
            400,
            "'user_id': expected one",
        ),
        (
            "/classify",
            {"input": [1, 10**6]},
            400,
            "token id 1000000, but",
        ),
        ("/classify", {"input": [-1]}, 400, "expected token ids"),
        ("/classify", {"input": "a", "profile": [{"text": "b"}]}, 400, "send messages instead"),
        ("/classify", {"input": [1] * 513}, 413, "513 tokens, more than the limit of 512"),
        ("/classify", {"messages": [{"role": "user", "content": "?"}]}, 400, "ends with the assistant's"),
        (
            "/classify",
            {"input": "a", "activation": True, "use_activation": False},
            400,
            "contradict each other",
        ),
        (
            "/rerank",
            {"query": "?", "documents": ["a"], "top_n": 0.5},
            400,
            "'top_n': expected a whole number",
        ),
        ("/rerank", {"query": "?", "documents": ["a"] * 41}, 413, "at most 40 responses, found 41"),
        ("/score", {"response_text": "word " * 600, "query": "?"}, 413, "within max_length 512"),
        ("/score", {"response_text": "a" * 9_000, "query": "?"}, 413, "at most 8,192 are read"),
        ("/classify", {"input": "a" * 9_000}, 413, "at most 8,192 are read"),
        ("/score", {"response_text": "a", "query": "?", "userid": "u"}, 400, "expected 'user_id'"),
        ("/score", {"response_text": "a" * 30_000, "query": "?"}, 413, "a body of at most 20,000 bytes"),
        ("/slime", {"prompt": "<|im_start|>user\na", "response": "b"}, 400, "has rendered it already"),
        ("/get_reward", {"query": ["a"], "labels": [{"userid": "u"}]}, 400, "expected 'user_id'"),
        (
            "/get_reward",
            {"query": ["a"], "labels": [{"profile": POSTS}]},
            400,
            "expected 'question' beside it",
        ),
        (
            "/get_reward",
            {"query": ["a"], "labels": [{"question": "?"}]},
            400,
            "expected the beginning of the query",
        ),
        ("/nowhere", {}, 404, "expected POST to /score"),
    ],
)
def test_bad_requests_name_what_is_wrong(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    found, answer = server.ask(path, body)
    assert (found, message in answer["error"]["message"]) == (status, True), answer


def test_a_request_is_answered_whole_or_not_at_all(server: Server) -> None:
    status, answer = server.ask("/score", {"queries": QUESTION, "documents": [ANSWERS[0], ""]})
    assert status == 400
    assert answer["error"]["message"].startswith("response 1: ")


def test_what_was_cut_is_said(server: Server) -> None:
    posts = [{"id": "1", "category": "", "text": "tea " * 600}]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"queries": QUESTION, "documents": ANSWERS, "profile": posts}
    connection.request("POST", "/score", json.dumps(body), {"Authorization": "Bearer secret"})
    answer = connection.getresponse()
    assert answer.headers["X-PRB-Truncated"] == "3"
    assert [each["score"] for each in json.load(answer)["data"]] == server.offline(
        posts=posts, max_length=512
    )
    assert server.figure("prb_truncated_total") == 3


def test_strangers_garbage_and_clients_that_leave_change_nothing(server: Server) -> None:
    good = {"response_text": ANSWERS[0], "query": SECRET}
    for token in (None, "secret2", "sécret"):
        assert server.ask("/score", good, token=token)[0] == 401
    assert server.ask("/metrics", token=None)[0] == 401
    assert server.ask("/score", raw=b"{not json")[0] == 400
    assert server.ask("/score", raw=b"\xff")[0] == 400
    assert server.ask("/score", raw=b"[1]")[0] == 400
    assert server.ask("/score")[0] == 405
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: %d\r\n\r\n"
    data = json.dumps(good).encode()
    for sent in (head % 500 + b"{", head[:30], head % len(data) + data, b"\x00\xff garbage\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(sent)
    assert server.ask("/score", good)[0] == 200
    deadline = time.monotonic() + 300
    while server.figure("prb_waiting") and time.monotonic() < deadline:
        time.sleep(0.05)
    log = server.log.read_text()
    assert SECRET not in log
    assert {"path", "status", "items", "ms", "time"} == json.loads(log.splitlines()[0]).keys()
    assert 'prb_requests_total{path="other",status="405"}' in server.ask("/metrics")[1]


def test_sigterm_under_load_answers_the_requests_that_were_received(server: Server) -> None:
    """The last test of the file: it ends the server."""
    before = server.figure("prb_scores_total")
    body = json.dumps({"queries": QUESTION, "documents": [f"{k} {ANSWERS[k % 3]}" for k in range(40)]})
    asked = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(8)]
    for connection in asked:
        connection.request("POST", "/score", body, {"Authorization": "Bearer secret"})
    while server.figure("prb_waiting") + server.figure("prb_scores_total") - before < 8 * 40:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    answers = [connection.getresponse() for connection in asked]
    assert [answer.status for answer in answers] == [200] * 8
    assert all(len(json.load(answer)["data"]) == 40 for answer in answers)
    assert server.process.wait(timeout=300) == 0
