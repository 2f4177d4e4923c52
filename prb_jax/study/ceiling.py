"""How much k choices can tell on these data: choices drawn from the prior that `bayes` estimated, on the same people,
pairs and contexts. It says whether "no gain" means a poor method or poor data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.personal.few_shot.bayes import METHOD, pooled_margins
from prb_jax.personal.few_shot.choices import Choices, UserRows
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users, repeated, score_users
from prb_jax.study.outcomes import NO_USER, Part
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART

CEILING: Final = "ceiling"
SIMULATED: Final = "simulated"
KNOWN: Final = "person known"
REPEATS: Final = 8


def draw_choices(
    fitted: Fitted, choices: Choices, *, rng: np.random.Generator, mesh: Mesh | None = None
) -> tuple[Choices, np.ndarray]:
    """Draw people's tastes from the prior of `bayes`, and their choices between the same responses.

    Returns:
      the choices as they then are, and the true margin of each drawn choice, float64 [n].
    """
    users = np.arange(choices.number_of_users, dtype=np.int32)
    nothing = np.zeros((len(users), 1), np.int32)
    rows = UserRows(users, nothing, nothing > 0)
    prior = adapt_users(METHOD, fitted, choices, rows, key=jax.random.key(0), mesh=mesh)["weights"]
    basis, deltas = np.asarray(fitted.arrays["basis"]), choices.deltas
    tastes = (prior + rng.standard_normal(prior.shape)) @ basis.T
    tastes += np.sqrt(float(fitted.numbers["isotropic"])) * rng.standard_normal(tastes.shape)
    margins = np.asarray(pooled_margins(fitted, choices), np.float64)
    margins += np.einsum("nd,nd->n", deltas, tastes[choices.users])
    turned = rng.random(len(choices)) > 1 / (1 + np.exp(-margins))
    drawn = replace(
        choices,
        chosen=np.where(turned, choices.rejected, choices.chosen).astype(np.int32),
        rejected=np.where(turned, choices.chosen, choices.rejected).astype(np.int32),
        in_context=None,
    )
    return drawn, np.where(turned, -margins, margins)


def ceiling(
    fitted: Fitted, part: Part, *, shots: Sequence[int], mesh: Mesh | None = None, repeats: int = REPEATS
) -> list[dict[str, Any]]:
    """Return the expected figures of `bayes` where its prior is the truth, with k choices, of nobody, and of one who
    knows each person's taste; for unseen and for seen people.

    Args:
      fitted: `bayes`.
      part: of the split that it was fitted on.
      shots: numbers of choices.
      mesh: devices over which people are split.
      repeats: how often the people's tastes and choices are drawn.
    """
    rng = np.random.default_rng([part.split.seed, 11])
    places, width = part.queries.places[part.queries.mask], max(1, *shots)
    nobody = repeated(METHOD.empty_state(fitted), len(part.queries.users))
    sums: dict[tuple[str, int], np.ndarray] = {}
    for _ in range(repeats):
        drawn, truth = draw_choices(fitted, part.choices, rng=rng, mesh=mesh)
        truth = truth[places]
        said = {(KNOWN, max(shots)): truth}
        for key in ((NO_USER, 0), *(("", count) for count in shots)):
            states = nobody
            if not key[0]:
                rows = part.contexts.first(key[1], width=width)
                states = adapt_users(METHOD, fitted, drawn, rows, key=jax.random.key(0), mesh=mesh)
            scores = score_users(METHOD, fitted, states, drawn, part.queries, mesh=mesh)[part.queries.mask]
            said[key] = (scores[:, 0] - scores[:, 1]).astype(np.float64)
        sure = 1 / (1 + np.exp(-truth))
        for key, margin in said.items():
            right = np.where(margin > 0, sure, np.where(margin < 0, 1 - sure, 0.0))
            loss = sure * np.logaddexp(0, -margin) + (1 - sure) * np.logaddexp(0, margin)
            sums[key] = sums.get(key, 0) + np.stack([right, loss]) / repeats
    rows = []
    for name, number in (("unseen", UNSEEN_PART), ("seen", SEEN_PART)):
        here = part.split.part[part.choices.users[places]] == number
        if here.any():
            rows += [
                {"known": known, "shots": count, "split": name, "n": int(here.sum())}
                | dict(zip(("accuracy", "log_loss"), found[:, here].mean(axis=1).tolist(), strict=True))
                for (known, count), found in sums.items()
            ]
    return rows


def ceiling_rows(
    figures: Sequence[Mapping[str, Any]], fields: Sequence[str], part: str
) -> list[dict[str, Any]]:
    """Return the rows of ``results.json`` of a part of the people, means over the splits.

    Args:
      figures: those of the outcomes of `bayes`; none of an earlier version.
      fields: of a row; a simulation has few of them, and null for the others.
      part: "unseen" or "seen".
    """
    of_splits = [[row for row in one[CEILING] if row["split"] == part] for one in figures if CEILING in one]
    rows: list[dict[str, Any]] = []
    for group in zip(*of_splits, strict=True):
        counts = [row["n"] for row in group]
        known = group[0]["known"]
        rows.append(
            dict.fromkeys(fields)
            | {
                "method": f"{CEILING}, {known}" if known else CEILING,
                "control": SIMULATED,
                "split": part,
                "shots": group[0]["shots"],
                "n": sum(counts),
            }
            | {
                name: float(np.average([row[name] for row in group], weights=counts))
                for name in ("accuracy", "log_loss")
            }
        )
    nobody = next((row for row in rows if row["method"] == f"{CEILING}, {NO_USER}"), None)
    for row in rows:
        if nobody is not None and row is not nobody:
            for name, field in (("accuracy", "diff_to_no_user"), ("log_loss", "log_loss_diff_to_no_user")):
                row[field] = row[name] - nobody[name]
    return rows
