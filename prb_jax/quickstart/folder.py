"""The folder of one quickstart: killed at any moment, continued by the same command.

``quickstart.json``  what is trained and how. Its ``inputs`` decide the result.
``start/``           the untrained model and its tokenizer, a Hugging Face folder.
``data/``            the training pairs of either model, as JSON lines.
``user_blind.py``, ``persona.py``  the configs of the two trainings, for `prb train`.
``user_blind/``, ``persona/``      their run folders, each with the trained model in ``model/``.
``scores/NAME/``     the run folders of the evaluations, those of the baselines among them.
``page.html``        a page of both models, to open in a browser.
``report.md``        the table, what stands in it, and the single commands.
``summary.json``     the figures; written last: a folder that has it is finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prb_jax.data.reading import read_json
from prb_jax.errors import RunError
from prb_jax.runs.kind import SUMMARY, RunKind

QUICKSTART = "quickstart.json"
REPORT, PAGE = "report.md", "page.html"
START, DATA, SCORES = "start", "data", "scores"
QUICKSTARTS = RunKind(
    "prb_jax quickstart", "prb quickstart", file=QUICKSTART, others=("run.json", "train.json", START, SCORES)
)


@contextlib.contextmanager
def open_quickstart(out: str | Path, *, inputs: Mapping[str, Any]) -> Iterator[Path]:
    """Creates the folder, or opens it to continue, and holds it against a second writer.

    Args:
      out: the folder; made, with its parents, where it does not exist.
      inputs: everything that decides the result; compared with the folder's own.

    Raises:
      RunError: `out` is a file, cannot be written, holds another run, or another process is writing to it.
    """
    with QUICKSTARTS.open(out, inputs) as run:
        yield run.path


def read_finished(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished quickstart; None where it is not finished.

    Raises:
      RunError: its summary cannot be read.
    """
    hint = "remove it, and the same command writes it again"
    return read_json(folder / SUMMARY, error=RunError, hint=hint, optional=True)
