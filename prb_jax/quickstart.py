"""The first table: how far the built-in baselines get on the generated benchmark."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.data.comparison import Comparison
from prb_jax.data.personas import generate
from prb_jax.errors import RunError
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.scoring.baselines import BASELINES, score_baseline
from prb_jax.scoring.runs import RUN, SUMMARY, write_json, writing

if TYPE_CHECKING:
    from rich.table import Table

GENERIC, SEEN, UNSEEN = "generic-test", "test-seen", "test-unseen"
"""Parts of the generated benchmark: one response plainly worse for everyone; personas that also occur in
the training part, on new topics; personas that do not."""

BOUNDS = {"best, user unknown": "user_blind", "best, user known": "persona_aware"}
"""Known from how the benchmark is made: no scorer that ignores the profile exceeds the first, none at all
the second."""


@dataclass(frozen=True)
class Quickstart:
    """The result of `quickstart`.

    Attributes:
      path: the file written.
      summary: what it holds.
    """

    path: Path
    summary: dict[str, Any]


def quickstart(*, out: str | Path) -> Quickstart:
    """Scores the baselines on the generated benchmark and writes `summary.json` to `out`.

    `models` in it holds for each model its accuracy on generic pairs, on personalised pairs of seen
    and of unseen personas (each with its 95 % interval), the share of personas covered, the number of
    pairs it was trained on, and milliseconds of scoring for each pair. `bounds` holds what is possible.

    Raises:
      RunError: `out` holds a run of `prb evaluate`, is a file, or cannot be written.
    """
    folder = Path(out)
    if (folder / RUN).exists():
        raise RunError(f"{folder}: holds another run; give --out another folder")
    benchmark = generate()
    parts = {part: benchmark.parts[part] for part in (GENERIC, SEEN, UNSEEN)}
    summary = {
        "pairs": {part: len(comparisons) for part, comparisons in parts.items()},
        "models": {name: _baseline(name, parts) for name in BASELINES},
        "bounds": {
            bound: {
                "personalised_accuracy_seen": getattr(benchmark.ceilings[SEEN], field),
                "personalised_accuracy_unseen": getattr(benchmark.ceilings[UNSEEN], field),
            }
            for bound, field in BOUNDS.items()
        },
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SUMMARY, summary)
    return Quickstart(path=folder / SUMMARY, summary=summary)


def quickstart_table(summary: Mapping[str, Any]) -> "Table":
    """The summary as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from prb_jax.report.table import interval

    pairs = summary["pairs"]
    table = Table(title="Accuracy on the generated benchmark", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    table.add_column(f"generic\n{pairs[GENERIC]:,} pairs")
    table.add_column(f"seen personas\n{pairs[SEEN]:,} pairs")
    table.add_column(f"unseen personas\n{pairs[UNSEEN]:,} pairs")
    table.add_column("coverage", justify="right")
    table.add_column("pairs\ntrained on", justify="right")
    table.add_column("ms/pair", justify="right")
    table.caption = r"\[..] 95 % interval, bootstrap over personas"
    table.caption_justify = "left"
    for name, figures in summary["models"].items():
        cells = [
            interval(figures[key], figures[f"{key}_ci95"]).replace("[", r"\[")
            for key in ("generic_accuracy", "personalised_accuracy_seen", "personalised_accuracy_unseen")
        ]
        coverage = "-" if figures["coverage"] is None else f"{figures['coverage']:.2f}"
        trained, speed = f"{figures['train_pairs']:,}", f"{figures['ms_per_pair']:.3g}"
        table.add_row(name.removeprefix("baseline:"), *cells, coverage, trained, speed)
    table.add_section()
    for bound, figures in summary["bounds"].items():
        seen, unseen = (
            f"{figures[key]:.3f}" for key in ("personalised_accuracy_seen", "personalised_accuracy_unseen")
        )
        table.add_row(bound, "", seen, unseen)
    return table


def _baseline(name: str, parts: Mapping[str, Sequence[Comparison]]) -> dict[str, Any]:
    start = time.perf_counter()
    scored = {part: _rows(name, comparisons) for part, comparisons in parts.items()}
    seconds = time.perf_counter() - start
    generic, seen, unseen = (summarise(scored[part]) for part in (GENERIC, SEEN, UNSEEN))
    return {
        "generic_accuracy": generic["accuracy"],
        "generic_accuracy_ci95": generic["ci95"],
        "personalised_accuracy_seen": seen["accuracy"],
        "personalised_accuracy_seen_ci95": seen["ci95"],
        "personalised_accuracy_unseen": unseen["accuracy"],
        "personalised_accuracy_unseen_ci95": unseen["ci95"],
        "coverage": summarise([*scored[SEEN], *scored[UNSEEN]])["coverage"],
        "train_pairs": 0,
        "ms_per_pair": 1000 * seconds / sum(len(rows) for rows in scored.values()),
    }


def _rows(name: str, comparisons: Sequence[Comparison]) -> list[ScoredRow]:
    return [
        ScoredRow(c.id, c.subset, c.user_id, [float(score) for score in scores], list(c.labels or ()))
        for c, scores in zip(comparisons, score_baseline(name, comparisons), strict=True)
    ]
