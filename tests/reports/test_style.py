"""All tables have one style, and nothing in them is lost in 80 columns."""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

import prb_jax
from prb_jax.quickstart.tables import KEYS, quickstart_table
from prb_jax.reports.table import ResultsTable, facts_table


def shown(table: object) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_tables_are_made_in_one_place():
    made = [
        path.name
        for path in Path(prb_jax.__file__).parent.rglob("*.py")
        if re.search(r"from rich.table import", path.read_text(encoding="utf-8"))
    ]
    assert made == ["table.py"]


def test_results_side_by_side():
    results = [
        ("dtype", [f"float{n}" for n in range(5)]),
        ("workload", [f"K={n} [x], 4,096" for n in range(5)]),
    ]
    text = shown(ResultsTable("scoring", results))
    assert max(map(len, text.splitlines())) <= 80
    for _, cells in results:
        assert all(cell in text for cell in cells)
    assert text.count("workload") == 2  # five results are two tables
    console = Console(file=StringIO(), width=100)
    console.print(ResultsTable("scoring", results))
    assert console.file.getvalue().count("workload") == 1  # and one where there is room


def test_facts():
    text = shown(facts_table([("model", "[org]/m"), ("a", "b " * 60)], title="t [x]"))
    assert "t [x]" in text
    assert "[org]/m" in text
    assert " ".join(text.split()).count("b ") >= 59


def test_the_quickstart_in_80_columns():
    figures = dict.fromkeys(KEYS.values(), 0.5) | {f"{key}_ci95": [0.25, 0.75] for key in KEYS.values()}
    figures |= {"served": 0.1, "train_pairs": 9100, "ms_per_pair": 0.62, "presentations": 64_000}
    summary = {
        "pairs": dict.fromkeys(KEYS, 10_000),
        "models": {"user_blind": figures, "persona": figures, "baseline:profile-overlap": figures},
        "bounds": {"best, user unknown": dict.fromkeys(KEYS.values(), 0.556)},
    }
    text = shown(quickstart_table(summary))
    assert max(map(len, text.splitlines())) <= 80
    for whole in (
        "coverage",
        "shown",
        "64,000",
        "ms/pair",
        "profile-overlap",
    ):
        assert whole in text
    assert text.count("0.250..0.750") == 12
    for line in text.splitlines():  # the interval has a line of its own
        assert not ("0.250" in line and "0.500" in line)
    assert "profile in context" in text.split("ms/pair")[1]
