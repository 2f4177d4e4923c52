"""Power of a study, by simulation from the prior of tastes that `bayes` estimated.

The ceiling: how much k choices can reveal for the same people, pairs and contexts. It distinguishes a poor method from
poor data as the cause of "no gain". `prb personalise --plan`: how many people a study needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError, RunError, quote
from prb_jax.metrics.clusters import Clusters
from prb_jax.personal.few_shot.bayes import METHOD
from prb_jax.personal.few_shot.choices import group
from prb_jax.personal.few_shot.protocol import Fitted, adapt_users, repeated, score_users
from prb_jax.personal.few_shot.registry import POOLED, method_named
from prb_jax.platform.sharding import as_mesh
from prb_jax.records.writing import held_folder, refuse_file, write_json
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.inputs import Data, read_inputs
from prb_jax.study.backbone import features_of
from prb_jax.study.draws import draw_choices, prior_sampler
from prb_jax.study.outcomes import NO_USER, PLAIN, SplitData, fit_method, make_part, run_method, standardised
from prb_jax.study.population import Population, read_population
from prb_jax.study.results import results
from prb_jax.study.splits import PARTS, SEEN_PART, UNSEEN_PART, make_splits

KNOWN: Final = "person known"
DRAWS: Final = 4
PLAN: Final = "plan.json"
SHARES: Final = (0.25, 0.5, 1.0, 2.0)
REPEATS: Final = 3
GAIN: Final = 0.01  # gain in accuracy for which a plan computes the number of people
POWER: Final = 0.8
_POWER_QUANTILE: Final = 0.8416  # quantile of the normal distribution at POWER
PRIOR_SPLITS: Final = 5  # the prior is estimated on all people except a fifth, on whom it is tested


def ceiling(
    prior: Fitted, part: SplitData, *, shots: Sequence[int], mesh: Mesh | None = None
) -> list[dict[str, Any]]:
    """Return the expected figures of `bayes` under a true prior: with k choices, with no knowledge of the person, and
    with full knowledge of each person's taste; for unseen and for seen people.

    In each draw the true prior comes from the posterior of the estimated prior. With only its shrunk means, people
    would be less certain than they are.

    ``prior`` is `bayes` fitted on the split of the part; people are split over the mesh.
    """
    rng, mask = np.random.default_rng([part.split.seed, 11]), part.queries.mask
    places, width = part.queries.places[mask], max(1, *shots)
    draw = prior_sampler(prior, part.choices.only(part.split.trained))
    sums: dict[tuple[str, int], Any] = {}
    for _ in range(DRAWS):
        prior = draw(rng)
        drawn, truth = draw_choices(prior, part.choices, rng=rng, mesh=mesh)
        margins = {(KNOWN, max(shots)): truth[places]}
        for key in ((NO_USER, 0), *((PLAIN, count) for count in shots)):
            if key[0] == NO_USER:
                states = repeated(METHOD.empty_state(prior), len(part.queries.users))
            else:
                rows = part.contexts.first(key[1], width=width)
                states = adapt_users(METHOD, prior, drawn, rows, key=jax.random.key(0), mesh=mesh)
            scores = score_users(METHOD, prior, states, drawn, part.queries, mesh=mesh)[mask]
            margins[key] = (scores[:, 0] - scores[:, 1]).astype(np.float64)
        sure = 1 / (1 + np.exp(-truth[places]))
        for key, margin in margins.items():
            right = expected_wins(margin, truth[places])
            loss = sure * np.logaddexp(0, -margin) + (1 - sure) * np.logaddexp(0, margin)
            sums[key] = sums.get(key, 0) + np.stack([right, loss]) / DRAWS
    part_of = part.split.part[part.choices.users[places]]
    return [
        {"known": known, "shots": count, "split": PARTS[number], "n": int((part_of == number).sum())}
        | dict(zip(("accuracy", "log_loss"), total[:, part_of == number].mean(axis=1).tolist(), strict=True))
        for number in (UNSEEN_PART, SEEN_PART)
        if (part_of == number).any()
        for (known, count), total in sums.items()
    ]


def plan_study(
    data: Data,
    *,
    backbone: str | Path,
    out: str | Path,
    people: Sequence[int] = (),
    shots: int = 8,
    seeds: int = 1,
    split: str = "user",
    repeats: int = REPEATS,
    settings: Any = None,
    subset: str | None = None,
    limit: int | None = None,
    mesh: str | Mesh | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Predict the result of a study with more or fewer people like these.

    The prior of tastes is estimated by `bayes` on the data. For each number of people, people of the data are drawn
    with replacement, each with new tastes from the prior and so with new choices between the same responses. `bayes`
    and pooled Bradley-Terry are fitted, and compared on unseen people. Profiles are excluded.

    Args:
      data: Data, as for :func:`prb_jax.personalise`.
      backbone: Folder of `prb features`, or a model, whose features are then written to ``out/features``.
      out: Folder; ``plan.json`` contains the returned value.
      people: Numbers of people; by default a quarter, a half, once and twice as many as in the data.
      shots: Number of comparisons to adapt to a person on.
      seeds, split: Options of the studies.
      repeats: Number of simulated studies for each number of people.
      settings: Settings of `bayes`, instead of its defaults.
      subset, limit: Same as for :func:`prb_jax.evaluate`.
      mesh: Same as for :func:`prb_jax.load`.
      progress: Show progress on standard error.

    Returns:
      "ceiling": the expected gain in accuracy over knowing nobody, for the data's people with `shots` choices
      ("choices") and with full knowledge of the person ("person"); "rows": for each number of people "people",
      "choices", "gain" and "ci95_half", means over the repeats of the expected difference to pooled and of the half
      width of its interval, "power", the chance that the interval is above 0, by the normal approximation, and
      "gain_error" and "power_error", Monte Carlo standard errors (None for one repeat); "needed": the result of
      :func:`people_needed`.

    Raises:
      PrbError: the data cannot be used, or show no personal preferences to plan for.
    """
    folder = Path(out)
    refuse_file(out)
    if shots < 1 or repeats < 1 or any(count < 8 for count in people):
        raise RunError("plan: expected shots and repeats of at least 1, and at least 8 people")
    inputs = read_inputs(data, subset=subset, limit=limit)
    store = features_of(backbone, inputs, folder, None, limit=limit, progress=progress)
    population = read_population(inputs.comparisons, store)
    devices = as_mesh(mesh)
    settings = settings or METHOD.settings()
    first = make_splits(population, by=split, seeds=PRIOR_SPLITS)[0]
    population = replace(population, choices=standardised(population.choices, first)[0])
    part = make_part(population.choices, first)
    counts = tuple(people) or tuple(max(8, round(share * len(population.users))) for share in SHARES)
    done = Count(1 + len(counts) * repeats, unit="studies")
    with held_folder(folder), show_progress("plan", done, enabled=progress) as display:
        prior = fit_method(METHOD, settings, part, mesh=devices)
        display.advance(1)
        if not (prior.numbers["scale"] or prior.numbers["spread"]):
            raise DataError(
                f"{quote(METHOD.name)} found nothing personal in these data: the validation part chose no spread of "
                "tastes, so there is no gain to plan for"
            )
        expected = ceiling(prior, part, shots=(shots,), mesh=devices)
        best = {row["known"]: row["accuracy"] for row in expected if row["split"] == "unseen"}
        rows, draw = [], prior_sampler(prior, part.choices.only(first.trained))
        for number in counts:
            studies = []
            for repeat in range(repeats):
                rng = np.random.default_rng([number, repeat])
                of_study = draw(rng)
                drawn, truth = _draw_people(population, of_study, number, rng, devices)
                studies.append(
                    _simulated_study(
                        drawn, truth, settings, shots=shots, seeds=seeds, split=split, mesh=devices
                    )
                )
                display.advance(1)
            rows.append({"people": number, **power_of(studies)})
        plan = {
            "people": len(population.users),
            "shots": shots,
            "split": split,
            "seeds": seeds,
            "repeats": repeats,
            "prior": {name: float(value) for name, value in prior.numbers.items()},
            "ceiling": {"choices": best[PLAIN] - best[NO_USER], "person": best[KNOWN] - best[NO_USER]},
            "rows": rows,
            "needed": people_needed(rows),
        }
        write_json(folder / PLAN, plan)
    return plan


def _draw_people(
    population: Population, prior: Fitted, number: int, rng: np.random.Generator, mesh: Mesh
) -> tuple[Population, np.ndarray]:
    """Return people drawn with replacement from the population, who choose by new tastes; and the true margin of each
    choice."""
    grouped = group(population.choices)
    drawn = rng.integers(len(grouped.users), size=number)
    places = [grouped.places[row][grouped.mask[row]] for row in drawn]
    kept = np.concatenate(places)
    users = np.repeat(np.arange(number, dtype=np.int32), list(map(len, places)))
    names = tuple(f"person {user}" for user in range(number))
    choices = replace(population.choices.only(kept), users=users, number_of_users=number, posts=None)
    responses = population.clusters.responses
    if responses is not None:
        responses = tuple(responses[place] for place in kept)
    made, truth = draw_choices(prior, choices, rng=rng, mesh=mesh)
    drawn = replace(
        population,
        choices=made,
        profile_of=population.profile_of[kept],
        users=names,
        ids=tuple(population.ids[place] for place in kept),
        subsets=tuple(population.subsets[place] for place in kept),
        clusters=Clusters(tuple(names[user] for user in users), responses),
    )
    return drawn, truth


def _simulated_study(
    population: Population,
    truth: np.ndarray,
    settings: Any,
    *,
    shots: int,
    seeds: int,
    split: str,
    mesh: Mesh,
) -> dict[str, Any]:
    """Return the row of `bayes` on unseen people of a simulated study, plus its "expected" difference to pooled: the
    expectation over outcomes, given the true margins [n] of the predicted choices."""
    splits, pooled = make_splits(population, by=split, seeds=seeds), method_named(POOLED)
    parts = [make_part(population.choices, one) for one in splits]
    outcomes = {}
    for method, chosen in ((pooled, pooled.settings()), (METHOD, settings)):
        fits = [(fit_method(method, chosen, part, mesh=mesh), part) for part in parts]
        outcomes[method.name] = [
            run_method(method, fitted, part, shots=(shots,), mesh=mesh)[0] for fitted, part in fits
        ]
    wanted = (METHOD.name, "unseen", shots)
    rows = results(population, splits, outcomes)
    row = next(row for row in rows if (row["method"], row["split"], row["shots"]) == wanted)
    gains: dict[int, float] = {}  # each choice once, as in the rows
    for one, ours, theirs in zip(splits, outcomes[METHOD.name], outcomes[POOLED], strict=True):
        margins, places = truth[ours.places], ours.places
        gain = np.subtract(*(expected_wins(it.margins[PLAIN, shots], margins) for it in (ours, theirs)))
        unseen = one.part[population.choices.users[places]] == UNSEEN_PART
        for place, value in zip(places[unseen].tolist(), gain[unseen].tolist(), strict=True):
            gains.setdefault(place, value)
    return row | {"expected": float(np.mean(list(gains.values())))}


def expected_wins(margins: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return the probability that each choice is predicted correctly, given its true margin; a tie is not a win."""
    sure = 1 / (1 + np.exp(-np.asarray(truth, np.float64)))
    return np.where(margins > 0, sure, np.where(margins < 0, 1 - sure, 0.0))


def power_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over simulated studies, the chance that an interval is above 0, and Monte Carlo errors.

    The gain of a study is its expected gain; its drawn outcomes only determine the width of its interval. Errors are
    None for one study.
    """
    from scipy.special import ndtr  # scipy is slow to import

    known = [row for row in rows if row["diff_to_pooled_ci95"] is not None]
    names = ("gain", "gain_error", "ci95_half", "power", "power_error")
    if not known:
        return {"choices": rows[0]["n"], **dict.fromkeys(names)}
    gains = np.array([row["expected"] for row in known])
    halves = np.array([np.ptp(row["diff_to_pooled_ci95"]) / 2 for row in known])
    gain, half = float(gains.mean()), float(halves.mean())
    distance, error, power_error = 1.96 * (gain / half - 1), None, None
    if len(known) > 1:
        error = float(gains.std(ddof=1)) / math.sqrt(len(known))
        # the delta method, for the gain and the width
        steps = (gains - gain * halves / half) / half
        slope = 1.96 * math.exp(-(distance**2) / 2) / math.sqrt(2 * math.pi)
        power_error = slope * float(steps.std(ddof=1)) / math.sqrt(len(known))
    values = (gain, error, half, float(ndtr(distance)), power_error)
    choices = int(np.mean([row["n"] for row in known]))
    return {"choices": choices, **dict(zip(names, values, strict=True))}


def people_needed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of people and of their predicted choices that detect a gain of `GAIN` with power `POWER`.

    The width of an interval is inversely proportional to the root of the number of people; the constant is the mean
    over the rows of a plan. Both numbers are None if no row has an interval.
    """
    known = [row for row in rows if row["ci95_half"] is not None]
    people = choices = None
    if known:
        half = GAIN * 1.96 / (1.96 + _POWER_QUANTILE)
        people = math.ceil(np.mean([row["people"] * row["ci95_half"] ** 2 for row in known]) / half**2)
        choices = math.ceil(people * np.mean([row["choices"] / row["people"] for row in known]))
    return {"gain": GAIN, "power": POWER, "people": people, "choices": choices}
