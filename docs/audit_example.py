"""The example of docs/audit.md: simulated people judge pairs of generated personas; then `prb audit DIR --report`.

python docs/audit_example.py audits/first

Each of six people picks the response that the persona wants in 9 of 10 pairs, and rates both responses by chance.
"""

import random
import sys
from contextlib import closing
from pathlib import Path

from prb_jax import read_comparisons
from prb_jax.building.auditing.folder import open_folder
from prb_jax.building.auditing.items import CRITERIA
from prb_jax.building.auditing.session import Session

PEOPLE = ("ana", "ben", "cleo", "dan", "eve", "finn")


def main(folder: Path) -> None:
    """Write an audit of 24 pairs of ten personas in which each pair is judged three times."""
    pairs = read_comparisons("personas:test-unseen")[::50]
    wanted = {pair.responses[0] for pair in pairs}
    draws, clock = random.Random(0), iter(range(10**9, 2 * 10**9, 20))
    folder.mkdir(parents=True)
    audit = open_folder(folder, data=pairs, per_item=3)
    with closing(audit.open_database(write=True)) as database:
        session = Session(
            database, audit.inputs, lease=1e9, secret=b"example", clock=lambda: float(next(clock))
        )
        for name in PEOPLE:
            session.join(name)
        waiting = list(PEOPLE)
        while waiting:
            for name in list(waiting):
                shown = session.current(name)
                if shown.task is None or shown.item is None:
                    waiting.remove(name)
                    continue
                good, bad = ("a", "b") if shown.item["a"] in wanted else ("b", "a")
                ratings = {one: {side: draws.choice((3, 4, 4, 5)) for side in "ab"} for one in CRITERIA}
                fit = good if draws.random() < 0.9 else bad
                session.submit(name, shown.task, {"quality": ratings, "fit": fit, "comment": ""})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
