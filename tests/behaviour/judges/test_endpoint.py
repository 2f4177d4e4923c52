"""The client of endpoints against a stand-in that is slow, busy, broken or lying."""

import contextlib
import gzip
import itertools
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import prb_jax as prb
from prb_jax.errors import RunError
from prb_jax.records.comparison import Message
from prb_jax.scoring.remote.endpoint import Endpoint, Reply
from prb_jax.scoring.remote.options import EndpointOptions
from tests.behaviour.judges.stand_in import Answer, completion, stand_in


def client(url: str, cache: Path, **options: Any) -> Endpoint:
    chosen = {"model": "m", "backoff": 0.01, "tries": 4} | options
    return Endpoint(EndpointOptions(url=url, **chosen), cache=cache)


def ask(endpoint: Endpoint, *texts: str) -> list[Reply]:
    return endpoint.ask_all([[Message("user", text)] for text in texts], temperature=0.0, max_new_tokens=5)


def test_what_goes_away_by_itself_is_waited_for(tmp_path):
    trouble: dict[str, Answer] = {
        "busy": (429, b"{}", {"Retry-After": "0.01"}),
        "later": (503, b"", {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        "broken": (500, b"<html>", {}),
        "torn": (200, completion("x")[:-9], {}),
        "empty": (200, b'{"choices": []}', {}),
        "other": (200, b'{"choices": [{"text": "x"}]}', {}),
    }

    def reply(text: str, tries: int) -> str | Answer:
        return trouble[text] if tries < 2 and text in trouble else f"to {text}"

    with stand_in(reply) as server:
        endpoint = client(server.url, tmp_path, key="k")
        texts = [*trouble, "plain", "plain"]
        assert ask(endpoint, *texts) == [Reply(f"to {text}", 10, 2) for text in texts]
        assert endpoint.asked == len(server.asked) == 3 * len(trouble) + 1
        headers, body = server.asked[0]
        assert headers["Authorization"] == "Bearer k"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 5)
        again = client(server.url + "/", tmp_path / "other")
        assert ask(client(server.url, tmp_path), *texts) == ask(again, *texts)  # of the cache, and anew
        assert len(server.asked) == 3 * len(trouble) + 1 + again.asked
    assert ask(client(server.url, tmp_path), "plain") == [Reply("to plain", 10, 2)]


def test_fields_that_an_endpoint_refuses_are_learned_once(tmp_path):
    """As newer models of OpenAI answer; four requests are under way when the first one is refused."""
    refused, count = threading.Barrier(4, timeout=60), itertools.count()

    def reply(body: Any, tries: int) -> str | Answer:
        if ("max_tokens" in body or body.get("temperature", 1) != 1) and next(count) < 8:
            refused.wait()
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens'."
        elif body.get("temperature", 1) != 1:
            message = "Unsupported value: 'temperature' does not support 0.0 with this model."
        else:
            return body["messages"][-1]["content"]
        return 400, json.dumps({"error": {"message": message}}).encode(), {}

    texts = [str(number) for number in range(9)]
    with stand_in(reply, whole=True) as server:
        endpoint = client(server.url, tmp_path, concurrency=4)
        with pytest.warns(prb.PrbWarning, match="refuses temperature 0: it replies at its own") as warned:
            assert [reply.text for reply in ask(endpoint, *texts)] == texts
        assert len(warned) == 1
        assert [len(server.asked), ask(endpoint, "a")[0].tries] == [9 + 2 * 4, 1]
        chosen = client(server.url, tmp_path / "b", length_field="max_completion_tokens", no_temperature=True)
        assert ask(chosen, "a")[0].text == "a"
        assert "temperature" not in server.asked[-1][1]
        assert server.asked[-1][1]["max_completion_tokens"] == 5
        with pytest.raises(RunError, match=r"status 400: .*max_tokens"):
            ask(client(server.url, tmp_path / "c", length_field="max_tokens"), "a")
        exact = Endpoint(EndpointOptions(url=server.url, model="m"), cache=None, exact=True)
        with pytest.raises(RunError, match="refuses temperature 0: expected --temperature 1"):
            ask(exact, "a")
        assert exact.ask_all([[Message("user", "x")]], temperature=1.0, max_new_tokens=2)[0].text == "x"
    with pytest.raises(RunError, match="expected one of max_tokens, max_completion_tokens, found 'tokens'"):
        client("http://h", tmp_path, length_field="tokens")


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        ((200, b'{"choices": []}', {}), 3, "no reply after 3 tries.*choices"),
        ((200, b"not json", {}), 3, "no reply after 3 tries.*not valid JSON"),
        ((500, b"SORRY", {}), 3, "no reply after 3 tries.*status 500: 'SORRY'"),
        ((400, b'{"error": "no such model"}', {}), 1, "status 400: .*no such model"),
        ((401, b"who", {}), 1, "status 401: 'who'; set PRB_ENDPOINT_KEY"),
        ((302, b"", {"Location": "http://localhost/"}), 1, "status 302"),
    ],
)
def test_no_reply_is_one_error(tmp_path, answer, tries, message):
    with stand_in(lambda text, _: answer) as server:
        with pytest.raises(RunError, match=message):
            ask(client(server.url, tmp_path, tries=3), "a")
        assert len(server.asked) == tries
    assert not list(tmp_path.rglob("*.json"))


def test_nobody_there_and_nobody_answers(tmp_path):
    with pytest.raises(RunError, match="expected a URL"):
        client("localhost", tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(RunError, match="no reply after 2 tries; the last one: ConnectError"):
            ask(client(url, tmp_path, tries=2), "a")
        silent.listen()
        expected = r"no reply after 2 tries; the last one: no whole answer within 0\.05 seconds"
        with pytest.raises(RunError, match=expected):
            ask(client(url, tmp_path, tries=2, seconds=0.05), "a")


def test_so_many_are_asked_at_a_time_and_no_more(tmp_path):
    lock, now, most = threading.Lock(), 0, 0

    def reply(text: str, _: int) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.03)
        with lock:
            now -= 1
        return text

    with stand_in(reply) as server:
        texts = [str(number) for number in range(12)]
        replies = ask(client(server.url, tmp_path, concurrency=3), *texts)
    assert [reply.text for reply in replies] == texts
    assert most <= 3


def test_a_reply_without_text_and_its_price(tmp_path):
    with stand_in(lambda text, _: (200, completion(None), {})) as server:
        endpoint = client(server.url, tmp_path, prices=(1.0, 3.0))
        assert ask(endpoint, "a") == [Reply("", 10, 2)]
    assert endpoint.cost(1_000_000, 2_000_000) == 7.0
    assert endpoint.cost(None, 2) is None


OK = b"HTTP/1.1 200 OK\r\n"


def endless() -> Iterator[bytes]:
    yield OK + b"\r\n"
    yield from itertools.repeat(b" " * 1_000_000)


def dripping(start: bytes) -> Iterator[bytes]:
    yield OK + start
    while True:
        time.sleep(0.02)
        yield b"a"


def bomb() -> Iterator[bytes]:
    yield OK + b"Content-Encoding: gzip\r\n\r\n"
    squeeze = zlib.compressobj(wbits=31)
    while True:
        yield squeeze.compress(b" " * 1_000_000)


def zipped() -> Iterator[bytes]:
    data = gzip.compress(completion("small"))
    yield OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(data) + data


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (endless, r"expected a reply, found an answer of more than 3,000,000 bytes"),
        (bomb, r"expected a reply, found an answer of more than 3,000,000 bytes"),
        (partial(dripping, b"\r\n"), "no whole answer within 0.3 seconds"),
        (partial(dripping, b"X: "), "no whole answer within 0.3 seconds"),
        (zipped, None),
    ],
)
def test_an_answer_has_one_deadline_and_one_size(tmp_path, monkeypatch, answer, message):
    monkeypatch.setattr("prb_jax.scoring.remote.endpoint.LARGEST_ANSWER", 3_000_000)

    def serve() -> None:
        connection, _ = listening.accept()
        # the client may have left
        with connection, contextlib.suppress(OSError):
            connection.recv(100_000)
            for piece in answer():
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url, begun = f"http://127.0.0.1:{listening.getsockname()[1]}/v1", time.monotonic()
        endpoint = client(url, tmp_path, tries=1, seconds=0.3 if "within" in str(message) else 30)
        if message is None:
            assert ask(endpoint, "a") == [Reply("small", 10, 2)]
        else:
            with pytest.raises(RunError, match=message):
                ask(endpoint, "a")
        thread.join(20)
        assert not thread.is_alive()
        assert time.monotonic() - begun < 15


def test_the_key_is_in_no_message(tmp_path):
    for answer in ((401, b"no such key: sk-secret", {}), (200, b'{"error": "sk-secret is not known"}', {})):
        with stand_in(lambda text, _, answer=answer: answer) as server:
            with pytest.raises(RunError, match=r"an answer that holds the key \(not shown\)") as error:
                ask(client(server.url, tmp_path, key="sk-secret", tries=1), "a")
            assert "sk-secret" not in str(error.value)
    for key in ("sk-secret\n", "sk-s\u00e9cret", "sk secret"):
        with pytest.raises(RunError, match="PRB_ENDPOINT_KEY: expected printable ASCII") as error:
            client("http://localhost", tmp_path, key=key)
        assert "secret" not in str(error.value)
