"""The comparisons of a run that are worth reading: their texts, where the data are unchanged, and the worst of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, listed, short_repr
from prb_jax.metrics.accuracy import ScoredRow, outcomes
from prb_jax.reports.blocks import Block, Cell, PageTable, Pair, Pairs, Paragraph, Response, clipped, visible
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
        if run.rows[0].is_graded:
            return Texts({}, "they are in the log")
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


MOST_PAIRS = 300

_WORST = 100  # of all, before those of subsets and users have their turn

_WORST_OF_SUBSET = 10

_LONGEST_TEXT = 4000

_LONGEST_POST = 500

_MOST_POSTS = 10


def pairs_to_read(run: FinishedRun, texts: Texts, *, room: int) -> Iterator[Block]:
    """Yield the worst comparisons with their texts; a table without texts where those are missing.

    Args:
      run: whose comparisons.
      texts: of them.
      room: bytes of text to show at most.
    """
    margins = outcomes(run.rows).margins
    order = [int(place) for place in np.argsort(margins, kind="stable")]
    if not texts.by_id:
        yield Paragraph(f"The texts are not shown: {texts.missing}.", True)
        rows = [
            [
                Cell(run.rows[place].id),
                Cell(str(run.rows[place].subset or "")),
                Cell(str(run.rows[place].user_id or "")),
                Cell(f"{margins[place]:.4g}", float(margins[place])),
            ]
            for place in order[:MOST_PAIRS]
        ]
        title = f"The {len(rows):,} comparisons with the lowest margin"
        yield PageTable(title, ("id", "subset", "user", "margin"), rows, words=3, filtered=True)
        return
    chosen: dict[int, Pair] = {}
    for place in _in_turn(order, run.rows):
        if len(chosen) == MOST_PAIRS or room < 0:
            break
        row = run.rows[place]
        if place not in chosen:
            chosen[place] = _pair(run, row, texts.by_id[row.id], float(margins[place]))
            room -= _size(chosen[place])
    items = [chosen[place] for place in order if place in chosen]
    note = (
        f"{len(items):,} of {len(run.rows):,} comparisons, lowest margin first: the worst of all, the worst of each "
        "subset and of each user, as many as have room. Text that is too long loses its end here, and says so."
    )
    yield Pairs(note, items, sorted({item.subset for item in items}), sorted({item.user for item in items}))


def _in_turn(order: Sequence[int], rows: Sequence[ScoredRow]) -> Iterator[int]:
    """All places: first the worst, then the worst of each subset, then the worst of each user, then the others."""
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


def _pair(run: FinishedRun, row: ScoredRow, comparison: Comparison, margin: float) -> Pair:
    best, top = max(row.scores), max(row.labels)
    ordered = sorted(range(len(row.scores)), key=lambda k: (-row.labels[k], -row.scores[k]))
    labelled = len(row.scores) > 2
    responses = [
        Response(
            text=clipped(comparison.responses[k], _LONGEST_TEXT),
            score=f"{row.scores[k]:.4g}",
            label=f"{row.labels[k]:g}" if labelled else "",
            preferred=row.labels[k] == top,
            picked=row.scores[k] == best,
        )
        for k in ordered
    ]
    posts = comparison.profile[:_MOST_POSTS]
    return Pair(
        id=visible(row.id),
        subset=visible(str(row.subset or "")),
        user=visible(str(row.user_id or "")),
        margin=f"{margin:.4g}",
        verdict="right" if margin > 0 else "wrong" if margin < 0 else "tie",
        messages=[(message.role, clipped(message.content, _LONGEST_TEXT)) for message in comparison.prompt],
        responses=responses,
        posts=[(clipped(post.category, 100), clipped(post.text, _LONGEST_POST)) for post in posts],
        posts_note=_posts_note(run, row, comparison),
        private=_private(comparison),
        notes=_notes(row),
    )


def _posts_note(run: FinishedRun, row: ScoredRow, comparison: Comparison) -> str:
    seen, there = posts_seen(run, row, len(comparison.profile)), len(comparison.profile)
    first = f", the first {_MOST_POSTS} here" if there > _MOST_POSTS else ""
    return f"the model saw the first {seen:,} of {there:,} posts{first}"


def _private(comparison: Comparison) -> list[tuple[str, str]]:
    found = [
        (
            clipped(aspect.aspect, 300),
            clipped(" ".join(filter(None, (aspect.reason, aspect.evidence))), _LONGEST_TEXT),
        )
        for aspect in comparison.rubric_aspects
    ]
    if comparison.narrative:
        found.append(("narrative", clipped(comparison.narrative, _LONGEST_TEXT)))
    return found


def _notes(row: ScoredRow) -> list[str]:
    if not isinstance(row.truncated, Mapping):
        return ["The model did not see all of the text."] if row.truncated else []
    cut = [f"{kind.replace('_', ' ')}: {amount:,}" for kind, amount in row.truncated.items() if amount]
    return [f"The model did not see all of the text ({', '.join(cut)})."] if cut else []


def _size(pair: Pair) -> int:
    """About how many bytes the pair takes on the page: letters in UTF-8, and the escapes of HTML."""
    texts = [text for _, text in (*pair.messages, *pair.posts, *pair.private)]
    texts += [response.text for response in pair.responses]
    escapes = sum(5 * text.count(letter) for text in texts for letter in "&<>'\"")
    return 1500 + escapes + sum(len(text.encode()) for text in texts)
