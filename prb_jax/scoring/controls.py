"""Controls of an evaluation: the same model without the user's profile, or with another user's profile.

High accuracy does not prove personalisation, because a model may find the better response from its wording. The gain
over a control measures how much the model uses the user.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import RunError, quote
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held
from prb_jax.scoring import CONTROLS
from prb_jax.scoring.clusters import clusters_of_table, derived_users
from prb_jax.text.view import View

if TYPE_CHECKING:
    from prb_jax.scoring.inputs import Job
    from prb_jax.scoring.run import ScoredRun

NONE, BLIND, SWAP, ALL = CONTROLS

_NEAREST: Final = 8
_LOOKED_AT: Final = 512


def choose_controls(job: Job, asked: str | None) -> list[Job]:
    """Return the controls of an evaluation: the same model with other inputs, or with another user's state.

    Args:
      asked: One of ``CONTROLS``. If None, "blind" for a model of tokens that sees its users, otherwise "none".

    Raises:
      RunError: The control is unknown or has no effect.
    """
    if asked not in (None, *CONTROLS):
        raise RunError(f"controls: expected {' or '.join(CONTROLS)}, found {quote(asked)}")
    reads_tokens = job.scorer.reader is not None
    if asked == NONE or (asked is None and not reads_tokens):
        return []  # returned early, to read no data
    sees = _sees_users(job)
    if asked is None:
        asked = BLIND if sees else NONE
    names = {NONE: (), ALL: (BLIND, SWAP)}.get(asked, (asked,))
    if names and not sees:
        raise RunError(
            f"controls={asked}: the model sees no user information (no profile in the data, profile_posts=0, or "
            "users that it does not know), so nothing can be removed or swapped"
        )
    controls = []
    for name in names:
        comparisons, scorer = job.inputs.comparisons, job.scorer
        if name == BLIND:
            shown = comparisons.changed(without_user)
        else:
            if not comparisons.in_memory:
                raise RunError(
                    "controls=swap: needs all profiles in memory, but the data is read by windows, as it is large or "
                    "prepared with tokens; controls=blind needs none"
                )
            view = job.view if reads_tokens else None
            if scorer.adapts:  # users without a profile can be swapped too
                view = replace(job.view, profile_posts=0)
            shown = Held(with_other_users(comparisons, view=view, seed=job.decided["seed"]))
            scorer = scorer.with_other_states(comparisons)
        controls.append(replace(job, control=name, shown=shown, scorer=scorer))
    return controls


def _sees_users(job: Job) -> bool:
    comparisons = job.inputs.comparisons.sample(_LOOKED_AT)
    hinted = any(comparison.hints for comparison in comparisons)
    return hinted or job.scorer.sees_users(comparisons, job.view)


def without_user(comparison: Comparison) -> Comparison:
    """Return the comparison without profile, user and hints."""
    return comparison.with_user_of(None)


def with_other_users(
    comparisons: Sequence[Comparison], *, view: View | None = None, seed: int = 0
) -> list[Comparison]:
    """Return the comparisons with profile, user id and hints of another user; each user gets one other user.

    The seed and the user's name select the other user among the eight users with the nearest profile lengths
    (characters of the posts shown). Rows without a user belong to one person if their profiles share posts
    (`prb_jax.scoring.clusters`); they never get a profile that shares a post with theirs. A comparison without a
    profile keeps none.

    Args:
      view: View of the model, which limits the posts that count; all posts count if not given.

    Raises:
      RunError: No other user is available for a user.
    """
    posts = None if view is None else view.profile_posts
    people = _people(comparisons, profiles=posts != 0 and any(one.profile for one in comparisons))
    lengths = {
        person: sum(len(post.text) for post in comparisons[rows[0]].profile[:posts])
        for person, rows in people.items()
    }
    order = sorted((length, person) for person, length in lengths.items())
    shown = list(comparisons)
    for person, rows in people.items():
        here, length = comparisons[rows[0]], lengths[person]
        place = bisect_left(order, (length, person))
        shorter, longer = range(place - 1, -1, -1), range(place + 1, len(order))
        nearest = heapq.merge(shorter, longer, key=lambda other, length=length: abs(order[other][0] - length))
        names = (order[other][1] for other in nearest)
        others = (name for name in names if not _may_be_one(here, comparisons[people[name][0]]))
        near = list(islice(others, _NEAREST))
        if not near:
            raise RunError(
                f"controls=swap: no other user has a profile to show in place of that of comparison {quote(here.id)}; "
                "expected the profiles of two users or more"
            )
        drawn = hashlib.sha256(f"{seed}\0{person}".encode()).digest()
        donor = people[near[int.from_bytes(drawn[:8], "big") % len(near)]]
        for place, row in enumerate(rows):
            shown[row] = comparisons[row].with_user_of(comparisons[donor[place % len(donor)]])
    return shown


def _people(comparisons: Sequence[Comparison], *, profiles: bool) -> dict[str, list[int]]:
    """Return the rows of each person, by name; with ``profiles`` only rows with a profile."""
    people: dict[str, list[int]] = {}
    unnamed = iter(derived_users([comparison for comparison in comparisons if comparison.user_id is None]))
    for row, comparison in enumerate(comparisons):
        user = comparison.user_id
        name = next(unnamed) if user is None else f"user {user}"
        if name is not None and (comparison.profile or not profiles):
            people.setdefault(name, []).append(row)

    def lasting(name: str, rows: list[int]) -> str:
        """Return a name that does not depend on the order of the rows: the user's name, or the person's least post."""
        if comparisons[rows[0]].user_id is not None:
            return name
        return "posts " + min(f"{post.id}\0{post.text}" for row in rows for post in comparisons[row].profile)

    return {lasting(name, rows): rows for name, rows in people.items()}


def _may_be_one(a: Comparison, b: Comparison) -> bool:
    """Return True if two names may be the same person: one comparison has no user, and they share a post."""
    if a.user_id is not None and b.user_id is not None:
        return False
    return not {post.text for post in a.profile}.isdisjoint(post.text for post in b.profile)


def control_figures(run: ScoredRun, control: ScoredRun, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a control in the summary of its run; `summary` is the control's own summary."""
    comparisons, table = run.job.inputs.comparisons, run.job.table
    paired = paired_difference(run.rows, control.rows, clusters=clusters_of_table(table, comparisons))
    told = table.told()
    if control.job.control == SWAP:
        told = sum(
            (ours.profile, ours.user_id, ours.hints) != (theirs.profile, theirs.user_id, theirs.hints)
            for ours, theirs in zip(comparisons, control.job.shown, strict=True)
        )
    return {
        **{key: summary[key] for key in ("n", "accuracy", "ci95", "ci95_reason", "ties")},
        "shown_otherwise": told,
        "difference": paired["difference"],
        "difference_ci95": paired["ci95"],
        "difference_ci95_reason": paired["ci95_reason"],
    }
