"""Several processes of one run: process 0 alone writes, all get the same result and the same errors."""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

from prb_jax.processes.sharing import (
    entered_on_first_process,
    on_first_process,
    process_count,
    process_index,
    share_json,
)

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import sys
import jax

process, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from prb_jax import RunError, evaluate
from prb_jax.processes.sharing import share_json
from tests.scoring.slow_scorer import SlowScorer, comparisons

assert share_json({"from": process}) == {"from": 0}
if process:  # only process 0 may touch the folder
    import prb_jax.scoring.run as module
    module.open_evaluation = lambda *_, **__: sys.exit("wrote")
result = evaluate(SlowScorer(), comparisons(10), out=out, progress=True)
again = SlowScorer()
evaluate(again, comparisons(10), out=out)
assert again.scored == [] and len(again.skipped) == 10
try:
    evaluate(SlowScorer(), comparisons(9), out=out)
except RunError as error:
    refusal = str(error)
print(result.summary["accuracy"], len(result.rows), result.rows[3].scores, "10 -> 9" in refusal)
"""


def test_one_process_asks_nobody():
    assert (process_index(), process_count()) == (0, 1)
    assert share_json({"a": [1.5, None]}) == {"a": [1.5, None]}
    assert on_first_process(lambda: 3) == 3


def test_a_context_is_entered_once_and_left():
    steps = []

    @contextlib.contextmanager
    def opened():
        steps.append("in")
        yield 3
        steps.append("out")

    with entered_on_first_process(opened, lambda number: [number, number]) as (number, told):
        assert (number, told, steps) == (3, [3, 3], ["in"])
    assert steps == ["in", "out"]


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(process), port, str(tmp_path / "run")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(2)
    ]  # fmt: skip
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    first, second = (output[0].splitlines()[-1] for output in outputs)
    assert first == second
    assert first.endswith("True")
    assert "10 of 10 pairs" in outputs[0][1]
    assert "pairs" not in outputs[1][1]
    rows = [json.loads(line) for line in (tmp_path / "run" / "scores.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"c{number}" for number in range(10)]
