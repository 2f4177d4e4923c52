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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import prb_jax as prb
from prb_jax.runs.behaviour import reward_identity
from prb_jax.runs.kind import as_recorded
from prb_jax.scoring.remote.score_server import open_remote
from prb_jax.text.tokenizer import ChatTokenizer
from tests.behaviour.rl.tiny import BANDIT, comparisons, settings, write_tiny_policy
from tests.json_lines import read_lines
from tests.scoring.records import write_model

QUESTION, ANSWERS = "Tea or coffee?", ["Tea, of course.", "Coffee.", "Neither of the two."]
POSTS = [{"id": "1", "category": "food", "text": "Coffee keeps me awake in the hills."}]
SECRET = "never to be logged"


def _verified(*, output: Any = (), **asked: Any) -> dict[str, Any]:
    """A request of `/verify`."""
    said = {"type": "message", "content": [{"type": "output_text", "text": "Tea."}]}
    return {"responses_create_params": {"input": "?"} | asked, "response": {"output": list(output) or [said]}}


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
        return pytest.approx(self.model.score(given, **options).tolist(), abs=1e-5)

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
    log = tmp_path_factory.mktemp("log") / "log.txt"
    environment = os.environ | {"PRB_SERVE_TOKEN": "secret"}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    model = prb.load(folder)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"serving {folder} at http://127.0.0.1:"), log.read_text()
    assert f"loading {folder}; it answers when its address is printed\n" in log.read_text()
    yield Server(process, int(line.rsplit(":", 1)[1]), model, log)
    process.kill()
    process.wait()


def test_the_paper_s_server_has_the_offline_scores(server: Server) -> None:
    assert server.ask("/health", token=None) == (200, {"status": "ok"})
    for profile in ("", "Post 1: tea"):
        body = {"query": QUESTION, "profile": profile}
        answers = [server.ask("/score", body | {"response_text": answer}) for answer in ANSWERS]
        assert [status for status, _ in answers] == [200] * 3
        assert [answer["score"] for _, answer in answers] == server.offline(question=QUESTION + profile)


def test_a_profile_of_posts_is_shown_as_offline(server: Server) -> None:
    expected = server.offline(posts=POSTS)
    assert expected.expected != server.offline()
    _, answer = server.ask("/v1/score", {"queries": QUESTION, "documents": ANSWERS, "profile": POSTS})
    assert [entry["score"] for entry in answer["data"]] == expected
    several = {"queries": QUESTION, "documents": ANSWERS[:2], "profile": [POSTS, []], "user_id": ["a", "b"]}
    _, answer = server.ask("/score", several)
    values = [entry["score"] for entry in answer["data"]]
    assert values == pytest.approx([expected.expected[0], server.offline().expected[1]], abs=1e-5)


def test_vllm_and_sglang_shapes_have_the_offline_scores(server: Server) -> None:
    values = server.offline().expected
    _, answer = server.ask("/rerank", {"query": QUESTION, "documents": ANSWERS, "top_n": 2})
    order, results = np.argsort(values)[::-1][:2].tolist(), answer["results"]
    assert [result["index"] for result in results] == order
    assert [result["document"]["text"] for result in results] == [ANSWERS[k] for k in order]
    assert [result["relevance_score"] for result in results] == pytest.approx([values[k] for k in order])

    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWERS[1]}]
    (tree,) = server.model.encode([prb.Comparison(id="1", question=QUESTION, responses=ANSWERS)])
    ids = [tree.sequence(k).tolist() for k in range(3)]
    _, answer = server.ask("/classify", {"model": "m", "messages": messages, "activation": False})
    (data,), close = answer["data"], pytest.approx(values[1], abs=1e-5)
    assert data == {"index": 0, "label": "LABEL_0", "probs": [close], "num_classes": 1}
    assert answer["usage"]["prompt_tokens"] == len(ids[1])
    _, answer = server.ask("/v1/classify", {"messages": messages, "use_activation": True})
    assert answer["data"][0]["probs"] == [pytest.approx(1 / (1 + math.exp(-values[1])), abs=1e-6)]
    text = server.model.tokenizer.tokenizer.decode(ids[0])
    long = server.model.tokenizer.tokenizer.decode([7] * 100) + text
    for body, places in (
        ({"input": ids}, [0, 1, 2]),
        ({"input": ids[2]}, [2]),
        ({"input": text}, [0]),
        ({"input": [text, text]}, [0, 0]),
        ({"input": long, "truncate_prompt_tokens": len(ids[0])}, [0]),
    ):
        _, answer = server.ask("/pooling", {"task": "classify", **body})
        expected = [values[k] for k in places]
        assert [entry["data"][0] for entry in answer["data"]] == pytest.approx(expected, abs=1e-5)
    _, answer = server.ask("/v1/embeddings", {"input": ids[2]})
    assert answer["data"][-1]["embedding"][-1] == pytest.approx(values[2], abs=1e-5)
    _, answer = server.ask("/v1/embeddings", {"input": ids[2], "encoding_format": "base64"})
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert decoded == pytest.approx(values[2], abs=1e-5)


def test_clients_of_rl_trainers_get_their_rewards(server: Server) -> None:
    """The way in which verl, OpenRLHF and slime ask, and how they read the answer."""
    values, url, chat = server.offline().expected, f"http://127.0.0.1:{server.port}", server.model.tokenizer
    assert isinstance(chat, ChatTokenizer)
    turns = [[prb.Message("user", QUESTION), prb.Message("assistant", answer)] for answer in ANSWERS]
    texts = chat.render(turns)
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
        assert rewards["rewards"] == pytest.approx([entry["data"][0] for entry in plain["data"]], abs=1e-5)
        # OpenRLHF carries the user and the profile in the labels
        label = {"user_id": "u", "profile": POSTS, "question": QUESTION}
        starts = [text[: text.index(answer)] for text, answer in zip(texts, ANSWERS, strict=True)]
        body |= {"prompts": starts, "labels": [label, json.dumps(label), "-"]}
        labelled = client.post("/get_reward", json=body).json()["rewards"]
        answers = body | {"labels": ["{x : x > 1}", "[1, 2]", 3]}  # of tasks, which say nothing of a user
        assert client.post("/get_reward", json=answers).json() == rewards
        personal = server.offline(posts=POSTS).expected
        assert labelled == pytest.approx([*personal[:2], rewards["rewards"][2]], abs=1e-5)
        # slime takes the whole body as the number
        prompt = [{"role": "user", "content": QUESTION}]
        for given in (QUESTION, prompt):
            answer = client.post("/slime", json={"prompt": given, "response": ANSWERS[0], "label": "x"})
            assert float(answer.text) == pytest.approx(values[0], abs=1e-5)


def test_verify_of_nemo_gym_echoes_the_request_with_the_reward(server: Server) -> None:
    """As its `simple_agent` posts it; `BaseVerifyResponse` is the whole request beside `reward`."""
    output = [
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "content": [
                {"type": "output_text", "text": part, "annotations": []} for part in ("Tea, ", "of course.")
            ],
        },
    ]
    system = prb.Message("system", "Be brief.")
    for given, prompt in (
        ({"input": QUESTION}, QUESTION),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}], "tools": []}, QUESTION),
        ({"input": [{"role": "user", "content": QUESTION, "type": "message"}], "instructions": "Be brief."},
         [system, prb.Message("user", QUESTION)]),
    ):  # fmt: skip
        body = {
            "responses_create_params": given, "response": {"id": "r", "output": output, "model": "m"},
            "user_id": "u", "profile": POSTS, "expected": 3,
        }  # fmt: skip
        status, answer = server.ask("/verify", body)
        reward = answer.pop("reward")
        assert (status, answer) == (200, body)
        whole = prb.Comparison(id="1", prompt=prompt, responses=ANSWERS[:1], profile=POSTS)
        assert reward == pytest.approx(float(server.model.score(whole)[0]), abs=1e-5)


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
    given = settings(policy) | BANDIT | {"steps": 1, "batch.prompts": 3, "scoring.empty": -9.0}
    given |= {"rollout.keep": 3, "rollout.n": 2, "rollout.max_new_tokens": 4}
    prb.ppo(given, out=tmp_path / "run", data=people, overrides=[f"reward={url}"], progress=False)
    rows = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(rows) == 6
    prompts = {comparison.id: comparison for comparison in people}
    for row in rows:
        if row["text"].strip():
            one = replace(prompts[row["id"]], responses=[row["text"]], labels=None)
            assert row["reward"] == pytest.approx(server.model.score(one).item(), abs=1e-5)
    record = json.loads((tmp_path / "run" / "train.json").read_text())
    assert record["inputs"]["reward"]["view"]["max_length"] == 512


def test_many_clients_at_once_share_prompts_and_have_the_same_scores(server: Server) -> None:
    posts = [{"id": str(k), "category": "food", "text": f"Post {k}: tea and bread."} for k in range(4)]
    expected = server.offline(posts=posts, answers=ANSWERS * 2)
    before, scored = server.figure("prb_tokens_total"), server.figure("prb_scores_total")

    def one(number: int) -> float:
        body = {"prompt": QUESTION, "response": ANSWERS[number % 3], "profile": posts}
        status, score = server.ask("/slime", body)
        assert status == 200
        return score

    with ThreadPoolExecutor(24) as pool:
        scores = list(pool.map(one, range(96)))
    assert scores == pytest.approx([expected.expected[number % 3] for number in range(96)], abs=1e-5)
    assert server.figure("prb_scores_total") - scored == 96
    asked = prb.Comparison(id="1", question=QUESTION, responses=ANSWERS[:1], profile=posts)
    (tree,) = server.model.encode([asked])
    # prompts were computed together
    assert server.figure("prb_tokens_total") - before < 96 * len(tree.prefix)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/score", {"query": "?"}, 400, "'response_text': missing; expected 'response_text' with 'query'"),
        ("/score", {"query": "?", "response": "a"}, 400, "found 'query', 'response'"),
        (
            "/score",
            {"query": "?", "documents": []},
            400,
            "'documents': expected a text or a list of texts, found [] (list)",
        ),
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
        ("/classify", {"input": [1, 10**6]}, 400, "token id 1000000, but"),
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
        ("/get_reward", {"query": ["a"], "labels": [{"question": "?"}]}, 400, "the beginning of the query"),
        ("/get_reward", {"query": ["a"], "labels": ['{"user_id": "u"']}, 400, "labels[0]: not valid JSON"),
        ("/get_reward", {"query": ["a"], "labels": ["{'user_id': 'u'}"]}, 400, "labels[0]: not valid JSON"),
        ("/get_reward", {"query": "a", "labels": '{"user_id": "u", "user_id": "v"}'}, 400, "is given twice"),
        (
            "/get_reward",
            {"query": ["a"], "labels": [[{"user_id": "u"}]]},
            400,
            "'labels[0]': expected an object",
        ),
        (
            "/get_reward",
            {"query": ["a"], "labels": ['[{"user": "u"}]']},
            400,
            "'labels[0]': expected an object",
        ),
        ("/get_reward", {"query": ["a", "b"], "labels": {"user_id": "u"}}, 400, "one for each of 2 queries"),
        ("/get_reward", {"query": ["a"], "labels": ["-", "-"]}, 400, "one for each of 1 queries, found 2"),
        (
            "/get_reward",
            {"query": ["a"], "prompts": []},
            400,
            "'prompts': expected one for each of 1 queries",
        ),
        (
            "/get_reward",
            {"query": ["a"], "labels": [{"user_id": ["u", "v"]}]},
            400,
            "labels[0]: field 'user_id'",
        ),
        (
            "/get_reward",
            {"query": ["a"], "user_id": "u", "labels": [{"user_id": "v"}]},
            400,
            "labels[0]: field 'user_id': expected the user of the request's 'user_id', 'u'",
        ),
        (
            "/slime",
            {"prompt": [], "response": "b"},
            400,
            "'prompt': expected at least one message, found none",
        ),
        ("/classify", {"messages": []}, 400, "'messages': expected at least one message, found none"),
        ("/verify", _verified(input=[]), 400, "create_params.input': expected at least one message"),
        ("/verify", _verified(input="<|im_start|>user\na"), 400, "has rendered it already"),
        (
            "/verify",
            _verified(input=[{"type": "function_call"}]),
            400,
            "input[0].type': expected message, found",
        ),
        (
            "/verify",
            _verified(input="?", tools=[{"name": "kettle"}]),
            400,
            "create_params.tools': is not rendered",
        ),
        (
            "/verify",
            _verified(output=[{"type": "function_call"}]),
            400,
            "output[0].type': expected message or",
        ),
        ("/verify", {"response": {}}, 400, "'responses_create_params': expected an object"),
        ("/nowhere", {}, 404, "expected POST to /score"),
    ],
)
def test_bad_requests_name_what_is_wrong(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    status_found, answer = server.ask(path, body)
    assert (status_found, message in answer["error"]["message"]) == (status, True), answer


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
    scores = [entry["score"] for entry in json.load(answer)["data"]]
    assert scores == server.offline(posts=posts, max_length=512)
    assert server.figure("prb_truncated_total") == 3


def test_strangers_garbage_and_clients_that_leave_change_nothing(server: Server) -> None:
    good = {"response_text": ANSWERS[0], "query": SECRET}
    for token in (None, "secret2", "sécret"):
        assert server.ask("/score", good, token=token)[0] == 401
    assert server.ask("/metrics", token=None)[0] == 401
    for body in (b"{not json", b"\xff", b"[1]"):
        assert server.ask("/score", raw=body)[0] == 400
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
    assert {"path", "status", "items", "ms", "time"} == json.loads(log.splitlines()[1]).keys()
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
