"""`docs/glossary.md` explains every column of a table and every figure that a JSON file of a run defines."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import prb_jax as prb
from prb_jax.runs.users import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "prb_jax").rglob("*.py"))
TABLES = [path for path in SOURCES if "prb_jax.reports.table import" in path.read_text(encoding="utf-8")]
DEFINED = [
    path for path in SOURCES if re.search(r"^_?\w*DEFINITIONS\b.*= \{", path.read_text(), re.MULTILINE)
]


def terms() -> set[str]:
    """The names that the page explains: bold ones as tables show them, code as files do."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = " ".join(line for line in text.splitlines() if line.startswith(("- ", "  ")))
    return {name for pair in re.findall(r"\*\*([^*]+)\*\*|`([^`]+)`", entries) for name in pair if name}


def columns(path: Path) -> Iterator[str]:
    """The headings that a file writes out: keys with a getter, and literal heads of `Table`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def is_getter(value: ast.expr) -> bool:
        match value:
            case ast.Lambda() | ast.Call(func=ast.Name(id="field" | "bounded" | "change" | "number")):
                return True
            case ast.Subscript(value=ast.Name(id=name)):  # the getter of another table
                return name.isupper() or name == "columns"
            case _:
                return False

    def texts(node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    yield from texts(part)
            case ast.Constant(value=str(text)):
                yield text
            case ast.Starred(value=ast.Name(id=name)) | ast.Name(id=name) if name in constants:
                yield from texts(constants.pop(name))
            case _:
                pass

    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values):
                    if isinstance(key, ast.Constant) and is_getter(value):
                        yield key.value
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value=str(key)))], value=ast.expr() as value
            ):
                if is_getter(value):
                    yield key
            case ast.Call(func=ast.Name(id="Table"), args=[_, heads, *_]):
                yield from texts(heads)
            case _:
                pass


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.relative_to(ROOT / "prb_jax").as_posix())
def test_every_column_has_an_entry(path):
    found = {" ".join(name.split()) for name in columns(path)} - {""}
    assert found <= terms(), f"not in docs/glossary.md: {sorted(found - terms())}"


def test_columns_are_found():
    """Otherwise the test above compares nothing."""
    found = {name for path in TABLES for name in columns(path)}
    assert {"coverage", "rank", "p, Holm", "shots", "policy accuracy", "peak a chip", "ms/pair"} <= found
    assert len(found) > 80


@pytest.mark.parametrize("path", DEFINED, ids=lambda path: path.relative_to(ROOT / "prb_jax").as_posix())
def test_every_defined_figure_has_an_entry(path):
    module = importlib.import_module(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
    found = {key for name, value in vars(module).items() if name.endswith("DEFINITIONS") for key in value}
    assert found <= terms(), f"not in docs/glossary.md: {sorted(found - terms())}"


def test_every_key_of_a_summary_and_column_of_users_has_an_entry():
    records = [
        {
            "id": k,
            "user_id": k % 7,
            "question": f"{k}?",
            "chosen": "a longer one",
            "rejected": "no",
            "subset": "s",
        }
        for k in range(28)
    ]
    summary = prb.evaluate("baseline:length", records, progress=False).summary
    found = {*summary, *summary["baselines"]["baseline:random"], *summary["by_subset"]["s"], *COLUMNS}
    assert {"accuracy", "coverage", "mean_margin"} <= found
    assert found <= terms(), f"not in docs/glossary.md: {sorted(found - terms())}"
