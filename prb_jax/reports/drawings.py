"""Drawings for a page: inline SVG that follows the page's colours in dark and light mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from prb_jax.platform.extras import lacking_extra
from prb_jax.reports.page import Drawing, Paragraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from prb_jax.runs.users import UserLine

_COLOURS = {
    "#000000": "var(--ink)",
    "#262626": "var(--ink)",
    "#808080": "var(--muted)",
    "#b0b0b0": "var(--line)",
    "#cccccc": "var(--line)",
    "#ffffff": "var(--paper)",
    "#1f77b4": "var(--first)",
    "#ff7f0e": "var(--second)",
}
_FIRST, _SECOND, _MUTED = "#1f77b4", "#ff7f0e", "#808080"
_MOST_USERS = 300  # maximum number of users drawn as points


def draw_margins(margins: np.ndarray) -> Drawing | Paragraph:
    """Draw a histogram of margins; losses and wins in two colours."""
    reach = float(np.quantile(np.abs(margins), 0.99)) or 1.0
    clipped = np.clip(margins, -reach, reach)
    losses, wins = clipped[margins < 0], clipped[margins > 0]

    def draw(axis: Axes) -> None:
        edges = np.linspace(-reach, reach, 41)  # 0 is an edge
        axis.hist(losses, bins=edges.tolist(), color=_SECOND, label=f"wrong: {len(losses):,}")
        axis.hist(wins, bins=edges.tolist(), color=_FIRST, label=f"right: {len(wins):,}")
        axis.axvline(0, color=_MUTED, linewidth=0.8)
        axis.legend(frameon=False)

    xlabel = "margin: score of the preferred response minus the best of the others"
    return drawing(
        _on_axes(draw, xlabel, "comparisons"),
        "Margins",
        f"{len(wins):,} comparisons are right (margin above 0), {len(losses):,} wrong, "
        f"{len(margins) - len(losses) - len(wins):,} ties (not drawn); the outermost bars hold also the "
        f"{int((np.abs(margins) > reach).sum()):,} margins beyond them.",
    )


def draw_reliability(curve: Mapping[str, Any]) -> Drawing | Paragraph:
    """Draw the share of right picks against their confidence, from `prb_jax.metrics.calibration.calibration`."""

    def draw(axis: Axes) -> None:
        parts = curve["bins"]
        confidence, right, counts = ([part[key] for part in parts] for key in ("confidence", "right", "n"))
        low = min(0.5, *(part["low"] for part in parts))
        axis.plot([low, 1], [low, 1], color=_MUTED, linewidth=0.8, linestyle=":", label="perfect")
        axis.plot(confidence, right, color=_FIRST, linewidth=1, label="model")
        sizes = [20 + 160 * count / max(counts) for count in counts]
        axis.scatter(confidence, right, s=sizes, color=_FIRST, alpha=0.6)
        axis.set_xlim(low - 0.02, 1.02)
        axis.set_ylim(min(low, *right) - 0.03, 1.03)
        axis.legend(frameon=False, loc="lower right")

    return drawing(
        _on_axes(draw, "confidence of the pick", "share of right picks", size=(4.6, 4.0)),
        "Reliability diagram",
        f"Expected calibration error {curve['ece']:.3f}: picks are right in {curve['right']:.1%} of the comparisons, "
        f"with a mean confidence of {curve['confidence']:.1%}. Points on the dotted line are perfectly calibrated; a "
        "larger point holds more comparisons.",
    )


def draw_users(accuracy: np.ndarray, *, chance: float | None) -> Drawing | Paragraph:
    """Draw a histogram of the users' accuracies."""

    def draw(axis: Axes) -> None:
        axis.hist(accuracy, bins=np.linspace(0, 1, 21).tolist(), color=_FIRST)
        mean = float(accuracy.mean())
        axis.axvline(mean, color=_SECOND, linewidth=1.5, label=f"mean over users {mean:.3f}")
        if chance is not None:
            axis.axvline(chance, color=_MUTED, linewidth=1, linestyle=":", label=f"chance {chance:.2g}")
        axis.legend(frameon=False, loc="upper left")

    quarters = ", ".join(f"{value:.3f}" for value in np.quantile(accuracy, [0, 0.25, 0.5, 0.75, 1]))
    return drawing(
        _on_axes(draw, "accuracy of a user", "users"),
        "Users by accuracy",
        f"{len(accuracy):,} users; lowest, first quarter, median, third quarter and highest accuracy: {quarters}.",
    )


def draw_each_user(lines: Sequence[UserLine]) -> Drawing | Paragraph:
    """Draw the accuracy of each user with its interval, from the lowest to the highest."""
    ordered = sorted(lines, key=lambda line: (line.accuracy, line.user))
    step = -(-len(ordered) // _MOST_USERS)
    shown = [*ordered[:-1:step], ordered[-1]]  # always includes the highest

    def draw(axis: Axes) -> None:
        bounds = {place: line.ci95 for place, line in enumerate(shown) if line.ci95 is not None}
        lows, highs = ([ends[side] for ends in bounds.values()] for side in range(2))
        axis.vlines(list(bounds), lows, highs, color=_MUTED, linewidth=1, alpha=0.6)
        axis.plot([line.accuracy for line in shown], color=_FIRST, marker=".", linestyle="none")
        axis.set_ylim(-0.02, 1.02)
        axis.set_xticks([])

    description = "A point for each user, and the 95 % interval over the comparisons of that user."
    if without := sum(line.ci95 is None for line in lines):
        description += f" {without:,} users with fewer than six comparisons have none."
    if len(shown) < len(lines):
        description += f" {len(shown):,} of {len(lines):,} users, at equal distances."
    figure = _on_axes(draw, "users, from the lowest accuracy to the highest", "accuracy")
    return drawing(figure, "Accuracy of each user", description)


def draw_points(
    title: str,
    points: Sequence[tuple[str, float | None, Sequence[float] | None]],
    *,
    xlabel: str,
    description: str,
) -> Drawing | Paragraph:
    """Draw an accuracy with its interval for each of several ordered groups: (label, accuracy, interval). A group
    without an accuracy stays empty."""

    def draw(axis: Axes) -> None:
        known = [(place, value) for place, (_, value, _) in enumerate(points) if value is not None]
        axis.plot([place for place, _ in known], [value for _, value in known], color=_FIRST, marker="o")
        for place, (_, _, bounds) in enumerate(points):
            if bounds is not None:
                axis.plot([place, place], list(bounds), color=_FIRST, linewidth=1.5)
        axis.set_xticks(range(len(points)), [label for label, _, _ in points])

    return drawing(_on_axes(draw, xlabel, "accuracy"), title, description)


def _on_axes(
    draw: Callable[[Axes], None], xlabel: str, ylabel: str, *, size: tuple[float, float] = (5.0, 2.8)
) -> Callable[[], Figure]:
    """Return a function that makes a figure with one pair of axes, in the common style of all drawings here."""

    def make() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        axis: Any = figure.subplots()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.5)
        axis.set_axisbelow(True)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        draw(axis)
        return figure

    return make


def drawing(
    make: Callable[[], Figure] | Mapping[str, Callable[[], Figure]], title: str, description: str
) -> Drawing | Paragraph:
    """Return a matplotlib figure as a block of a page; only the description if matplotlib is not installed.

    Several figures, by name, are in one row on a wide screen and below each other on a phone.
    """
    if lacking := lacking_extra("report"):
        return Paragraph(f"{title}: {description} There is no picture, as it {lacking}.", True)
    import matplotlib as mpl

    parts = []
    for name, one in (make if isinstance(make, Mapping) else {title: make}).items():
        figure = one()
        for part in (figure, *figure.axes):
            part.patch.set_visible(False)
        target = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
        parts.append(inline_svg(target.getvalue(), title=name))
    return Drawing(title, description, Markup().join(parts))


def inline_svg(text: str, *, title: str) -> Markup:
    """Return the inline form of an SVG file by matplotlib.

    It has no header and no metadata, and so no web addresses. Colours are variables of the page, letters use its font,
    and the drawing has an accessible name. Unused element ids are removed, because a page has several drawings.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r"(?:href=\"|url\()#([\w-]+)", text))
    prefix = f"d{sha256(text.encode()).hexdigest()[:8]}"
    text = re.sub(
        r' id="([\w-]+)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", text
    )
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    width, height = map(float, re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2])
    inside = re.sub(r"\n+ *", "\n", text[text.index(">") + 1 :]).strip()
    size = f'viewBox="0 0 {width:g} {height:g}" style="max-width:{width / 11:.0f}rem;min-width:{width / 18:.0f}rem"'
    return Markup(f'<svg role="img" aria-label="{Markup.escape(title)}" {size}>{inside}')
