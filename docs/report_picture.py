"""The first screen of a report as a picture: its sentence and its forest plot, as SVG that follows dark and light.

python docs/report_picture.py runs/quickstart/scores/persona docs/report.svg
"""

import re
import sys
import textwrap
from importlib.resources import files
from pathlib import Path

from markupsafe import escape

from prb_jax.reports.evaluation import evaluation_chapter, model_name
from prb_jax.reports.page import Drawing, visible
from prb_jax.reports.pairs import Texts
from prb_jax.runs.finished import read_finished

WIDTH, MARGIN, LINE, LETTERS = 720, 20, 28, 68


def picture(folder: Path) -> str:
    """Return the SVG of a run of `prb evaluate`."""
    run = read_finished(folder)
    name = model_name(run.record)
    chapter = evaluation_chapter(run, Texts({}, "not needed"), name="run", title=name, room=0)
    drawing = next(block for block in chapter.opening if isinstance(block, Drawing))
    lines = textwrap.wrap(visible(chapter.answer), LETTERS)
    inner = int(re.findall(r'style="height:(\d+)px"', drawing.svg)[0])
    top = MARGIN + LINE * len(lines) + 16
    style = files("prb_jax.reports").joinpath("page.css").read_text("utf-8")
    colours = style[: style.index("* {")]
    rules = "".join(f"{a}{{{b}}}" for a, b in re.findall(r"([^{}]*\.forest[^{}]*)\{([^{}]*)\}", style))
    sentence = "".join(
        f'<text class="answer" x="{MARGIN}" y="{MARGIN + LINE * (k + 1) - 8}">{escape(line)}</text>'
        for k, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + inner + MARGIN}">'
        f"<style>{colours}{rules}text {{ font-family: system-ui, sans-serif; fill: var(--ink); }} "
        ".answer { font-size: 20px; }</style>"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{sentence}'
        f'<svg x="{MARGIN}" y="{top}" width="{WIDTH - 2 * MARGIN}" height="{inner}">{drawing.svg}</svg></svg>\n'
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])), encoding="utf-8")
