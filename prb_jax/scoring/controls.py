"""Controls of an evaluation: the same model without the user's profile, and with that of another user.

A high accuracy proves no personalisation by itself: a model may find the better response from its wording alone. The
gain over a control is what the model makes of the user.
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
from prb_jax.scoring.derived_users import derived_users
from prb_jax.text.view import View

if TYPE_CHECKING:
    from prb_jax.scoring.run import Job, ScoredRun

NONE, BLIND, SWAP, ALL = CONTROLS

_NEAREST: Final = 8
_LOOKED_AT: Final = 512


def choose_controls(job: Job, asked: str | None) -> list[Job]:
    """Return the controls of an evaluation: by the same model, which is shown something else, or another user's state.

    Args:
      asked: one of ``CONTROLS``; None for "blind" where the model is known to see something of its users, and for
        "none" elsewhere.

    Raises:
      RunError: an unknown control, or one without effect.
    """
    if asked not in (None, *CONTROLS):
        raise RunError(f"controls: expected {' or '.join(CONTROLS)}, found {quote(asked)}")
    reads_tokens = job.scorer.reader is not None
    if asked == NONE or (asked is None and not reads_tokens):
        return []  # without a look at the data
    sees = _sees_users(job)
    if asked is None:
        asked = BLIND if sees else NONE
    names = {NONE: (), ALL: (BLIND, SWAP)}.get(asked, (asked,))
    if names and not sees:
        raise RunError(
            f"controls={asked}: the model is shown nothing of a user (no profile in the data, profile_posts=0, or "
            "users that it does not know), so that nothing can be left out or swapped"
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
            if scorer.adapts:  # a user's name is enough to be shown another one
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
    """Return the comparison with no profile, no user and no hints of one."""
    return replace(comparison, profile=(), user_id=None, hints=None)


def with_other_users(
    comparisons: Sequence[Comparison], *, view: View | None = None, seed: int = 0
) -> list[Comparison]:
    """Return the comparisons with profile and name of another user: one other user for each.

    The other user is drawn among the eight users whose profiles are nearest in length (characters of the posts that
    are shown), by the seed and the user's name. Rows without a user belong to one person where their profiles share
    posts (`prb_jax.scoring.derived_users`), and never get a profile that shares a post with their
    own. A comparison without a profile stays so.

    Args:
      view: what the model is shown; without one the whole profile counts.

    Raises:
      RunError: a user for whom there is no other one.
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
            other = comparisons[donor[place % len(donor)]]
            shown[row] = replace(
                comparisons[row],
                profile=other.profile,
                profile_order=other.profile_order,
                user_id=other.user_id,
                hints=other.hints,
            )
    return shown


def _people(comparisons: Sequence[Comparison], *, profiles: bool) -> dict[str, list[int]]:
    """The rows of each person, by a name; with ``profiles`` the rows alone that have one."""
    people: dict[str, list[int]] = {}
    unnamed = iter(derived_users([comparison for comparison in comparisons if comparison.user_id is None]))
    for row, comparison in enumerate(comparisons):
        user = comparison.user_id
        name = next(unnamed) if user is None else f"user {user}"
        if name is not None and (comparison.profile or not profiles):
            people.setdefault(name, []).append(row)

    def lasting(name: str, rows: list[int]) -> str:
        """A name that does not depend on the order of the rows: that of a user, or a post that is theirs alone."""
        if comparisons[rows[0]].user_id is not None:
            return name
        return "posts " + min(f"{post.id}\0{post.text}" for row in rows for post in comparisons[row].profile)

    return {lasting(name, rows): rows for name, rows in people.items()}


def _may_be_one(a: Comparison, b: Comparison) -> bool:
    """Whether two comparisons of different names may be of one person: one has no user, and they share a post."""
    if a.user_id is not None and b.user_id is not None:
        return False
    return not {post.text for post in a.profile}.isdisjoint(post.text for post in b.profile)


def control_figures(run: ScoredRun, control: ScoredRun, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the summary of a run says of one of its controls, which has this summary."""
    comparisons, table = run.job.inputs.comparisons, run.job.table
    paired = paired_difference(run.rows, control.rows, clusters=table.clusters(comparisons))
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
