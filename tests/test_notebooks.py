"""The notebooks run from top to bottom with the public API alone."""

import ast
import json
from pathlib import Path

import pytest

import prb_jax
from tests.tutorial_pages import has_shape

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def printed(path: Path) -> str:
    """What a notebook shows of standard output."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(line for output in outputs if output.get("name") == "stdout" for line in output["text"])


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_public_names(path):
    code = code_of(path)
    assert [line for line in code.splitlines() if "prb_jax" in line] == ["import prb_jax as prb"]
    used = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "prb"}
    assert len(named) > 2
    assert named <= set(prb_jax.__all__)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_carries_its_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        if "print(" in "".join(cell["source"]):
            assert any(output.get("name") == "stdout" for output in cell["outputs"]), cell["source"]
    assert "/tmp/" not in path.read_text(encoding="utf-8")  # a folder of the machine that ran it


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_its_outputs(path, capsys):
    code = code_of(path)
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})
    assert has_shape(capsys.readouterr().out, printed(path))
