"""Servers of object storage on this machine, behind a proxy that fails as networks do."""

from __future__ import annotations

import http.client
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

from tests.plain_process import free_port

_OWN_HEADERS = ("transfer-encoding", "content-length", "connection", "date", "server")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def failing_proxy(port: int, share: float, *, seed: int = 0) -> Iterator[tuple[str, dict[str, int]]]:
    """Pass requests on to a port of this machine; such a share is answered 503, or cut off before or after it is done.

    Yields the URL of the proxy, and how often each happened.
    """
    chance, counts = random.Random(seed), {"passed": 0, "503": 0, "cut before": 0, "cut after": 0}
    guard = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with guard:
                fails = chance.random() < share
                fate = chance.choice(["503", "cut before", "cut after"]) if fails else "passed"
                counts[fate] += 1
            if fate == "503":
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fate == "cut before":
                self._cut()
                return
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
            if fate == "cut after":
                self._cut()
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OWN_HEADERS:
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)
            upstream.close()

        def _cut(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _pass_on

        def log_message(self, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", counts
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def s3_server() -> Iterator[int]:
    """moto's S3, on the port that is yielded."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        reset = http.client.HTTPConnection("127.0.0.1", port)  # its contents are those of the process
        reset.request("POST", "/moto-api/reset")
        assert reset.getresponse().status == 200
        yield port
    finally:
        server.stop()


@contextmanager
def gcs_server() -> Iterator[int]:
    """gcp-storage-emulator, on the port that is yielded."""
    from gcp_storage_emulator import server as emulator

    read = emulator._read_raw_data

    def read_whole(handler: Any) -> bytes | None:
        # gcsfs ends a part by a bare "\n" before the boundary. Of an object that ends in "\r" the emulator's reader of
        # e-mail takes that "\r" for a part of the line's end, and stores one byte too few: one random object in 256.
        data = read(handler)
        kind = handler.headers.get("Content-Type") or ""
        if data is None or not kind.startswith("multipart/related"):
            return data
        boundary = kind.partition("boundary=")[2].strip('" ').encode()
        body, end, rest = data.rpartition(b"\n--" + boundary + b"--")
        gcsfs = end and data.startswith(b"--" + boundary + b"\n")
        return body + b"\r" + end + rest if gcsfs else data

    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True)
    with mock.patch.object(emulator, "_read_raw_data", read_whole):
        server.start()
        try:
            yield port
        finally:
            server.stop()
