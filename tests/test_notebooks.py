"""The notebooks run from top to bottom with the public API alone."""

import ast
import json
from pathlib import Path

import pytest

import prb_jax

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_public_names(path):
    code = code_of(path)
    assert [line for line in code.splitlines() if "prb_jax" in line] == ["import prb_jax as prb"]
    used = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "prb"}
    assert len(named) > 2
    assert named <= set(prb_jax.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, capsys):
    code = code_of(path)
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
    out = capsys.readouterr().out
    for words in SHOWN[path.stem]:
        assert words in out
