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
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from prb_jax.bench.scorer import score_pass
from prb_jax.bench.table import shown
from prb_jax.bench.workload import synthetic_workload
from prb_jax.errors import RunError
from prb_jax.scoring.load import load

_STARTED = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)$")


@dataclass(frozen=True)
class ServingResult:
    """The server under many clients, each of which asks again after its answer."""

    clients: int = field(metadata=shown("clients", "{v:,}", "that asked at the same time"))
    requests: int = field(metadata=shown("requests (a pair each)", "{v:,}", "answered"))
    lost: int = field(metadata=shown("lost", meaning="requests without an answer of status 200"))
    seconds: float
    scores_per_second: float = field(metadata=shown("scores/s", "{v:,.1f}", "of the server"))
    offline_per_second: float = field(
        metadata=shown(
            "offline scores/s", "{v:,.1f} ({r.of_offline:.2f})", "of prb evaluate (server's share)"
        )
    )
    p50_seconds: float = field(metadata=shown("p50", "{v:.3f} s", "from a request to its answer"))
    p99_seconds: float = field(metadata=shown("p99", "{v:.3f} s"))
    max_difference: float = field(metadata=shown("largest difference", "{v:.1e}", "of a score, to offline"))

    @property
    def of_offline(self) -> float:
        """The server's rate, as a share of the offline one."""
        return self.scores_per_second / self.offline_per_second


def bench_serving(
    model: str,
    *,
    clients: int,
    seconds: float,
    prefix_tokens: int,
    response_tokens: int,
    batch_tokens: int | None = None,
    dtype: str | None = None,
    mesh: str | None = None,
) -> ServingResult:
    """Serve a model in a process of its own, and ask it from many clients for a while.

    The arguments are the options of `prb bench serve`, whose help explains them.

    Raises:
      RunError: the server did not start.
    """
    loaded = load(model, dtype=dtype, mesh=mesh)
    config = loaded.decoder
    workload = synthetic_workload(
        clients,
        responses=2,
        prefix_tokens=prefix_tokens,
        response_tokens=response_tokens,
        vocab_size=config.vocab_size,
        longest=config.max_position_embeddings,
    )
    score_pass(loaded, workload, batch_tokens=batch_tokens)
    offline = score_pass(loaded, workload, batch_tokens=batch_tokens)
    del loaded
    bodies = [
        json.dumps({"input": [tree.sequence(k).tolist() for k in range(2)]}).encode()
        for tree in workload.trees
    ]
    command = [sys.executable, "-m", "prb_jax", "serve", model, "--port", "0"]
    for flag, value in (("--batch-tokens", batch_tokens), ("--dtype", dtype), ("--mesh", mesh)):
        command += [] if value is None else [flag, str(value)]
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
            asyncio.run(traffic.run(clients, until=begun + seconds))
            took = time.perf_counter() - begun
        finally:
            process.send_signal(signal.SIGTERM)
    delays = np.asarray(traffic.delays or [np.nan])
    return ServingResult(
        clients=clients,
        requests=len(traffic.delays),
        lost=traffic.lost,
        seconds=took,
        scores_per_second=2 * len(traffic.delays) / took,
        offline_per_second=workload.responses / offline.seconds,
        p50_seconds=float(np.quantile(delays, 0.5)),
        p99_seconds=float(np.quantile(delays, 0.99)),
        max_difference=traffic.max_difference,
    )


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
                found = await _ask(reader, writer, self.bodies[number])
            except (OSError, ValueError, EOFError):
                self.lost += 1
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                continue
            self.delays.append(time.perf_counter() - begun)
            difference = float(np.abs(found - self.expected[number]).max())
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
    return np.asarray([each["data"][0] for each in cast(Any, json.loads(data))["data"]])
