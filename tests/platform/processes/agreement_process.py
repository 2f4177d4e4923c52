"""One process that differs from the other: started by ``test_agreement.py``, as ``python -m ... FOLDER``.

Process 1 has the models, the data and the settings of its own folder; what is said of each difference is printed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prb_jax import evaluate, train
from prb_jax.errors import RunError
from prb_jax.platform.processes.job import start_job
from prb_jax.platform.processes.sharing import process_index


def main(folder: Path) -> None:
    start_job()
    place, second = folder / str(process_index()), process_index() == 1
    model, data = place / "model", place / "pairs.jsonl"

    def refused(action: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            action(*arguments, out=folder / "refused", progress=False, **options)
            print("done")
        except RunError as error:
            print(error)

    settings = {
        "model": str(model), "data": str(data), "steps": 1, "batch": {"comparisons": 2}, "log": {"plot": second},
        "validation": {"fraction": 0.0},
    }  # fmt: skip
    refused(evaluate, model, data, profile_posts=3 if second else 10)
    refused(evaluate, place / "trained", data)
    refused(evaluate, model, place / "other.jsonl")
    refused(train, {**settings, "steps": 2 if second else 1})
    refused(train, {**settings, "model": str(place / "trained")})
    if second:
        refused(train, settings)
    else:
        refused(evaluate, model, data)
    assert not (folder / "refused").exists()
    evaluate(model, data, out=folder / "same", progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
