"""The shares of the peak in the first two tables of docs/speed.md as a picture, like a report's.

PYTHONPATH=docs python docs/speed_picture.py docs/speed.md docs/speed.svg
"""

import re
import sys
from pathlib import Path

from report_picture import framed

from prb_jax.reports.forest import BASELINE, Estimate, draw_forest

NAMES = {
    "`--responses 2 ": "scoring pairs",
    "`--responses 16 ": "scoring groups of 16",
    "`--responses 64 ": "scoring groups of 64",
    "`qwen3-0.6b`": "scoring pairs, 0.6 billion parameters",
    "`--pairs 10 --questions": "training, ten pairs of one person",
    "`--pairs 8 ": "training, eight persons",
    "`--pairs 4 ": "training, four persons",
}
"""Names of the rows by the beginning of their first cell."""


def picture(page: str) -> str:
    """Return the SVG of the rows of the page that have a name."""
    estimates = []
    for start, name in NAMES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {start}"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        share = next(int(match[1]) for cell in cells if (match := re.fullmatch(r"(\d+) %", cell)))
        times = cells[-1]
        other = "TRL" if name.startswith("training") else "the script"
        remark = f"{times.removesuffix('x')} times as fast as {other}" if times else ""
        kind = BASELINE if name.startswith("training") else "model"
        estimates.append(Estimate(name, share / 100, None, kind, remark))
    drawing = draw_forest(
        "Share of the peak", estimates, figure=lambda value, _: f"{value:.0%}", reference=("aim 75 %", 0.75)
    )
    return framed("Share of the machine's peak in matrix products, on two CPU cores", [drawing.svg])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1]).read_text("utf-8")), encoding="utf-8")
