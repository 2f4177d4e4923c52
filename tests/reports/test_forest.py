"""Forest plots: marks stand where the figures are, whatever the width, and names stay text."""

import re
from xml.etree import ElementTree

import pytest

from prb_jax.metrics.paired import compare_rows
from prb_jax.metrics.rows import ScoredRow
from prb_jax.reports.comparison import comparison_answer
from prb_jax.reports.forest import BASELINE, CONTROL, Estimate, draw_forest
from prb_jax.reports.table import signed

LINES = [
    Estimate("m", 0.8, (0.7, 0.9)),
    Estimate("a control <b> with a name that is too long for one line", 0.6, (0.5, 0.65), CONTROL),
    Estimate("length", 0.52, None, BASELINE, "ties in 90 %"),
]


def share(place: str | None) -> float:
    assert place is not None
    return float(place.removesuffix("%"))


def test_marks_and_intervals_stand_at_their_figures() -> None:
    drawing = draw_forest("Title <i>", LINES, reference=("chance 0.5", 0.5))
    svg = ElementTree.fromstring(drawing.svg)  # well-formed, so names are escaped
    ticks = {
        float(text.text or ""): share(text.get("x"))
        for text in svg.findall("text")
        if re.fullmatch(r"[\d.]+", text.text or "")
    }
    low, high = min(ticks), max(ticks)
    assert low <= 0.5 < 0.9 <= high

    def expected(value: float) -> float:
        return ticks[low] + (value - low) / (high - low) * (ticks[high] - ticks[low])

    for tick, place in ticks.items():
        assert place == pytest.approx(expected(tick), abs=0.02)
    for line, group in zip(LINES, svg.findall("g"), strict=True):
        assert group.get("class") == line.kind
        marks = [
            share(mark.get("cx") or mark.get("x"))
            for mark in (*group.findall("circle"), *group.findall("rect"))
        ]
        assert marks == [pytest.approx(expected(line.value), abs=0.02)]
        drawn = [bar for bar in group.findall("line") if bar.get("class") == "interval"]
        ends = [(share(bar.get("x1")), share(bar.get("x2"))) for bar in drawn]
        wanted = [] if line.bounds is None else [tuple(expected(end) for end in line.bounds)]
        assert ends == [pytest.approx(pair, abs=0.02) for pair in wanted]
    (reference,) = (line for line in svg.findall("line") if line.get("class") == "reference")
    assert share(reference.get("x1")) == pytest.approx(expected(0.5), abs=0.02)
    texts = ["".join(text.itertext()) for text in svg.iter("text")]
    for shown in ("0.800 [0.700..0.900]", "0.520", "ties in 90 %", "a control <b> with a"):
        assert shown in texts
    assert max(map(len, texts)) <= 50
    for word in ("Filled circle: the model", "open circle", "square: a baseline", "dashed: chance 0.5"):
        assert word in drawing.description


@pytest.mark.parametrize("values", [(-0.3, 0.2), (0.5, 0.5), (0.7412, 0.7413), (3.0, 170.0), (0.0, 1.0)])
def test_the_axis_encloses_any_figures(values: tuple[float, float]) -> None:
    svg = str(draw_forest("t", [Estimate(str(v), v, None) for v in values], figure=signed).svg)
    marks = [share(place) for place in re.findall(r'cx="([^"]+)"', svg)]
    assert 0 <= min(marks) <= max(marks) <= 100
    assert (marks[0] < marks[1]) == (values[0] < values[1])
    assert 2 <= svg.count('class="tick"') <= 12


def test_the_answer_of_a_comparison_says_no_more_than_its_figures() -> None:
    def rows(wins: int) -> list[ScoredRow]:
        return [ScoredRow(str(i), None, f"u{i % 10}", [float(i < wins), 0.5], [1, 0]) for i in range(60)]

    clear = comparison_answer(compare_rows({"a": rows(58), "b": rows(20), "c": rows(18)}))
    told = (
        r"a is the best of 3 runs: its accuracy on 60 comparisons is 0\.967 \[.*\], ahead of b by \+0\.633 \["
    )
    assert re.match(told, clear)
    same = comparison_answer(compare_rows({"a": rows(31), "b": rows(30), "c": rows(2)}))
    told = r"60 comparisons cannot tell a and b apart, the best of 3 runs: a has an accuracy of 0\.517 .* b by \+0\.017"
    assert re.match(told, same)
    few = comparison_answer(compare_rows({"a": rows(31)[:3], "b": rows(1)[:3]}))
    assert few.endswith("fewer than 6 users or responses give no verdict.")
