"""What people read is short and plain: reprs and what messages quote, whatever the size of the values; docstrings."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import prb_jax as prb
from prb_jax.errors import MESSAGE_LENGTH, QUOTED, REPR_LENGTH, quote
from prb_jax.models.config.decoder import parse_config
from prb_jax.trees.tree import build_tree
from tests.packed import packed_batch
from tests.scoring.records import write_model

LONG = "word " * 100_000


def large() -> prb.Comparison:
    return prb.Comparison(
        id="x" * 5000,
        question=LONG,
        responses=[LONG] * 300,
        labels=range(300),
        profile=[{"id": str(n), "text": LONG} for n in range(300)],
        rubric_aspects=[{"aspect": LONG}] * 9,
        narrative=LONG,
    )


def test_no_repr_is_long(tmp_path):
    comparison = large()
    assert len(repr(comparison)) <= REPR_LENGTH
    assert "id='xxx" in repr(comparison)
    assert len(repr(comparison.profile[0])) <= REPR_LENGTH
    items = [
        prb.Comparison(
            id=n, question="Tea or coffee?", chosen="Tea.", rejected="No.", subset=f"s{n % 50}", user_id=n
        )
        for n in range(300)
    ]
    result = prb.evaluate("baseline:length", items, out=tmp_path / "run", progress=False)
    assert len(repr(result)) <= REPR_LENGTH
    assert "Evaluation(" in repr(result)
    assert str(tmp_path) in repr(result)
    assert "n=300, accuracy=1.0" in repr(result)
    model = prb.load(write_model(tmp_path / "model", "qwen3"))
    trees = model.encode(items)
    values = [model, model.config, model.tokenizer, model.report, trees[0], result.rows[0]]
    values += [model.batch(trees[:5]), next(iter(model.stream(items)))]
    for value in values:
        assert dataclasses.is_dataclass(value)
        shown = repr(value)
        assert shown.startswith(f"{type(value).__name__}(")
        assert len(shown) <= REPR_LENGTH, shown
    assert "int32[" in repr(trees[0])


def test_a_trained_run_is_shown_short():
    result = prb.TrainResult(
        out="run",
        steps=3,
        summary={str(n): LONG for n in range(99)},  # pyright: ignore[reportArgumentType]
    )
    assert len(repr(result)) <= REPR_LENGTH
    assert "steps=3" in repr(result)


@pytest.mark.parametrize(
    "value", [LONG, {LONG: LONG}, [LONG] * 99, 10**4000, [[[[[[LONG] * 9] * 9] * 9] * 9] * 9]]
)
def test_messages_cut_what_they_quote(value):
    assert len(quote(value)) <= QUOTED
    with pytest.raises(prb.DataError) as error:
        prb.Comparison(id="1", question="?", chosen=value, rejected=7)  # pyright: ignore[reportArgumentType]
    assert len(str(error.value)) < 2 * QUOTED


def test_what_is_quoted_is_there():
    assert quote("tea") == "'tea'"
    assert quote(["a", 1, None]) == "['a', 1, None]"
    assert quote("a" * 300 + "end").endswith("end'")
    assert quote(np.zeros((3, 4), np.int32)) == "int32[3, 4]"
    assert "4 rows" in str(prb.DataError("4 rows"))
    assert len(str(prb.DataError(LONG))) < MESSAGE_LENGTH + 20
    name = "f" * 10_000
    with pytest.raises(prb.CheckpointError) as error:
        parse_config({"architectures": [name], "model_type": name}, where="config.json")
    assert len(str(error.value)) < MESSAGE_LENGTH + 20


def test_a_small_batch_shows_its_shapes():
    batch = packed_batch([build_tree([[5, 6], [5, 7]])])
    assert "tokens=int32[1, 128]" in repr(batch)


PACKAGE = Path(prb.__file__).parent
SECTION = re.compile(r"\s*(Args|Attributes|Raises|Returns|Yields):")
ENTRY = re.compile(r"^[\w*, `/\[\].]{1,60}:\s+(.*)")
BARE = re.compile(
    r"(of|for|as|to|in|by|with|from|on|over|what|who|which|where)\b(?! (many|much)\b)", re.IGNORECASE
)


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of the package, with their files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(PACKAGE)), ast.get_docstring(node) or ""


def test_an_entry_of_a_docstring_begins_with_a_noun_or_a_verb():
    bare, entries = [], 0
    for path, text in docstrings():
        in_section = False
        for line in text.splitlines():
            if SECTION.fullmatch(line):
                in_section = True
            elif in_section and (entry := ENTRY.match(line.strip())):
                entries += 1
                bare += [f"{path}: {line.strip()}"] if BARE.match(entry[1]) else []
    assert entries > 2000
    assert not bare


@pytest.mark.parametrize(("words", "most"), [(r"that of|those of|as of", 0.3), ("alone", 0.5)])
def test_docstrings_name_a_thing_again(words, most):
    """Counted for every 1,000 words: docstrings written by native speakers have 0 and 0.1."""
    text = " ".join(text for _, text in docstrings())
    assert 1000 * len(re.findall(rf"\b({words})\b", text)) < most * len(text.split())
