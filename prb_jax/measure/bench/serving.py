"""Time `prb serve` under many clients at once, beside the scorer of `prb evaluate` on the same conversations."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.figures import Figures
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.scoring import score_pass
from prb_jax.measure.bench.workload import workload_for
from prb_jax.scoring.load import load

_STARTED = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)$")


def bench_serving(options: BenchOptions) -> Figures:
    """Serve a model in a process of its own, and ask it from many clients for a while: each asks again when answered.

    Raises:
      RunError: the server did not start.
    """
    model, batch_tokens, clients = options.model, options.batch_tokens, options.clients
    loaded = load(model, dtype=options.dtype, mesh=options.mesh)
    workload = workload_for(loaded.decoder, options, clients)
    score_pass(loaded, workload, batch_tokens=batch_tokens)
    offline = score_pass(loaded, workload, batch_tokens=batch_tokens)
    del loaded
    pairs = ([tree.sequence(k).tolist() for k in range(2)] for tree in workload.trees)
    bodies = [json.dumps({"input": pair}).encode() for pair in pairs]
    command = [sys.executable, "-m", "prb_jax", "serve", model, "--port", "0"]
    given = {"--batch-tokens": batch_tokens, "--dtype": options.dtype, "--mesh": options.mesh}
    command += [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    environment = {name: value for name, value in os.environ.items() if name != "PRB_SERVE_TOKEN"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            started = _STARTED.match(process.stdout.readline())
            if started is None:
                raise RunError(f"the server did not start: try `prb serve {model}`")
            traffic = _Traffic(int(started[1]), bodies, offline.scores)
            begun = time.perf_counter()
            asyncio.run(traffic.run(clients, until=begun + options.seconds))
            took = time.perf_counter() - begun
        finally:
            process.send_signal(signal.SIGTERM)
    delays = np.asarray(traffic.delays or [np.nan])
    rate, alone = 2 * len(traffic.delays) / took, workload.responses / offline.seconds
    figures = Figures()
    add = figures.add
    add("clients", clients, "clients", "{:,}")
    add("requests", len(traffic.delays), "requests (a pair each)", "{:,}")
    add("lost", traffic.lost, "lost")  # requests without an answer of status 200
    add("seconds", took)
    add("scores_per_second", rate, "scores/s", "{:,.1f}")
    share = f"{{:,.1f}} ({rate / alone:.2f})"  # of prb evaluate, and the server's share of it
    add("offline_per_second", alone, "offline scores/s", share)
    add("p50_seconds", float(np.quantile(delays, 0.5)), "p50", "{:.3f} s")  # from a request to its answer
    add("p99_seconds", float(np.quantile(delays, 0.99)), "p99", "{:.3f} s")
    add("max_difference", traffic.max_difference, "largest difference", "{:.1e}")  # of a score, to offline
    return figures


class _Traffic:
    """Many clients of one server, and what became of their requests."""

    def __init__(self, port: int, bodies: Sequence[bytes], expected: Sequence[np.ndarray]) -> None:
        self.port, self.bodies, self.expected = port, bodies, expected
        self.next, self.lost, self.max_difference = 0, 0, 0.0
        self.delays: list[float] = []

    async def run(self, clients: int, *, until: float) -> None:
        """Ask until the time is over; every request is waited for."""
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def _client(self, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.perf_counter() < until:
            number, self.next = self.next % len(self.bodies), self.next + 1
            begun = time.perf_counter()
            try:
                scores = await _ask(reader, writer, self.bodies[number])
            except (OSError, ValueError, EOFError):
                self.lost += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                continue
            self.delays.append(time.perf_counter() - begun)
            difference = float(np.abs(scores - self.expected[number]).max())
            self.max_difference = max(self.max_difference, difference)
        writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> np.ndarray:
    """The scores of a pair.

    Raises:
      OSError, EOFError: the connection is gone.
      ValueError: another status than 200.
    """
    head = "POST /pooling HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    answered = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = re.search(r"content-length: (\d+)", answered)
    data = await reader.readexactly(int(length[1]) if length else 0)
    if answered.split()[1] != "200":
        raise ValueError(answered.splitlines()[0])
    return np.asarray([entry["data"][0] for entry in cast(Any, json.loads(data))["data"]])
