"""The first screen of a page of `prb report` as a picture: its sentence and its drawing, as SVG for dark and light.

prb report runs/quickstart/scores/persona --out page.html && python docs/report_picture.py page.html docs/report.svg
"""

import re
import sys
import textwrap
from collections.abc import Sequence
from html import escape, unescape
from importlib.resources import files
from pathlib import Path

WIDTH, MARGIN, LINE, LETTERS = 720, 20, 28, 64


def picture(page: str) -> str:
    """Return the SVG of the first answer and the first drawing of a page."""
    answer = re.findall(r'<p class="answer">(.*?)</p>', page, re.DOTALL)[0]
    drawing = re.findall(r'<div class="drawing">(.*?)</div>', page, re.DOTALL)[0]
    return framed(unescape(answer), re.findall(r"<svg.*?</svg>", drawing, re.DOTALL))


def framed(answer: str, drawings: Sequence[str]) -> str:
    """Return an SVG file of drawings in one row below their sentence, with the colours of a page."""
    lines = textwrap.wrap(answer, LETTERS)
    top = MARGIN + LINE * len(lines) + 16
    width = (WIDTH - 2 * MARGIN) // len(drawings)
    parts = [_placed(svg, MARGIN + width * k, top, width) for k, svg in enumerate(drawings)]
    style = files("prb_jax.reports").joinpath("page.css").read_text("utf-8")
    colours = style[: style.index("* {")]
    rules = "".join(f"{a}{{{b}}}" for a, b in re.findall(r"([^{}]*\.forest[^{}]*)\{([^{}]*)\}", style))
    sentence = "".join(
        f'<text class="answer" x="{MARGIN}" y="{MARGIN + LINE * (k + 1) - 8}">{escape(line)}</text>'
        for k, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{WIDTH}" height="{top + max(height for _, height in parts) + MARGIN}">'
        f"<style>{colours}{rules}text {{ font-family: system-ui, sans-serif; fill: var(--ink); }} "
        ".answer { font-size: 20px; }</style>"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{sentence}'
        f"{''.join(svg for svg, _ in parts)}</svg>\n"
    )


def _placed(svg: str, left: int, top: int, width: int) -> tuple[str, int]:
    """Return a drawing at its place, and its height: a forest plot has a fixed height, others a shape."""
    if fixed := re.search(r'style="height:(\d+)px"', svg):
        return f'<svg x="{left}" y="{top}" width="{width}" height="{fixed[1]}">{svg}</svg>', int(fixed[1])
    shape = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    height = round(width * float(shape[1]) / float(shape[0]))
    svg = re.sub(r' style="max-width[^"]*"', "", svg, count=1)
    return f'<svg x="{left}" y="{top}" width="{width}" height="{height}">{svg}</svg>', height


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1]).read_text("utf-8")), encoding="utf-8")
