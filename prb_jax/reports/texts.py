"""The texts behind a run: the comparisons that it scored, where they are still there and unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, listed, short_repr
from prb_jax.metrics.accuracy import ScoredRow
from prb_jax.runs.finished import FinishedRun
from prb_jax.scoring.inputs import read_inputs


@dataclass(frozen=True)
class Texts:
    """The comparisons of a run.

    Attributes:
      by_id: empty where they cannot be shown.
      missing: why they cannot be shown; empty where they can.
    """

    by_id: Mapping[str, Comparison]
    missing: str = ""

    __repr__ = short_repr


@dataclass(frozen=True)
class TextReader:
    """Reads the data of several runs, each once.

    Attributes:
      places: where the data of the runs lie now; empty for the names that each run was given.
    """

    places: Sequence[str] = ()
    _known: dict[str, tuple[dict[str, Any], dict[str, Comparison]]] = field(default_factory=dict, repr=False)

    def read(self, run: FinishedRun) -> Texts:
        """Return the comparisons that the run scored, if the data are what they were.

        Raises:
          DataError: a place that was given explicitly does not hold the data of the run.
        """
        inputs = run.record["inputs"]
        recorded, limit = inputs.get("data"), inputs.get("limit")
        names = list(self.places) or run.record.get("data")
        if not isinstance(recorded, dict) or not names:
            return Texts({}, "the run was made of comparisons given from Python; name their file with --data")
        try:
            key = repr((names, recorded.get("subset"), limit))
            if key not in self._known:
                found = read_inputs(names, subset=recorded.get("subset"), limit=limit)
                self._known[key] = (found.to_json(), {each.id: each for each in found.comparisons})
        except DataError as error:
            if self.places:
                raise
            return Texts({}, f"the data cannot be read now ({error})")
        described, by_id = self._known[key]
        if described != recorded:
            place = listed([str(name) for name in names])
            if self.places:
                raise DataError(
                    f"{place}: not the data of the run {run.path}, or changed since it was scored"
                )
            return Texts({}, f"the data have changed since they were scored ({place})")
        return Texts(by_id)


def posts_seen(run: FinishedRun, row: ScoredRow, posts: int) -> int:
    """Return how many of the posts of a comparison its scorer saw; one without tokens sees them all."""
    if not row.tokens:
        return posts
    limit = run.record["inputs"].get("profile_posts")
    dropped = row.truncated.get("posts_dropped", 0) if isinstance(row.truncated, Mapping) else 0
    return (min(posts, limit) if isinstance(limit, int) else posts) - dropped
