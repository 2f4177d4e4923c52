"""A small model, and the verbs of `prb bench` in this process, with a short measure of the machine's peak."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prb_jax.cli import main
from prb_jax.models.flops import best_time
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in some layers; padding by an id that occurs in the workload."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "gemma3", "gemma3", pad_token_id=77)


@pytest.fixture(autouse=True)
def _quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prb_jax.measure.bench.rivals.transformers.PEAK_SECONDS", 0.01)
    monkeypatch.setattr(
        "prb_jax.models.flops.best_time", lambda run, *, seconds: best_time(run, seconds=seconds / 100)
    )


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a verb with words of which some hold several, divided by blanks; gives the rows of its JSON, all of whose
    numbers are finite."""

    def run(*words: object) -> list[dict[str, Any]]:
        report = tmp_path / "bench.json"
        assert main(["bench", *" ".join(map(str, words)).split(), "--json", str(report)]) == 0
        rows = json.loads(report.read_text())
        numbers = (value for row in rows for value in row.values() if isinstance(value, int | float))
        assert all(map(math.isfinite, numbers))
        return rows

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a verb that cannot be; gives the one line that says why."""

    def run(*words: object) -> str:
        capsys.readouterr()
        try:
            status: Any = main(["bench", *" ".join(map(str, words)).split()])
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1)
        assert said.err.startswith("prb: error: ")
        return said.err

    return run
