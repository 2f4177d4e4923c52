"""All tables have one style, and nothing in them is lost in a narrow terminal; what the tables of summaries show."""

from pathlib import Path

import pytest

import prb_jax
from prb_jax.commands.quickstart.tables import KEYS, quickstart_table
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.reports.summary import render_summary
from prb_jax.reports.table import ResultsTable, facts_table, interval
from tests.reports.conftest import printed


def rows(wins, *, users=True, subsets=True, truncated=0):
    made = []
    for i, win in enumerate(wins):
        subset, user = f"sub{i % 2}" if subsets else None, f"u{i % 7}" if users else None
        made.append(ScoredRow(str(i), subset, user, [float(win), float(not win)], [1, 0], 10, truncated))
    return made


def text(summaries, *, width=120, title="Result"):
    return printed(render_summary(summaries, title=title), width=width)


WINS = [i % 4 != 0 for i in range(42)]
LENGTH = [i % 2 == 0 for i in range(42)]


def test_a_model_beside_its_baselines_and_by_subset():
    summary = summarise(rows(WINS, truncated=1), baselines={"baseline:length": rows(LENGTH)})
    shown = text({"org/model": summary})
    lines = shown.splitlines()
    model = next(line for line in lines if "org/model" in line)
    baseline = next(line for line in lines if line.strip().startswith("length (baseline)"))
    low, high = summary["ci95"]
    assert f"{summary['accuracy']:.3f} [{low:.3f}..{high:.3f}]" in model
    assert f"{summary['user_accuracy']:.3f}" in model
    assert "0.500 [" in baseline
    assert "42 comparisons of 7 users; a tie is not a win" in shown
    assert "org/model: text cut in 42 of 42" in shown
    assert "org/model minus length (baseline): 0.238 [" in shown
    table = shown.split("Accuracy by subset")[1]
    even = next(line for line in table.splitlines() if "sub0" in line)
    figures = summary["by_subset"]["sub0"]
    assert even.split()[1] == str(figures["n"]) == "21"
    assert interval(figures["accuracy"], figures["ci95"]) in even
    assert even.rstrip().endswith("1.000")
    alone = summarise(rows(LENGTH), baselines={"baseline:length": rows(LENGTH)})
    assert text({"baseline:length": alone}).split("[..]")[0].count("length (baseline)") == 1


def test_without_users_or_subsets_there_are_no_columns_of_them():
    shown = text({"m": summarise(rows(WINS, users=False, subsets=False))})
    for part in ("per user", "coverage", "Accuracy by subset"):
        assert part not in shown
    assert "42 comparisons;" in shown


def test_several_models_on_different_rows():
    shown = text({"a": summarise(rows(WINS)), "b": summarise(rows(WINS[:10], subsets=False))})
    assert "a: 42 comparisons" in shown
    assert "b: 10 comparisons" in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_with_brackets_survive_and_lines_fit(width):
    summary = summarise(rows(WINS), baselines={"baseline:length": rows(LENGTH)})
    shown = text({"[bold]m[/bold]": summary}, width=width, title="data [x]")
    assert "data [x]" in shown
    assert max(map(len, shown.splitlines())) <= width
    if width == 200:
        assert "[bold]m[/bold]" in shown


def test_interval():
    assert interval(0.7594, [0.7414, 0.7764]) == "0.759 [0.741..0.776]"
    assert interval(-0.1, [-0.2, 0.05]) == "-0.100 [-0.200..0.050]"
    assert (interval(0.5, None), interval(None, None)) == ("0.500", "–")


def test_tables_are_made_in_one_place():
    sources = Path(prb_jax.__file__).parent.rglob("*.py")
    made = [path.name for path in sources if "from rich.table import" in path.read_text(encoding="utf-8")]
    assert made == ["table.py"]


def test_results_side_by_side():
    results = [
        ("dtype", [f"float{n}" for n in range(5)]),
        ("workload", [f"K={n} [x], 4,096" for n in range(5)]),
    ]
    table = ResultsTable("scoring", results)
    text = printed(table, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for _, cells in results:
        assert all(cell in text for cell in cells)
    assert text.count("workload") == 2  # five results are two tables
    assert printed(table, width=100).count("workload") == 1  # and one where there is room


def test_facts():
    text = printed(facts_table([("model", "[org]/m"), ("a", "b " * 60)], title="t [x]"), width=80)
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
    text = printed(quickstart_table(summary), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("coverage", "shown", "64,000", "ms/pair", "profile-overlap"):
        assert whole in text
    assert text.count("0.250..0.750") == 12
    for line in text.splitlines():  # the interval has a line of its own
        assert not ("0.250" in line and "0.500" in line)
    assert "profile in context" in text.split("ms/pair")[1]
