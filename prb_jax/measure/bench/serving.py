"""Time `prb serve` under many concurrent clients, compared with the scorer of `prb evaluate` on the same texts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.request import urlopen

import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.figures import Figures
from prb_jax.measure.bench.models import make_model
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.scoring import score_pass
from prb_jax.measure.bench.workload import count_pairs, workload_for
from prb_jax.models.named_shapes import SHAPES, has_no_weights
from prb_jax.scoring.load import load

_STARTED = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)$")


def bench_serving(options: BenchOptions) -> Figures:
    """Serve a model in a separate process, and query it from many clients until every comparison is scored once.

    A shape gets random weights in a temporary folder.

    Scores a CPU second are compared with those of the scorer of `prb evaluate`, in the same run and on the same
    comparisons. The server is a fresh one, so that its caches hold nothing.

    Raises:
      RunError: the server did not start, fewer pairs are asked for than one user has questions, or the model is a
        ``config.json``.
    """
    if not has_no_weights(options.model):
        return _bench(options)
    if options.model not in SHAPES:
        raise RunError(f"MODEL: expected a folder or one of {', '.join(SHAPES)}, found {options.model}")
    with tempfile.TemporaryDirectory() as folder:
        made = make_model(options.model, Path(folder), policy=False)
        return _bench(replace(options, model=str(made)))


def _bench(options: BenchOptions) -> Figures:
    model, batch_tokens, clients = options.model, options.batch_tokens, options.clients
    (questions,) = options.questions_per_user
    loaded = load(model, dtype=options.dtype, mesh=options.mesh)
    count = count_pairs(options.pairs, usual=clients, questions_per_user=questions)
    workload = workload_for(loaded.decoder, options, count, questions_per_user=questions)
    score_pass(loaded, workload, batch_tokens=batch_tokens)
    begun = time.process_time()
    offline = score_pass(loaded, workload, batch_tokens=batch_tokens)
    offline_cpu = time.process_time() - begun
    del loaded
    pairs = ([tree.sequence(k).tolist() for k in range(2)] for tree in workload.trees)
    bodies = [json.dumps({"input": pair}).encode() for pair in pairs]
    order = np.arange(count)
    if options.order == "random":
        np.random.default_rng(0).shuffle(order)
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
            traffic = _Traffic(int(started[1]), bodies, offline.scores, order.tolist())
            before, begun = _cpu_seconds(process.pid), time.perf_counter()
            asyncio.run(traffic.run(clients, until=begun + options.seconds))
            took, after = time.perf_counter() - begun, _cpu_seconds(process.pid)
            computed = _counted(int(started[1]), "prb_tokens_total")
        finally:
            process.send_signal(signal.SIGTERM)
    delays = np.asarray(traffic.delays or [np.nan])
    scores = 2 * len(traffic.delays)
    rate, alone = scores / took, workload.responses / offline.seconds
    a_cpu_second = None if before is None or after is None else scores / (after - before)
    share = None if a_cpu_second is None else a_cpu_second / (workload.responses / offline_cpu)
    figures = Figures()
    add = figures.add
    add("order", options.order, "order")
    add("clients", clients, "clients", "{:,}")
    add("requests", len(traffic.delays), "requests (a pair each)", "{:,}")
    add("lost", traffic.lost, "lost")  # requests without a response of status 200
    add("seconds", took)
    add("scores_per_second", rate, "scores/s", "{:,.1f}")
    ratio = f"{{:,.1f}} ({rate / alone:.2f})"  # of prb evaluate, and the server's share of it
    add("offline_per_second", alone, "offline scores/s", ratio)
    add("scores_per_cpu_second", a_cpu_second, "scores a CPU second", "{:,.1f}")
    add("cpu_share", share, "of the offline ones", "{:.2f}x")
    add("tokens_computed", computed, "tokens computed", "{:,.0f}")
    add("tokens_needed", offline.needed_tokens, "by the offline scorer", "{:,}")
    add("p50_seconds", float(np.quantile(delays, 0.5)), "p50", "{:.3f} s")  # from request to response
    add("p99_seconds", float(np.quantile(delays, 0.99)), "p99", "{:.3f} s")
    add("max_difference", traffic.max_difference, "largest difference", "{:.1e}")  # from offline scores
    return figures


def _cpu_seconds(process: int) -> float | None:
    """Return the CPU seconds of a process and its children so far; None if the system does not report them."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        spent = [
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (process, *children)
        ]
    except OSError:
        return None
    return sum(int(fields[11]) + int(fields[12]) for fields in spent) / os.sysconf("SC_CLK_TCK")


def _counted(port: int, name: str) -> float:
    """Return the value of one of the server's counters."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        found = re.search(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    if found is None:
        raise RunError(f"the server's metrics: expected {name}, found none")
    return float(found[1])


class _Traffic:
    """Concurrent clients of one server, and the results of their requests."""

    def __init__(
        self, port: int, bodies: Sequence[bytes], expected: Sequence[np.ndarray], order: Sequence[int]
    ) -> None:
        self.port, self.bodies, self.expected = port, bodies, expected
        self.left, self.lost, self.max_difference = deque(order), 0, 0.0
        self.delays: list[float] = []

    async def run(self, clients: int, *, until: float) -> None:
        """Request everything once, or until the time is over, and wait for every response."""
        await asyncio.gather(*(self._client(until) for _ in range(clients)))

    async def _client(self, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while self.left and time.perf_counter() < until:
            number = self.left.popleft()
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
    """Return the scores of a pair.

    Raises:
      OSError, EOFError: the connection is lost.
      ValueError: the status is not 200.
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
