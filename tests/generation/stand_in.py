"""A stand-in for an endpoint: an HTTP server in a thread, which replies as a function says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

Answer = tuple[int, bytes, dict[str, str]]


class StandIn(ThreadingHTTPServer):
    """The server, and the requests that it had: (headers, body)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, reply: Callable[[str, int], str | Answer]) -> None:
        self.reply, self.asked, self.lock = reply, list[tuple[dict[str, str], Any]](), threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast(StandIn, self.server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with server.lock:
            tries = sum(asked["messages"][-1]["content"] == text for _, asked in server.asked)
            server.asked.append((dict(self.headers), body))
        found = server.reply(text, tries)
        status, data, headers = (200, completion(found), {}) if isinstance(found, str) else found
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completion(text: str | None) -> bytes:
    """An answer of the API, of 10 tokens to 2."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    ).encode()


@contextlib.contextmanager
def stand_in(reply: Callable[[str, int], str | Answer]) -> Iterator[StandIn]:
    """Serve; `reply` gets the last message and how often it was asked before."""
    server = StandIn(reply)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
