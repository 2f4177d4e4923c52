"""A stand-in for an endpoint: an HTTP server in a thread, which replies as a function says; what it judges."""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import prb_jax as prb

Answer = tuple[int, bytes, dict[str, str]]


class StandIn(ThreadingHTTPServer):
    """The server, and the requests that it had: (headers, body)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, reply: Callable[[Any, int], str | Answer], *, whole: bool) -> None:
        self.reply, self.asked, self.lock = reply, list[tuple[dict[str, str], Any]](), threading.Lock()
        self.whole, self.counts = whole, Counter[str]()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = cast(StandIn, self.server)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body if server.whole else body["messages"][-1]["content"]
        with server.lock:
            key = json.dumps(asked, sort_keys=True)
            tries = server.counts[key]
            server.counts[key] += 1
            server.asked.append((dict(self.headers), body))
        reply = server.reply(asked, tries)
        status, data, headers = (200, completion(reply), {}) if isinstance(reply, str) else reply
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def completion(text: str | None, **choice: Any) -> bytes:
    """An answer of the API, of 10 tokens to 2; a choice has further fields, such as finish_reason."""
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    choices = [{"message": {"role": "assistant", "content": text}, **choice}]
    return json.dumps({"choices": choices, "usage": usage}).encode()


@contextlib.contextmanager
def stand_in(reply: Callable[[Any, int], str | Answer], *, whole: bool = False) -> Iterator[StandIn]:
    """Serve; `reply` gets the last message, or the ``whole`` body, and how often it was asked before."""
    server = StandIn(reply, whole=whole)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def comparisons(
    count: int, responses: Sequence[str] = ("a long answer to", "no"), best: int = 0, **fields: Any
) -> list[prb.Comparison]:
    """Comparisons of three users with a post each; each response ends with the number of its comparison."""
    post = {"id": "p", "category": "", "text": "I like walks."}
    return [
        prb.Comparison(
            id=f"c{number}",
            question=f"Question {number}?",
            responses=[f"{response} {number}" for response in responses],
            labels=[float(place == best) for place in range(len(responses))],
            user_id=f"u{number % 3}",
            **{"profile": [post], **fields},
        )
        for number in range(count)
    ]


def judged(server: StandIn, data: Any, out: Path, **options: Any) -> Any:
    """Let the model of a stand-in judge, and return the evaluation."""
    return prb.judge(
        None,
        data,
        out=out,
        options=prb.JudgeOptions(**options),
        endpoint=prb.EndpointOptions(url=server.url, model="m", backoff=0.01),
        progress=False,
    )


def shown_answer(text: str) -> str:
    """The response that a judge of single responses is shown."""
    return text.partition("Answer:\n")[2].split("\n\n")[0]
