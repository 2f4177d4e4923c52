"""The notebooks run from top to bottom with the public API alone."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_notebooks():
    assert NOTEBOOKS


SHOWN = {
    "first_steps": ("baseline:profile-overlap", "accuracy of the tiny model", "rewards ("),
    "ten_questions": ("before the first question", "question 10 told"),
}
"""What each notebook prints."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem == "ten_questions"), id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs(path, capsys):
    code = code_of(path)
    imported = [line for line in code.splitlines() if "prb_jax" in line]
    assert imported == ["import prb_jax as prb"]
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    for words in SHOWN[path.stem]:
        assert words in out
