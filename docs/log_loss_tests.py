"""The column "its p, Holm, at most" of the tables of docs/personal_studies.md: the test of a rounded log-loss.

    python docs/log_loss_tests.py

These tables were made before studies tested the log-loss. A p-value of the column is the largest one that the rounded
difference and its 95 % interval allow, with 30 degrees of freedom, times the number of rows of the study: 15 methods
besides pooled Bradley-Terry, with each number of comparisons. Holm's adjusted value is not above it.
"""

import re
from pathlib import Path

from scipy.special import stdtr, stdtrit

METHODS, DEGREES, HALF_DIGIT = 15, 30, 0.0005
SHOTS = {"gd6": 5, "any other choice": 5, "polis_en": 3, "ukpconvarg1": 3, "prefeval": 1, "personas": 6}
FIGURE = re.compile(r"([+-][\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]")
LOSS, COLUMN = "log-loss minus pooled", "its p, Holm, at most"


def largest_p(cell: str) -> float | None:
    """Return the largest two-sided p-value that a rounded difference and its interval allow; None without them."""
    if not (found := FIGURE.match(cell)):
        return None
    value, low, high = map(float, found.groups())
    half = (high - low) / 2 + HALF_DIGIT
    least = max(abs(value) - HALF_DIGIT, 0.0)
    return float(2 * stdtr(DEGREES, -least / half * stdtrit(DEGREES, 0.975)))


def tested(lines: list[str]) -> list[str]:
    """Return the lines of a page, where tables with log-losses have the column."""
    result, section, head, more = list[str](), "", list[str](), ""
    for line in lines:
        section = line.strip("# ").lower() if line.startswith("#") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if LOSS in cells and "p, Holm" in cells and not any(cell.startswith("its p") for cell in cells):
            head, more = cells, COLUMN
        elif not cells:
            head, more = [], ""
        elif not set("".join(cells)) - {"-"}:
            more = "---"
        elif head:
            p = None if "," in cells[0] else largest_p(cells[head.index(LOSS)])
            rows = METHODS * next(count for name, count in SHOTS.items() if name in section)
            more = "-" if p is None else "< 0.001" if rows * p < 0.001 else f"{min(rows * p, 1):.3f}"
        if head:
            place = head.index(LOSS) + 1
            line = f"| {' | '.join([*cells[:place], more, *cells[place:]])} |"
            line = line.replace(" ", "") if more == "---" else line
        result.append(line)
    return result


if __name__ == "__main__":
    page = Path(__file__).with_name("personal_studies.md")
    page.write_text("\n".join(tested(page.read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8")
