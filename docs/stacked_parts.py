"""`stacked` against each of its parts on people of the studies, the table of docs/personalise.md.

    python docs/personal_studies.py ENCODER DATA OUT gd6_plain      # features, and the whole study
    python docs/stacked_parts.py DATA OUT gd6_plain

Each split of a study fits `stacked` on the features in OUT. Its parts and pooled Bradley-Terry predict the same choices
of unseen people. Margins are kept in OUT/NAME.stacked, so the same call continues what was killed. The table is in
OUT/NAME.stacked.md.
"""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from personal_studies import SEEDS, STUDIES, prepare

from prb_jax.metrics.clusters import Clusters
from prb_jax.metrics.uncertainty import difference_interval, mean_interval
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot import bayes, stacked
from prb_jax.personal.few_shot.registry import method_named
from prb_jax.scoring.inputs import read_inputs
from prb_jax.study.outcomes import (
    PLAIN,
    Outcome,
    SplitData,
    fit_method,
    make_part,
    read_outcome,
    run_method,
    standardised,
)
from prb_jax.study.population import read_population
from prb_jax.study.splits import UNSEEN_PART, make_splits, posts_of_split

POOLED = method_named("pooled")
NAMES = (POOLED.name, *stacked.PARTS, stacked.METHOD.name)


def outcomes_of(part: SplitData, shots: tuple[int, ...]) -> dict[str, Outcome]:
    """Fit `stacked` and pooled Bradley-Terry on a split, and predict with them and with the parts of `stacked`."""
    settings = stacked.StackedSettings(validation_shots=shots)
    fitted = fit_method(stacked.METHOD, settings, part, mesh=None)
    fits = {one: (bayes.METHOD, stacked.part_of(fitted, one)) for one in stacked.PARTS}
    fits[stacked.METHOD.name] = stacked.METHOD, fitted
    fits[POOLED.name] = POOLED, fit_method(POOLED, POOLED.settings(), part, mesh=None)
    return {
        one: run_method(method, fit, part, shots=shots, mesh=None)[0] for one, (method, fit) in fits.items()
    }


def compare(name: str, data: Path, out: Path) -> str:
    """Return the table of a study, with the number of choices and people."""
    study, folder = STUDIES[name], out / f"{name}.stacked"
    folder.mkdir(exist_ok=True)
    inputs = read_inputs([str(prepare(name, data, out))])
    population = read_population(inputs.comparisons, open_features(out / f"{study.data or name}.features"))
    shots = tuple(int(text) for text in study.shots.split(","))
    places = list[np.ndarray]()
    margins: dict[tuple[str, int], list[np.ndarray]] = {}
    for split in make_splits(population, by=study.split, seeds=SEEDS):
        paths = {one: folder / f"{one}-{split.seed}.npz" for one in NAMES}
        if not all(path.exists() for path in paths.values()):
            posts, _ = posts_of_split(population, split)
            known = replace(population.choices, posts=posts, in_context=None)
            part = make_part(standardised(known, split)[0], split)
            for one, outcome in outcomes_of(part, shots).items():
                outcome.save(paths[one])
            jax.clear_caches()
        outcomes = {one: read_outcome(path) for one, path in paths.items()}
        asked = outcomes[POOLED.name].places
        unseen = (
            split.part[population.choices.users[asked]] == UNSEEN_PART
        )  # each person in one split at most
        places.append(asked[unseen])
        for one, outcome in outcomes.items():
            for count in shots:
                margins.setdefault((one, count), []).append(outcome.margins[PLAIN, count][unseen])
    chosen = np.concatenate(places)
    clusters = population.clusters.take(chosen.tolist())
    lines = [
        "| k | method | accuracy | log-loss | accuracy of `stacked` minus it | log-loss of `stacked` minus it |",
        "|---|---|---|---|---|---|",
    ]
    for count in shots:
        of = {one: np.concatenate(margins[one, count]).astype(np.float64) for one in NAMES}
        lines += [row(one, count, of[one], of[stacked.METHOD.name], clusters) for one in NAMES]
    people = len(np.unique(population.choices.users[chosen]))
    return f"{len(chosen):,} choices of {people:,} unseen people.\n\n" + "\n".join(lines) + "\n"


def row(name: str, shots: int, margins: np.ndarray, ours: np.ndarray, clusters: Clusters) -> str:
    """Return the line of one method, with the differences of `stacked` from it and their intervals."""
    losses, of_ours = np.logaddexp(0, -margins), np.logaddexp(0, -ours)
    cells = [str(shots), f"`{name}`", f"{(margins > 0).mean():.4f}", f"{losses.mean():.4f}", "-", "-"]
    if name != stacked.METHOD.name:
        gains, lower = (ours > 0).astype(np.int64) - (margins > 0), of_ours - losses
        intervals = (
            difference_interval(gains, clusters),
            mean_interval(lower, clusters.users, responses=clusters.responses),
        )
        cells[4:] = [
            f"{values.mean():+.4f} [{interval.low:.4f}, {interval.high:.4f}]"
            for values, interval in zip((gains, lower), intervals, strict=True)
        ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for study in sys.argv[3:] or STUDIES:
        text = compare(study, source, folder)
        (folder / f"{study}.stacked.md").write_text(text, encoding="utf-8")
        print(text)
