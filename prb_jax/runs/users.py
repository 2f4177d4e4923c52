"""``users.csv`` of a run: one line per user, with the accuracy and its interval."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.uncertainty import accuracy_interval
from prb_jax.records.writing import write_file
from prb_jax.runs.evaluation import USERS

COLUMNS = ("user", "comparisons", "wins", "ties", "accuracy", "ci95_low", "ci95_high", "known")
USERS_DEFINITION = (
    f"in {USERS}, one line per user in the order of the data: comparisons, wins, ties, accuracy, the bounds of its "
    "95 % score interval (Wilson) over the user's comparisons (empty below six comparisons), and known: yes if the "
    "model was trained with this user, no if the model scores them as an unknown user, empty if the "
    "model learns nothing about single users"
)


@dataclass(frozen=True)
class UserLine:
    """Figures of one user in a run."""

    user: str  # the name
    # comparisons, wins, ties: counts
    comparisons: int
    wins: int
    ties: int
    # bounds of the interval of the accuracy; None below six comparisons
    ci95: tuple[float, float] | None

    @property
    def accuracy(self) -> float:
        """The share of wins."""
        return self.wins / self.comparisons


def user_lines(rows: Sequence[ScoredRow], clusters: Clusters) -> list[UserLine]:
    """Return one line per user, in the order of the data.

    Args:
      rows: Rows of a run.
      clusters: Clusters of the rows, in the same order.
    """
    result = outcomes(rows)
    counts: dict[str, list[int]] = {}
    for user, win, tie in zip(clusters.users, result.wins.tolist(), result.ties.tolist(), strict=True):
        if user is not None:
            tally = counts.setdefault(user, [0, 0, 0])
            tally[0] += 1
            tally[1] += win
            tally[2] += tie
    return [UserLine(user, n, wins, ties, _interval(wins, n)) for user, (n, wins, ties) in counts.items()]


def write_users(
    folder: Path, rows: Sequence[ScoredRow], clusters: Clusters, *, unknown: Collection[str] | None
) -> bool:
    """Write ``users.csv``, and return True if there are users.

    Args:
      folder: Run folder.
      rows: Rows of the run.
      clusters: Clusters of the rows, in the same order.
      unknown: Users that the model was not trained with; None if the model learns nothing about single users.

    Raises:
      RunError: the file cannot be written.
    """
    users = user_lines(rows, clusters)
    if not users:
        return False
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for one in users:
        bounds = ("", "") if one.ci95 is None else [f"{end:.6g}" for end in one.ci95]
        known = "" if unknown is None else "no" if one.user in unknown else "yes"
        facts = [one.user, one.comparisons, one.wins, one.ties]
        lines.writerow([*facts, f"{one.accuracy:.6g}", *bounds, known])
    write_file(folder / USERS, text.getvalue().encode())
    return True


@lru_cache(maxsize=4096)
def _interval(wins: int, n: int) -> tuple[float, float] | None:
    bounds = accuracy_interval(np.repeat([1, 0], [wins, n - wins]), Clusters((None,) * n)).bounds
    return None if bounds is None else (bounds[0], bounds[1])
