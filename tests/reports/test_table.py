"""All tables have one style, and nothing in them is lost in a narrow terminal; what the tables of summaries show."""

import re
from pathlib import Path

import pytest

import prb_jax
from prb_jax.commands.quickstart.tables import KEYS, quickstart_table
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.reports.summary import render_summary
from prb_jax.reports.table import NONE, ResultsTable, facts_table, first_words, interval, percent
from tests.reports.conftest import printed


def rows(wins, *, users=True, subsets=True, truncated=0):
    made = []
    for i, win in enumerate(wins):
        subset, user = f"sub{i % 2}" if subsets else None, f"u{i % 7}" if users else None
        made.append(ScoredRow(str(i), subset, user, [float(win), float(not win)], [1, 0], 10, truncated))
    return made


def text(summary, *, name="m", width=120, title="Result"):
    return printed(render_summary(summary | {"model": name}, title=title), width=width)


WINS = [i % 4 != 0 for i in range(42)]
LENGTH = [i % 2 == 0 for i in range(42)]


def test_a_model_beside_its_baselines_and_by_subset():
    summary = summarise(rows(WINS, truncated=1), baselines={"baseline:length": rows(LENGTH)})
    shown = text(summary, name="org/model")
    lines = shown.splitlines()
    assert (
        " ".join(lines[1:3])
        .split("; ")[0]
        .startswith(f"org/model prefers what the user wants in {100 * summary['accuracy']:.1f} % [")
    )
    assert "length would give 50.0 %." in " ".join(shown.split())
    model = next(line for line in lines[3:] if "org/model" in line)
    baseline = next(line for line in lines if line.strip().startswith("length (baseline)"))
    low, high = summary["ci95"]
    assert f"{summary['accuracy']:.3f} [{low:.3f}..{high:.3f}]" in model
    assert f"{summary['user_accuracy']:.3f}" in model
    assert "0.500 [" in baseline
    assert "42 comparisons of 7 users; a tie is not a win" in shown
    assert "text cut in 42 of 42" in shown
    assert "+0.238 [" in baseline  # the model minus it
    even = next(line for line in lines if "sub0 (21)" in line)
    figures = summary["by_subset"]["sub0"]
    assert interval(figures["accuracy"], figures["ci95"]) in even
    alone = summarise(rows(LENGTH), baselines={"baseline:length": rows(LENGTH)}) | {
        "model": "baseline:length"
    }
    shown = text(alone, name="baseline:length").split("[..]")[0]
    assert shown.count("length (baseline)") == 2  # in the sentence and in the table
    assert "length would give" not in shown


def test_a_baseline_that_is_undefined_is_no_row_and_notes_are_three_lines():
    """Nor is a column without a figure shown, and many ties are explained beside the figure."""
    reason = "no two users judge the same responses"
    votes = [ScoredRow(str(i), None, f"u{i % 7}", [float(i == 0), 0.0], [1, 0]) for i in range(42)]
    summary = summarise(
        rows(WINS, subsets=False), baselines={"baseline:popularity": votes, "baseline:nearest-users": reason}
    )
    shown = text(summary, width=400)
    table, notes = shown.split("[..]")
    assert "nearest-users" not in table
    assert NONE not in shown
    assert len(notes.strip().splitlines()) <= 3
    assert "undefined on these data, see summary.json: nearest-users" in notes
    assert "popularity (baseline): 98% ties, not wins (0.512 if each counts half)" in notes
    served = round(summary["coverage"] * summary["users_testable"])
    assert f"users served: for {served} of the {summary['users_testable']} users with enough" in notes


def test_of_many_subsets_the_lowest_are_shown():
    many = [ScoredRow(str(i), f"s{i % 30}", None, [float(i % 30 > 4), 0.5], [1, 0]) for i in range(60)]
    shown = text(summarise(many))
    assert all(f" s{k} (2)" in shown for k in range(5))
    assert "and 18 subsets that are higher" in shown


def test_without_users_or_subsets_there_are_no_columns_of_them():
    shown = text(summarise(rows(WINS, users=False, subsets=False)))
    for part in ("per user", "served", "sub0", "what the user wants"):
        assert part not in shown
    assert "42 comparisons;" in shown
    assert "m prefers the better response in " in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_with_brackets_survive_and_lines_fit(width):
    summary = summarise(rows(WINS), baselines={"baseline:length": rows(LENGTH)})
    shown = text(summary, name="[bold]m[/bold]", width=width, title="data [x]")
    assert "data [x]" in shown
    assert max(map(len, shown.splitlines())) <= width
    if width == 200:
        assert "[bold]m[/bold]" in shown


def test_interval():
    assert interval(0.7594, [0.7414, 0.7764]) == "0.759 [0.741..0.776]"
    assert interval(-0.1, [-0.2, 0.05]) == "-0.100 [-0.200..0.050]"
    assert (interval(0.5, None), interval(None, None)) == ("0.500", "–")


def test_first_words():
    assert first_words("Tea\n or  coffee?") == "Tea or coffee?"
    assert first_words("word " * 100, most=20) == "word word word ..."
    assert first_words("w" * 100, most=20) == "w" * 16 + " ..."
    assert len(first_words("long words " * 1000)) <= 80


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


def test_a_sentence_has_the_digits_of_the_table():
    for value in (0.3425, 0.0005, 0.7535, 0.0625, 1.0, 0.49949999):
        shown, bounds = percent(value, (value, value)), interval(value, (value, value))
        figures = re.findall(r"[\d.]+(?= %|,|\])", shown)
        assert [f"{float(one) / 100:.3f}" for one in figures] == re.findall(r"\d\.\d{3}", bounds)


def test_the_quickstart_in_80_columns():
    figures = dict.fromkeys(KEYS.values(), 0.5) | {f"{key}_ci95": [0.25, 0.75] for key in KEYS.values()}
    figures |= {"served": 0.1, "train_pairs": 9100, "ms_per_pair": 0.62, "presentations": 64_000}
    summary = {
        "pairs": dict.fromkeys(KEYS, 10_000),
        "models": {"user_blind": figures, "persona": figures, "baseline:profile-overlap": figures},
        "bounds": {"best, user unknown": dict.fromkeys(KEYS.values(), 0.556)},
        "persona_minus_user_blind": {key: {"difference": 0.2, "ci95": [0.1, 0.3]} for key in KEYS.values()},
    }
    text = printed(quickstart_table(summary), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for whole in ("served", "0.10", "profile-overlap", "profile in"):
        assert whole in text
    assert text.count("0.250..0.750") == 12
    assert (
        "50.0 % [25.0, 75.0] of pairs, ahead of user-blind (50.0 %) by +0.200 [+0.100, +0.300]."
        in " ".join(text.split())
    )
    for line in text.splitlines():  # the interval has a line of its own
        assert not ("0.250" in line and "0.500" in line)
    # one table
    assert sum(set(line) <= {"─", " "} and "─" in line for line in text.splitlines()) == 1
    assert len(text[text.index("[..]") :].splitlines()) == 3  # lines of notes
