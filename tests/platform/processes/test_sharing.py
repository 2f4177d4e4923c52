"""Several processes of one run: process 0 alone writes, all get the same result and the same errors."""

import contextlib

from prb_jax.platform.processes.sharing import (
    entered_on_first_process,
    on_first_process,
    process_count,
    process_index,
    share_json,
)
from tests.json_lines import read_lines
from tests.platform.processes.jobs import run_job

WORKER = """
import os, sys
import jax

process, out = int(os.environ["JAX_PROCESS_ID"]), sys.argv[1]
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], num_processes=2, process_id=process)
from prb_jax import RunError, evaluate
from prb_jax.platform.processes.sharing import share_json
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
    (first, progress), (second, silence) = run_job(["-c", WORKER, tmp_path / "run"], count=2)
    said = first.splitlines()[-1]
    assert said == second.splitlines()[-1]
    assert said.endswith("True")
    assert "10 of 10 pairs" in progress
    assert "pairs" not in silence
    rows = read_lines(tmp_path / "run" / "scores.jsonl")
    assert [row["id"] for row in rows] == [f"c{number}" for number in range(10)]
