"""Forest plots: estimates with their intervals on one axis, as SVG that needs no plotting library.

Positions are shares of the width and letters keep their size, so a plot is readable on a phone and on a wide screen.
Colours are variables of the page.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

from prb_jax.reports.page import Drawing, visible
from prb_jax.reports.table import interval

MODEL, CONTROL, BASELINE = "model", "control", "baseline"
_MARKS: Final = {
    MODEL: "filled circle: {}",
    CONTROL: "open circle: the same model as a control",
    BASELINE: "square: a baseline",
}
_STEPS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_MOST_TICKS: Final = 6
_LEFT, _WIDTH = 5.0, 90.0  # the axis, in percent of the width
_LETTERS, _REMARK_WIDTH = 42, 50  # letters in a line of a phone: label and figure, and small ones
_LINE, _BAR, _GAP = 18, 18, 7  # pixels: a line of text, the interval below it, the space below that
_TOP, _BOTTOM = 22, 26  # pixels for the name of the reference and for the numbers of the axis


@dataclass(frozen=True)
class Estimate:
    """A line of a forest plot: a figure with its interval, if any, and a remark in small letters."""

    label: str
    value: float
    bounds: Sequence[float] | None
    kind: str = MODEL
    remark: str = ""


def draw_forest(
    title: str,
    estimates: Sequence[Estimate],
    *,
    reference: tuple[str, float] | None = None,
    figure: Callable[[float, Sequence[float] | None], str] = interval,
    what: str = "the model",
    line: str = "95 % interval",
    description: str = "",
) -> Drawing:
    """Draw estimates with their intervals from top to bottom.

    Args:
      title: Title, also the accessible name.
      estimates: At least one line.
      reference: Name and value of a dashed vertical line, e.g. chance.
      figure: Format of a figure with its interval.
      what: Name in the legend for the filled circles.
      line: Name in the legend for the intervals.
      description: Sentences before the legend.
    """
    ends = [end for one in estimates for end in (one.value, *(one.bounds or ()))]
    ticks = _ticks([*ends, *([reference[1]] if reference else [])])
    low, span = ticks[0], ticks[-1] - ticks[0]

    def at(value: float) -> str:
        return f"{_LEFT + _WIDTH * (value - low) / span:.2f}%"

    rows, top = [], _TOP
    for one in estimates:
        shown = figure(one.value, one.bounds)
        lines = textwrap.wrap(visible(one.label), max(_LETTERS - len(shown), 12)) or [""]
        remark = textwrap.wrap(visible(one.remark), _REMARK_WIDTH)
        rows.append(_row(one, lines, remark, top, at, shown))
        top += _LINE * (len(lines) + len(remark)) + _BAR + _GAP
    height = top + _BOTTOM
    parts = [*_axis(ticks, top, at), *(_reference(*reference, top, at) if reference else ()), *rows]
    legend = [text.format(what) for kind, text in _MARKS.items() if kind in {one.kind for one in estimates}]
    legend += [f"line: {line}"] if any(one.bounds for one in estimates) else []
    legend += [f"dashed: {reference[0]}"] if reference else []
    told = "; ".join(legend)
    svg = (
        f'<svg class="forest" role="img" aria-label="{escape(visible(title))}" width="100%" style="height:{height}px">'
        f"{''.join(parts)}</svg>"
    )
    return Drawing(title, f"{description} {told[0].upper()}{told[1:]}.".strip(), Markup(svg))


def _row(
    one: Estimate,
    lines: Sequence[str],
    remark: Sequence[str],
    top: int,
    at: Callable[[float], str],
    figure: str,
) -> str:
    """Return the SVG of one estimate: label and figure, remark, interval."""
    small = ' class="remark"'
    texts = [
        f'<text x="0" y="{top + _LINE * place + 13}"{small * (place >= len(lines))}>{escape(line)}</text>'
        for place, line in enumerate([*lines, *remark])
    ]
    texts.append(f'<text class="estimate" x="100%" y="{top + 13}">{escape(figure)}</text>')
    middle, x = top + _LINE * (len(lines) + len(remark)) + _BAR // 2 - 1, at(one.value)
    bar = f'<line class="track" x1="0" x2="100%" y1="{middle}" y2="{middle}"/>'
    if one.bounds is not None:
        start, end = (at(bound) for bound in one.bounds)
        bar += f'<line class="interval" x1="{start}" x2="{end}" y1="{middle}" y2="{middle}"/>'
    if one.kind == BASELINE:
        mark = f'<rect x="{x}" y="{middle - 4}" width="8" height="8" transform="translate(-4 0)"/>'
    else:
        mark = f'<circle cx="{x}" cy="{middle}" r="5"/>'
    return f'<g class="{one.kind}">{"".join(texts)}{bar}{mark}</g>'


def _axis(ticks: Sequence[float], bottom: int, at: Callable[[float], str]) -> Iterator[str]:
    """Yield the numbers below the plot and their marks."""
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    for tick in ticks:
        yield f'<line class="tick" x1="{at(tick)}" x2="{at(tick)}" y1="{bottom}" y2="{bottom + 5}"/>'
        shown = f"{tick + 0.0:.{digits}f}"
        yield f'<text class="number" x="{at(tick)}" y="{bottom + 19}">{shown}</text>'


def _reference(name: str, value: float, bottom: int, at: Callable[[float], str]) -> Iterator[str]:
    """Yield the dashed line and its name above it, which stays within the picture."""
    place = float(at(value).rstrip("%"))
    anchor = "start" if place < 20 else "end" if place > 80 else "middle"
    yield f'<line class="reference" x1="{at(value)}" x2="{at(value)}" y1="{_TOP - 6}" y2="{bottom}"/>'
    yield f'<text class="number" x="{at(value)}" y="12" text-anchor="{anchor}">{escape(visible(name))}</text>'


def _ticks(values: Sequence[float]) -> list[float]:
    """Return evenly spaced round numbers that enclose the values."""
    low, high = min(values), max(values)
    for step in _STEPS:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        if last - first < _MOST_TICKS:
            return [round(step * number, 6) for number in range(first, last + 1)]
    size = 10 ** math.ceil(math.log10(max(high - low, 1.0)))  # figures that are no shares
    first, last = math.floor(low / size), math.ceil(high / size)
    return [float(size * number) for number in range(first, max(last, first + 1) + 1)]
