"""`stacked` against each of its parts on people of the studies, the table of docs/personalise.md.

    python docs/personal_studies.py ENCODER DATA OUT gd6_plain      # features, and the whole study
    python docs/stacked_parts.py DATA OUT 5 gd6_plain

The outcomes of pooled Bradley-Terry, `bayes` and `stacked` come from the study. The two simple parts of `stacked`
are fitted again on each of the first 5 splits (or fewer), and predict the same choices of unseen people. Their margins
are kept in OUT/NAME.stacked, so the same call continues what was killed. The table is in OUT/NAME.stacked.md.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from personal_studies import STUDIES, prepare
from scipy.optimize import minimize_scalar

from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.paired import add_holm
from prb_jax.metrics.uncertainty import Interval, difference_interval, mean_interval
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot import bayes, stacked
from prb_jax.personal.few_shot.cross_fit import CrossFitData
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.runs.kind import as_recorded
from prb_jax.scoring.inputs import read_inputs
from prb_jax.study.outcomes import (
    PLAIN,
    Outcome,
    SplitData,
    make_part,
    parts_of_fit,
    read_outcome,
    run_method,
    standardised,
)
from prb_jax.study.population import read_population
from prb_jax.study.splits import UNSEEN_PART, make_splits, posts_of_split

POOLED = method_named("pooled")
NAMES = (POOLED.name, *stacked.PARTS, stacked.METHOD.name)
SIMPLE = ("nobody", "simple")


def outcomes_of(part: SplitData, shots: tuple[int, ...]) -> dict[str, Outcome]:
    """Fit the two simple parts on a split, and predict with them."""
    settings = bayes.BayesSettings(validation_shots=shots)
    seen, validation, key = parts_of_fit(bayes.METHOD, part)
    outcomes = {}
    for one, fit in bayes.fit_simple(CrossFitData(bayes.METHOD, seen, validation, settings, key)).items():
        outcome, _ = run_method(bayes.METHOD, fit, part, shots=shots, mesh=None)
        facts = as_recorded({"settings": asdict(settings), "seconds_fit": 0.0})
        outcomes[one] = replace(outcome, figures={**outcome.figures, **facts})
    return outcomes


def compare(name: str, data: Path, out: Path, *, splits: int) -> str:
    """Return the table of the first splits of a study, with the number of choices and people."""
    study, folder = STUDIES[name], out / f"{name}.stacked"
    folder.mkdir(exist_ok=True)
    inputs = read_inputs([str(prepare(name, data, out))])
    population = read_population(inputs.comparisons, open_features(out / f"{study.data or name}.features"))
    shots = tuple(int(text) for text in study.shots.split(","))
    places = list[np.ndarray]()
    margins: dict[tuple[str, int], list[np.ndarray]] = {}
    for split in make_splits(population, by=study.split, seeds=study.seeds)[:splits]:
        of_study = out / name / "outcomes"
        paths = {one: (folder if one in SIMPLE else of_study) / f"{one}-{split.seed}.npz" for one in NAMES}
        if not all(paths[one].exists() for one in SIMPLE):
            posts, _ = posts_of_split(population, split)
            known = replace(population.choices, posts=posts, in_context=None)
            part = make_part(standardised(known, split)[0], split)
            for one, outcome in outcomes_of(part, shots).items():
                outcome.save(paths[one])
            jax.clear_caches()
        outcomes = {one: read_outcome(path) for one, path in paths.items()}
        asked = outcomes[POOLED.name].places
        assert all(np.array_equal(outcome.places, asked) for outcome in outcomes.values())
        # Each person is unseen in one split at most.
        unseen = split.part[population.choices.users[asked]] == UNSEEN_PART
        places.append(asked[unseen])
        for one, outcome in outcomes.items():
            for count in shots:
                margins.setdefault((one, count), []).append(outcome.margins[PLAIN, count][unseen])
    chosen = np.concatenate(places)
    clusters = population.clusters.take(chosen.tolist())
    rows = list[dict[str, Any]]()
    for count in shots:
        of = {one: np.concatenate(margins[one, count]).astype(np.float64) for one in NAMES}
        rows += [row(one, count, of, clusters) for one in NAMES]
    add_holm(rows)
    lines = [
        "| k | method | accuracy | log-loss | slope | minus pooled | p, Holm "
        "| `stacked` minus it: accuracy | log-loss |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line(one) for one in rows),
    ]
    people = len(np.unique(population.choices.users[chosen]))
    return f"{len(chosen):,} choices of {people:,} unseen people.\n\n" + "\n".join(lines) + "\n"


def row(name: str, shots: int, margins: Mapping[str, np.ndarray], clusters: Clusters) -> dict[str, Any]:
    """Return the figures of one method with a number of shots, given the margins [m] of all methods."""
    wins = {one: (values > 0).astype(np.int64) for one, values in margins.items()}
    losses = {one: np.logaddexp(0, -values) for one, values in margins.items()}
    ours, pooled = stacked.METHOD.name, POOLED.name

    def of_losses(one: str, other: str) -> tuple[float, Interval]:
        values = losses[one] - losses[other]
        return float(values.mean()), mean_interval(values, clusters.users, responses=clusters.responses)

    gain = wins[ours] - wins[name]
    to_pooled, interval = of_losses(name, pooled)
    return {
        "shots": shots,
        "method": name,
        "accuracy": wins[name].mean(),
        "log_loss": losses[name].mean(),
        "slope": slope_of(margins[name]),
        "to_pooled": None if name == pooled else (to_pooled, interval),
        "p": None if name == pooled else interval.p_value(to_pooled),
        "p_holm": None,
        "gain": None if name == ours else (float(gain.mean()), difference_interval(gain, clusters)),
        "lower": None if name == ours else of_losses(ours, name),
    }


def slope_of(margins: np.ndarray) -> float:
    """Return the factor of margins [m] with the lowest loss: above 1 where a method is less sure than it may be."""
    return float(minimize_scalar(lambda slope: np.logaddexp(0, -slope * margins).mean(), bounds=(0.2, 5)).x)


def line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of the table."""

    def shown(name: str) -> str:
        if row[name] is None:
            return "-"
        value, interval = row[name]
        return f"{value:+.4f} [{interval.low:.4f}, {interval.high:.4f}]"

    p = "-" if row["p_holm"] is None else f"{row['p_holm']:.4f}"
    cells = [str(row["shots"]), f"`{row['method']}`", f"{row['accuracy']:.4f}", f"{row['log_loss']:.4f}"]
    cells.append(f"{row['slope']:.2f}")
    return f"| {' | '.join([*cells, shown('to_pooled'), p, shown('gain'), shown('lower')])} |"


if __name__ == "__main__":
    source, folder, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for study in sys.argv[4:] or STUDIES:
        text = compare(study, source, folder, splits=count)
        (folder / f"{study}.stacked.md").write_text(text, encoding="utf-8")
        print(text)
