"""The correlations of docs/behaviour.md from the table of its reward models, with today's intervals.

    python docs/behaviour_table.py

Figures of the table are rounded to three digits; correlations then change by less than 0.01.
"""

import re
from pathlib import Path

import numpy as np

from prb_jax.metrics.paired import add_holm
from prb_jax.metrics.prediction import fisher_interval
from prb_jax.metrics.rank_measures import MEASURES, permutation_test

BEHAVIOURS = ("policy accuracy", "best of 16", "guided", "GRPO", "SFT", "DPO", "PPO")
SHOWN = ("pearson", "spearman", "kendall")
TRUTH = "persona-truth"


def read_models(page: Path) -> dict[str, list[float]]:
    """Return the figures of each reward model: accuracy on seen and on unseen persons, then the behaviours."""
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    cells = {name: row.split(" | ") for name, row in rows}
    return {name: [float(cell.split()[0]) for cell in row] for name, row in cells.items() if len(row) == 9}


def main() -> None:
    """Print the table."""
    models = read_models(Path(__file__).with_name("behaviour.md"))
    figures = np.array([row for name, row in models.items() if name != TRUTH])
    accuracy = figures[:, :2].mean(axis=1)  # as many pairs of seen as of unseen persons
    tested = []
    for column, behaviour in enumerate(BEHAVIOURS, 2):
        for name in SHOWN:
            value = float(MEASURES[name](accuracy, figures[:, column]))
            p, _ = permutation_test(name, accuracy, figures[:, column], seed=0)
            ends = fisher_interval(name, value, len(figures))
            tested.append({"behaviour": behaviour, "value": value, "ci95": ends, "p": p, "p_holm": None})
    add_holm(tested)
    print("| behaviour | " + " | ".join(f"{name.capitalize()} | p, Holm" for name in SHOWN) + " |")
    print("|---" * (1 + 2 * len(SHOWN)) + "|")
    for behaviour in BEHAVIOURS:
        cells = [
            f"{row['value']:+.2f} [{row['ci95'][0]:+.2f}, {row['ci95'][1]:+.2f}] | {row['p']:.3f}, {row['p_holm']:.3f}"
            for row in tested
            if row["behaviour"] == behaviour
        ]
        print(f"| {behaviour} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
