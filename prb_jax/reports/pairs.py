"""The comparisons of a run that are worth reading: their texts, if the data are unchanged, and the worst ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prb_jax.errors import DataError, listed, short_repr
from prb_jax.metrics.accuracy import outcomes
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records.comparison import Comparison
from prb_jax.records.sources.recorded import recorded_sources
from prb_jax.reports.page import Block, PairList, Paragraph, clipped
from prb_jax.reports.table import Table, first_words, number
from prb_jax.runs.finished import FinishedRun
from prb_jax.runs.kind import RUN
from prb_jax.scoring.inputs import read_inputs

MOST_PAIRS = 300
_WORST = 100  # number of the worst comparisons overall, before subsets and users
_WORST_OF_SUBSET = 10
_LONGEST_TEXT = 4000
_LONGEST_POST = 500
_MOST_POSTS = 10


@dataclass(frozen=True)
class Texts:
    """The comparisons of a run by id; empty if they cannot be shown, with the reason in ``missing``."""

    by_id: Mapping[str, Comparison]
    missing: str = ""

    __repr__ = short_repr


@dataclass(frozen=True)
class TextReader:
    """Reads the data of several runs, each once: from ``places``, their current location, or from the names that each
    run was given."""

    places: Sequence[str] = ()
    _known: dict[str, tuple[dict[str, Any], dict[str, Comparison]]] = field(default_factory=dict, repr=False)

    def read(self, run: FinishedRun) -> Texts:
        """Return the comparisons that the run scored, if the data are unchanged.

        Raises:
          DataError: an explicitly given place does not contain the data of the run.
        """
        if run.rows[0].is_graded:
            return Texts({}, "they are in the log")
        inputs = run.record["inputs"]
        recorded, limit = inputs.get("data"), inputs.get("limit")
        if not isinstance(recorded, dict) or not (self.places or run.record.get("data")):
            return Texts({}, "the run was made of comparisons given from Python; name their file with --data")
        try:
            names = list(self.places) or recorded_sources(run.record["data"], where=str(run.path / RUN))
            key = repr((names, recorded.get("subset"), limit))
            if key not in self._known:
                opened = read_inputs(names, subset=recorded.get("subset"), limit=limit)
                self._known[key] = (
                    opened.to_json(),
                    {comparison.id: comparison for comparison in opened.comparisons},
                )
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
    """Return how many posts of a comparison its scorer saw; a scorer without tokens sees all of them."""
    if not row.tokens:
        return posts
    limit = run.record["inputs"].get("profile_posts")
    dropped = row.truncated.get("posts_dropped", 0) if isinstance(row.truncated, Mapping) else 0
    return (min(posts, limit) if isinstance(limit, int) else posts) - dropped


def pairs_to_read(run: FinishedRun, texts: Texts, *, room: int) -> Iterator[Block]:
    """Yield the worst comparisons with their texts, limited to ``room`` bytes; without texts, a table of them."""
    margins = outcomes(run.rows).margins
    order = [int(place) for place in np.argsort(margins, kind="stable")]
    if not texts.by_id:
        yield Paragraph(f"The texts are not shown: {texts.missing}.", True)
        columns = {
            "id": lambda place: run.rows[place].id,
            "subset": lambda place: run.rows[place].subset or "",
            "user": lambda place: run.rows[place].user_id or "",
            "margin": lambda place: number(float(margins[place]), "{:.4g}"),
        }
        shown = order[:MOST_PAIRS]
        title = f"The {len(shown):,} comparisons with the lowest margin"
        yield Table.of(title, shown, columns, words=3, filtered=True)
        return
    chosen: dict[int, dict[str, Any]] = {}
    for place in _in_turn(order, run.rows):
        if len(chosen) == MOST_PAIRS or room < 0:
            break
        if place not in chosen:
            row = run.rows[place]
            chosen[place] = _pair(run, row, texts.by_id[row.id], float(margins[place]))
            room -= _size(chosen[place])
    pairs = [chosen[place] for place in order if place in chosen]
    note = (
        f"{len(pairs):,} of {len(run.rows):,} comparisons, lowest margin first: the worst of all, the worst of each "
        "subset and of each user, as many as fit. Long texts are cut here, with a note."
    )
    subsets, users = (sorted({pair[key] for pair in pairs}) for key in ("subset", "user"))
    yield PairList(note, pairs, subsets, users)


def _in_turn(order: Sequence[int], rows: Sequence[ScoredRow]) -> Iterator[int]:
    """Yield all places: first the worst, then the worst of each subset, then of each user, then the others."""
    yield from order[:_WORST]
    yield from _first_of_each(order, (rows[place].subset for place in order), most=_WORST_OF_SUBSET)
    yield from _first_of_each(order, (rows[place].user_id for place in order), most=1)
    yield from order


def _first_of_each(order: Sequence[int], groups: Iterable[str | None], *, most: int) -> Iterator[int]:
    counts: dict[str | None, int] = {}
    for place, group in zip(order, groups):
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= most:
            yield place


def _pair(run: FinishedRun, row: ScoredRow, comparison: Comparison, margin: float) -> dict[str, Any]:
    """Return the fields of a comparison that the page template uses. Lists of texts are (name, text)."""
    seen, there = posts_seen(run, row, len(comparison.profile)), len(comparison.profile)
    first = f", the first {_MOST_POSTS} here" if there > _MOST_POSTS else ""
    reasons = [
        (aspect.aspect, " ".join(filter(None, (aspect.reason, aspect.evidence))))
        for aspect in comparison.rubric_aspects
    ]
    if comparison.narrative:
        reasons.append(("narrative", comparison.narrative))
    cut = row.truncated if isinstance(row.truncated, Mapping) else {}
    kinds = ", ".join(f"{kind.replace('_', ' ')}: {amount:,}" for kind, amount in cut.items() if amount)
    note = f"The model did not see all of the text{f' ({kinds})' if kinds else ''}."
    return {
        "id": row.id,
        "question": first_words(comparison.question) or row.id,
        "subset": row.subset or "",
        "user": row.user_id or "",
        "margin": f"{margin:.4g}",
        "verdict": "right" if margin > 0 else "wrong" if margin < 0 else "tie",
        "messages": [
            (role, clipped(text, _LONGEST_TEXT))
            for role, text in (
                *([("tools", comparison.context)] if comparison.context else []),
                *((turn.role, turn.content) for turn in comparison.prompt),
            )
        ],
        "responses": [
            {
                "text": clipped(comparison.responses[k], _LONGEST_TEXT),
                "score": f"{row.scores[k]:.4g}",
                "label": f"{row.labels[k]:g}" if len(row.scores) > 2 else "",
                "preferred": row.labels[k] == max(row.labels),
                "picked": row.scores[k] == max(row.scores),
            }
            for k in sorted(range(len(row.scores)), key=lambda k: (-row.labels[k], -row.scores[k]))
        ],
        "posts": [
            (clipped(post.category, 100), clipped(post.text, _LONGEST_POST))
            for post in comparison.profile[:_MOST_POSTS]
        ],
        "posts_note": f"the model saw the first {seen:,} of {there:,} posts{first}",
        "private": [(clipped(name, 300), clipped(text, _LONGEST_TEXT)) for name, text in reasons],
        "note": note if row.is_truncated else "",
    }


def _size(pair: Mapping[str, Any]) -> int:
    """Return the approximate size of the pair on the page in bytes: UTF-8 text and HTML escapes."""
    texts = [text for _, text in (*pair["messages"], *pair["posts"], *pair["private"])]
    texts += [response["text"] for response in pair["responses"]]
    escapes = sum(5 * text.count(letter) for text in texts for letter in "&<>'\"")
    return 1500 + escapes + sum(len(text.encode()) for text in texts)
