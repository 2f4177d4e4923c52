"""Connections of slow, hostile and half-closed clients; and the end of a server, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from prb_jax.serving.items import Item, Score
from prb_jax.serving.options import Limits
from tests.serving.local_server import start_app
from tests.serving.test_limits import GOOD, app_with, scores
from tests.sweeps import sweep

HEAD = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps(GOOD).encode()


def start(answer: Callable[[Sequence[Item]], Any] = scores, **limits: Any) -> str:
    return start_app(app_with(answer, **limits), Limits(**limits))


@contextlib.contextmanager
def connected(url: str, *, buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as client:
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.settimeout(300)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        yield client


def received(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65_536):
            data += part
    return bytes(data)


def refusal(answer: bytes) -> tuple[bytes, str]:
    """Status and message of an answer that closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return head.split()[1], json.loads(body)["error"]["message"]


def test_a_client_that_does_not_read_its_answer_is_not_waited_for() -> None:
    url, size = start(seconds=4.0), 12_000_000
    body = json.dumps({"query": "?", "documents": ["a" * (size // 12)] * 12}).encode()
    head = HEAD.replace(b"/score", b"/rerank") + b"Content-Length: %d\r\n\r\n" % len(body)
    with connected(url, buffer=4096) as client:
        client.sendall(head + body)
        time.sleep(10)
        assert len(received(client)) < size
    asked = httpx.post(
        f"{url}/rerank", content=body, headers={"Content-Type": "application/json"}, timeout=300
    )
    assert (
        sum(len(result["document"]["text"]) for result in asked.json()["results"]) == size
    )  # one that reads has it


def test_two_lengths_and_tiny_chunks_are_refused_and_end_the_connection() -> None:
    url = start()
    both = HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    with connected(url) as client:
        client.sendall(
            both % (len(BODY), len(BODY), BODY) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        status, message = refusal(received(client))
        assert (status, "found both" in message) == (b"400", True)
    with connected(url) as client:
        with contextlib.suppress(OSError):  # the server closes it before it has read all
            client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000)
        status, message = refusal(received(client))
        assert (status, "larger chunks" in message) == (b"400", True)
    with connected(url) as client:
        client.sendall(b"no request\r\n\r\n")
        assert refusal(received(client))[0] == b"400"
    pieces = (BODY[k : k + 100] for k in range(0, len(BODY), 100))
    chunked = httpx.post(f"{url}/score", content=pieces, headers={"Content-Type": "application/json"})
    assert chunked.json() == {"score": 1.0}


def test_a_full_server_refuses_as_it_refuses_everything() -> None:
    url = start(connections=2)
    with connected(url) as one, connected(url), connected(url) as three:
        three.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = received(three)
        assert refusal(answer) == (b"503", "more than 2 connections: try again later")
        assert b"retry-after: 1" in answer.lower()
        one.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert b" 200 " in one.recv(1000)


def test_a_half_closed_client_gets_its_answer_and_one_that_left_costs_no_work() -> None:
    given_up = threading.Event()

    async def slow(items: Sequence[Item]) -> list[Score]:
        try:
            await asyncio.sleep(3 if items[0].response == "short" else 300)  # pyright: ignore
        except asyncio.CancelledError:
            given_up.set()
            raise
        return scores(items)

    url = start(slow)

    def request(response: str) -> bytes:
        body = json.dumps(GOOD | {"response_text": response}).encode()
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    with connected(url) as client:
        client.sendall(request("short"))
        client.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(client)
        answer.begin()  # leaves out interim responses, as every client does
        assert (answer.status, json.loads(answer.read())) == (200, {"score": 1.0})
    assert not given_up.is_set()
    with connected(url) as client:
        client.sendall(request("short"))
        client.shutdown(socket.SHUT_WR)
        assert received(client).endswith(b'{"score":1.0}')  # and then it is closed
    with connected(url) as client:
        client.sendall(request("long"))
    assert given_up.wait(60)


@pytest.mark.parametrize("work", sweep(["while True: pass", "import time; time.sleep(3600)"], few=(0,)))
def test_sigterm_ends_a_server_whatever_it_does(work: str, tmp_path: Path) -> None:
    """With shorter times than the real ones, which are asserted to be within 30 seconds."""
    (tmp_path / "slow.py").write_text(f"def slow(comparison):\n    print('begun', flush=True)\n    {work}\n")
    program = f"""
import sys
from prb_jax import cli
from prb_jax.serving import connections
assert connections.DRAIN_SECONDS + connections.LAST_SECONDS <= connections.END_SECONDS < 30
connections.DRAIN_SECONDS, connections.LAST_SECONDS, connections.END_SECONDS = 1, 1, 4
sys.exit(cli.main(["serve", "{tmp_path}/slow.py:slow", "--port", "0"]))
"""
    command, environment = [sys.executable, "-c", program], os.environ | {"PRB_SERVE_TOKEN": ""}
    environment.pop("PRB_SERVE_TOKEN")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with connected(f":{port}") as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert process.stdout.readline() == "begun\n"
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()
        assert time.monotonic() - begun < 30
