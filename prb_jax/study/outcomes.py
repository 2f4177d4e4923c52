"""The margins of the choices that one method predicts on one split, for every number of shots, in one file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.data.writing import whole_file, writing
from prb_jax.errors import RunError
from prb_jax.personal.few_shot.choices import Choices, UserRows, rows_by_fold
from prb_jax.personal.few_shot.nearest import judgements
from prb_jax.personal.few_shot.protocol import (
    Fitted,
    Method,
    adapt_users,
    bytes_per_user,
    repeated,
    score_users,
)
from prb_jax.personal.saved import Standard
from prb_jax.study.population import Population
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART, VALIDATION_PART, Split

PLAIN: Final = ""
NO_USER: Final = "no user"
SHUFFLED: Final = "shuffled user"
NO_PROFILE: Final = "no profile"
CONTROLS: Final = (NO_USER, SHUFFLED, NO_PROFILE)


@dataclass(frozen=True)
class Outcome:
    """The margins of a method on the queries of one split.

    Attributes:
      places: int32 [q], the choices that were predicted.
      short: int32 [q], how many comparisons the person of each choice can be adapted on.
      margins: by (control, shots), float32 [q]: the score of the chosen response minus that of the other one.
      figures: seconds_fit, seconds_adapt_per_user, bytes_per_user, disk_bytes_per_user (None where no states were
        written); "numbers" that were chosen on the validation part;
        "controls" that the method itself asks for.
    """

    places: np.ndarray
    short: np.ndarray
    margins: Mapping[tuple[str, int], np.ndarray]
    figures: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the outcome as one whole file."""
        names = list(self.margins)
        facts = json.dumps({"margins": names, "figures": self.figures})
        with writing(path), whole_file(path) as file:
            np.savez_compressed(
                file,
                places=self.places,
                short=self.short,
                margins=np.stack([self.margins[name] for name in names]),
                facts=np.frombuffer(facts.encode(), np.uint8),
            )


def read_outcome(path: Path) -> Outcome:
    """Read the outcome of a method.

    Raises:
      RunError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        facts = json.loads(arrays["facts"].tobytes())
        names = [(str(control), int(shots)) for control, shots in facts["margins"]]
        margins = dict(zip(names, arrays["margins"], strict=True))
        return Outcome(arrays["places"], arrays["short"], margins, facts["figures"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{path}: cannot be read: {error}; remove it, and the same command makes it again"
        ) from error


@dataclass(frozen=True)
class Part:
    """What a method is asked on one split.

    Attributes:
      choices: all choices, features standardised on the seen part.
      split: of the people.
      contexts: of the people who are asked, what they can be adapted on, in a seeded order; a row for each person and
        fold.
      queries: of the same people and folds, what is to be predicted.
    """

    choices: Choices
    split: Split
    contexts: UserRows
    queries: UserRows


def make_part(choices: Choices, split: Split) -> Part:
    """Return the contexts and queries of the seen and the unseen people of a split, a row for each person and fold."""
    asked = ~split.of_part(choices.users, VALIDATION_PART)
    return Part(choices, split, *rows_by_fold(choices, split.fold, seed=split.seed, among=asked))


def standardised(choices: Choices, split: Split) -> tuple[Choices, Standard]:
    """Return the choices with features of mean 0 and variance 1 over the responses that seen people judge, and how."""
    rows = np.unique(np.concatenate([choices.chosen[split.trained], choices.rejected[split.trained]]))
    known = np.asarray(choices.features, np.float64)[rows]
    scale = known.std(0)
    scale = np.where(scale > 1e-6 * max(float(scale.max()), 1e-30), scale, 1.0)
    standard = Standard(known.mean(0).astype(np.float32), scale.astype(np.float32))
    posts = choices.posts
    if posts is not None:
        posts = replace(posts, features=standard(posts.features) * posts.mask[..., None])
    return replace(choices, features=standard(choices.features), posts=posts), standard


def fit_method(method: Method, settings: Any, part: Part, *, seed: int, mesh: Mesh | None) -> Fitted:
    """Fit a method on the seen people of a split; every number is chosen on its validation part.

    Raises:
      DataError: the data lack a thing that the method needs, or a part is empty.
    """
    choices, split = part.choices, part.split
    choices.require(method.name, method.needs)
    validation = replace(choices, queries=split.fold).only(split.validated)
    validation.require(f"{method.name}: the validation part", ())
    return method.fit(
        choices.only(split.trained), validation, settings=settings, key=jax.random.key(seed), mesh=mesh
    )


def run_method(
    method: Method,
    fitted: Fitted,
    part: Part,
    *,
    shots: Sequence[int],
    seconds_fit: float,
    mesh: Mesh | None,
    keep: Callable[[np.ndarray, Any], int] | None = None,
) -> Outcome:
    """Adapt a fitted method to every person with each number of shots, and predict their queries.

    Args:
      method, fitted: the method.
      part: of the split that it was fitted on.
      shots: numbers of comparisons; a person who has fewer is adapted on all of them.
      seconds_fit: what fitting took, for the record.
      mesh: devices over which people are split.
      keep: writes the states of people (int32 [U], their numbers) after the largest number of shots, and returns the
        bytes on the disk.
    """
    choices, contexts, queries = part.choices, part.contexts, part.queries
    if method.represent is not None:
        choices = method.represent(fitted, choices)
    users, width = len(queries.users), max(1, *shots)
    key = jax.random.key(part.split.seed)
    other = _other_users(part)
    margins: dict[tuple[str, int], np.ndarray] = {}

    def judge(states: Any, shown: Choices = choices) -> np.ndarray:
        scores = score_users(method, fitted, states, shown, queries, mesh=mesh)[queries.mask]
        if not np.isfinite(scores).all():
            raise RunError(f"method {method.name}: a score is not a finite number")
        return scores[:, 0] - scores[:, 1]

    def adapt(count: int, shown: Choices = choices) -> Any:
        rows = contexts.first(count, width=width)
        return adapt_users(method, fitted, shown, rows, key=key, mesh=mesh)

    empty = method.empty_state(fitted)
    margins[NO_USER, 0] = judge(repeated(empty, users))
    for count in shots:
        states = adapt(count)
        margins[PLAIN, count] = judge(states)
        margins[SHUFFLED, count] = judge(jax.tree.map(lambda leaf: np.asarray(leaf)[other], states))
    start = time.perf_counter()
    states = adapt(max(shots))  # compiled already
    seconds = time.perf_counter() - start
    disk = None
    if keep is not None:
        people = len(np.unique(queries.users))  # their first folds come first
        disk = keep(queries.users[:people], jax.tree.map(lambda leaf: leaf[:people], states)) // people
    if choices.posts is not None and "posts" not in {need.partition(".")[0] for need in method.needs}:
        blind = replace(choices, posts=None)
        if not _equal(states, adapt(width, blind)):  # it reads posts
            for count in shots:
                margins[NO_PROFILE, count] = judge(adapt(count, blind), blind)
    controls = {}
    if method.controls is not None:
        rows = contexts.first(max(shots), width=width)
        controls = {
            name: float(value) for name, value in method.controls(fitted, choices, rows, queries, key).items()
        }
    figures = {
        "seconds_fit": seconds_fit,
        "seconds_adapt_per_user": seconds / users,
        "bytes_per_user": bytes_per_user(states, users),
        "disk_bytes_per_user": disk,
        "numbers": {name: np.asarray(value).tolist() for name, value in fitted.numbers.items()},
        "controls": controls,
    }
    counts = contexts.mask.sum(1)
    return Outcome(
        places=queries.places[queries.mask].astype(np.int32),
        short=np.repeat(counts, queries.mask.sum(1)).astype(np.int32),
        margins=margins,
        figures=figures,
    )


def _equal(states: Any, others: Any) -> bool:
    """Whether the states of all people are the same."""
    pairs = zip(jax.tree.leaves(states), jax.tree.leaves(others), strict=True)
    return all(one.shape == other.shape and np.array_equal(one, other) for one, other in pairs)


def _other_users(part: Part) -> np.ndarray:
    """For each row that of another person of the same part, in one circle: nobody keeps their own state."""
    rows: dict[int, list[int]] = {}
    for row, user in enumerate(part.queries.users.tolist()):
        rows.setdefault(user, []).append(row)
    people = np.array(list(rows))
    other = np.arange(len(part.queries.users))
    rng = np.random.default_rng([part.split.seed, 7])
    for name in (SEEN_PART, UNSEEN_PART):
        members = rng.permutation(people[part.split.part[people] == name])
        for user, donor in zip(members.tolist(), np.roll(members, 1).tolist(), strict=True):
            for fold, row in enumerate(rows[user]):
                other[row] = rows[donor][min(fold, len(rows[donor]) - 1)]
    return other


def _length(population: Population, part: Part) -> np.ndarray:
    return np.array([len(text) for text in population.texts], np.float64)


def _popularity(population: Population, part: Part) -> np.ndarray:
    """(liked + 1) / (times judged + 2) of each text, in the choices that methods are fitted on and in the votes of the
    same people's profiles."""
    return popularity(part.choices.only(part.split.trained))[part.choices.items]


def _backbone(population: Population, part: Part) -> np.ndarray:
    assert part.choices.base_scores is not None
    return np.asarray(part.choices.base_scores, np.float64)


def popularity(choices: Choices) -> np.ndarray:
    """Return the shrunk share of the votes for each item, float64 [items]; 0.5 for one that was never judged."""
    _, texts, signs = judgements(choices)
    size = 1 + int(max(np.asarray(choices.items).max(), texts.max(initial=0)))
    liked, judged = np.bincount(texts[signs > 0], minlength=size), np.bincount(texts, minlength=size)
    return (liked + 1) / (judged + 2)


BASELINES: Final[Mapping[str, Callable[[Population, Part], np.ndarray]]] = {
    "length": _length,
    "popularity": _popularity,
    "backbone": _backbone,
}
"""The scores of the rows of features, by the name of the baseline."""


def baselines_of(population: Population) -> list[str]:
    """Return the names of the baselines that a study can have: "backbone" needs a backbone that is a reward model."""
    lacking = {"backbone"} if population.choices.base_scores is None else set()
    return [name for name in BASELINES if name not in lacking]


def run_baseline(name: str, population: Population, part: Part) -> Outcome:
    """Return the margins of a baseline on the queries of a split; it knows no user, and has no shots."""
    scores = BASELINES[name](population, part)
    queries, counts = part.queries, part.contexts.mask.sum(1)
    places = queries.places[queries.mask]
    chosen, rejected = scores[part.choices.chosen[places]], scores[part.choices.rejected[places]]
    return Outcome(
        places=places.astype(np.int32),
        short=np.repeat(counts, queries.mask.sum(1)).astype(np.int32),
        margins={(PLAIN, 0): (chosen - rejected).astype(np.float32)},
        figures={"seconds_fit": 0.0, "seconds_adapt_per_user": 0.0, "bytes_per_user": 0},
    )
