"""One process of a job that evaluates with a slow scorer, and may fail: started by ``test_job.py``.

python -m tests.platform.processes.job_process OUT COUNT SECONDS_PER_BATCH [PROCESS FAILURE]
"""

import sys
from typing import Any

from prb_jax import RunError, evaluate
from prb_jax.errors import PrbError
from prb_jax.platform.processes.job import leave_job, start_job
from prb_jax.platform.processes.sharing import process_index, share_json
from tests.scoring.slow_scorer import SlowScorer, comparisons


def main(out: str, count: int, seconds: float, failing: int = -1, failure: str = "") -> None:
    start_job()
    assert share_json(process_index()) == 0
    if process_index() == failing:
        from prb_jax.runs.rows import RowFile
        from prb_jax.scoring.inputs import ComparisonTable

        def fail(*_: Any, **__: Any) -> None:
            if failure == "full":
                raise RunError("cannot write scores.jsonl: No space left on device")
            raise ZeroDivisionError("a bug")

        if failing == 0:
            RowFile.append = fail
        else:
            ComparisonTable.row = fail
    try:
        evaluate(SlowScorer(seconds=seconds), comparisons(count), out=out, progress=False)
    except PrbError as error:
        leave_job(2, f"error: {error}")
    print("done")


if __name__ == "__main__":
    out, count, seconds, *failure = sys.argv[1:]
    main(out, int(count), float(seconds), *([int(failure[0]), failure[1]] if failure else []))
