"""The margins of one method's predicted choices on one split, for every number of shots, in one file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import RunError, quote
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
from prb_jax.records.arrays import load_arrays
from prb_jax.records.reading import parse_json
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import whole_file, writing
from prb_jax.study.population import Population
from prb_jax.study.splits import SEEN_PART, UNSEEN_PART, VALIDATION_PART, StudySplit

PLAIN: Final = ""
NO_USER: Final = "no user"
SHUFFLED: Final = "shuffled user"
NO_PROFILE: Final = "no profile"
CONTROLS: Final = (NO_USER, SHUFFLED, NO_PROFILE)


@dataclass(frozen=True)
class Outcome:
    """The margins of a method on the test choices (queries) of one split."""

    places: np.ndarray  # int32 [q], indices of the predicted choices
    short: np.ndarray  # int32 [q], number of comparisons that each choice's person can be adapted on
    # by (control, shots), float32 [q]: the score of the chosen response minus the score of the other one
    margins: Mapping[tuple[str, int], np.ndarray]
    # costs ("seconds_fit", "seconds_adapt_per_user", "bytes_per_user", and "disk_bytes_per_user" if states were
    # written), the "numbers" chosen on the validation part, and additional "controls" of the method
    figures: Mapping[str, Any]

    @classmethod
    def of(
        cls, part: SplitData, margins: Mapping[tuple[str, int], np.ndarray], figures: Mapping[str, Any]
    ) -> Outcome:
        """Return the outcome of the queries of a part."""
        mask = part.queries.mask
        short = np.repeat(part.contexts.mask.sum(1), mask.sum(1)).astype(np.int32)
        return cls(part.queries.places[mask].astype(np.int32), short, margins, figures)

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


class _Ceiling(TypedDict):
    known: str
    shots: int
    split: str
    n: int
    accuracy: float
    log_loss: float


class _Figures(TypedDict):
    """The figures of an outcome on disk; earlier versions had fewer."""

    settings: dict[str, Any]
    seconds_fit: float
    seconds_adapt_per_user: float
    bytes_per_user: int
    disk_bytes_per_user: NotRequired[int]
    numbers: NotRequired[dict[str, Any]]
    controls: NotRequired[dict[str, float]]
    ceiling: NotRequired[list[_Ceiling]]


class _Facts(TypedDict):
    margins: list[tuple[Literal["", "no user", "shuffled user", "no profile"], int]]
    figures: _Figures


def read_outcome(path: Path, asked: Outcome | None = None) -> Outcome:
    """Read the outcome of a method.

    Args:
      path: File to read.
      asked: Another outcome on the same split, whose people and comparisons must match.

    Raises:
      RunError: the file is damaged, or contains other people or comparisons.
    """
    hint = "remove it, and the same command makes it again"
    arrays = load_arrays(path, error=RunError, hint=hint)
    if lacking := {"facts", "margins", "places", "short"} - arrays.keys():
        raise RunError(f"{path}: expected an array {quote(min(lacking))} in it, found none; {hint}")
    # The chosen value of a setting may be infinite.
    where = f"{path}: facts"
    facts = parse_json(arrays["facts"].tobytes(), where=where, error=RunError, hint=hint, finite=False)
    check_schema(facts, _Facts, where=where, error=RunError, hint=hint)
    names, margins = [(control, shots) for control, shots in facts["margins"]], arrays["margins"]
    shape = (len(names), *arrays["places"].shape)
    if margins.shape != shape or margins.dtype != np.float32 or not np.isfinite(margins).all():
        raise RunError(
            f"{path}: margins: expected finite float32 {list(shape)}, found {margins.dtype} {list(margins.shape)}; "
            f"{hint}"
        )
    for name in ("places", "short") if asked is not None else ():
        if not np.array_equal(arrays[name], getattr(asked, name)):
            raise RunError(f"{path}: {name}: belongs to other people or comparisons than this study; {hint}")
    return Outcome(
        arrays["places"], arrays["short"], dict(zip(names, margins, strict=True)), facts["figures"]
    )


@dataclass(frozen=True)
class SplitData:
    """The data of a method on one split."""

    choices: Choices  # all choices, features standardised on the seen part
    split: StudySplit  # split of the people
    # comparisons to adapt each tested person on, in a seeded order; a row for each person and fold
    contexts: UserRows
    queries: UserRows  # choices to predict for the same people and folds
    shared_fits: dict[Any, Any] = field(default_factory=dict)  # see `Method.shares_fits`


def make_part(choices: Choices, split: StudySplit) -> SplitData:
    """Return the contexts and queries of the seen and the unseen people of a split, a row for each person and fold."""
    asked = split.part[choices.users] != VALIDATION_PART
    return SplitData(choices, split, *rows_by_fold(choices, split.fold, seed=split.seed, among=asked))


def standardised(choices: Choices, split: StudySplit) -> tuple[Choices, Standard]:
    """Return the choices with features of mean 0 and variance 1 over responses that seen people judge; and scales."""
    rows = np.unique([choices.chosen[split.trained], choices.rejected[split.trained]])
    known = np.asarray(choices.features, np.float64)[rows]
    scale = known.std(0)
    scale = np.where(scale > 1e-6 * max(float(scale.max()), 1e-30), scale, 1.0)
    standard = Standard(known.mean(0).astype(np.float32), scale.astype(np.float32))
    posts = choices.posts
    if posts is not None:
        posts = replace(posts, features=standard(posts.features) * posts.mask[..., None])
    return replace(choices, features=standard(choices.features), posts=posts), standard


def fit_method(method: Method, settings: Any, part: SplitData, *, mesh: Mesh | None) -> Fitted:
    """Fit a method on the seen people of a split; all settings are chosen on its validation part.

    Raises:
      DataError: the data lack something that the method requires, or a part is empty.
    """
    seen, validation, key = parts_of_fit(method, part)
    shared = {"shared": part.shared_fits} if method.shares_fits else {}
    return method.fit(seen, validation, settings=settings, key=key, mesh=mesh, **shared)


def parts_of_fit(method: Method, part: SplitData) -> tuple[Choices, Choices, jax.Array]:
    """Return the choices that a method is fitted on, the choices of the validation part, and the key of random draws.

    Raises:
      DataError: same as for :func:`fit_method`.
    """
    choices, split = part.choices, part.split
    choices.require(method.name, method.needs)
    validation = replace(choices, queries=split.fold).only(split.validated)
    validation.require(f"{method.name}: the validation part", ())
    return choices.only(split.trained), validation, jax.random.key(split.seed)


def run_method(
    method: Method, fitted: Fitted, part: SplitData, *, shots: Sequence[int], mesh: Mesh | None
) -> tuple[Outcome, Any]:
    """Adapt a fitted method to every person with each number of shots, and predict their queries.

    The part belongs to the split that the method was fitted on, with the features that the method reads. A person with
    fewer comparisons than shots is adapted on all of them. People are split over the mesh.

    Returns:
      Outcome, and the states of the rows of ``part.queries`` after the largest number of shots.
    """
    choices, contexts, queries = part.choices, part.contexts, part.queries
    width, key = max(1, *shots), jax.random.key(part.split.seed)

    def judge(states: Any, shown: Choices = choices) -> np.ndarray:
        scores = score_users(method, fitted, states, shown, queries, mesh=mesh)[queries.mask]
        if not np.isfinite(scores).all():
            raise RunError(f"method {method.name}: a score is not a finite number")
        return scores[:, 0] - scores[:, 1]

    def adapt(count: int, shown: Choices = choices) -> Any:
        rows = contexts.first(count, width=width)
        return adapt_users(method, fitted, shown, rows, key=key, mesh=mesh)

    users, donors = len(queries.users), _donor_rows(part)
    margins = {(NO_USER, 0): judge(repeated(method.empty_state(fitted), users))}
    for count in shots:
        states = adapt(count)
        margins[PLAIN, count] = judge(states)
        margins[SHUFFLED, count] = judge(jax.tree.map(lambda leaf: np.asarray(leaf)[donors], states))
    start = time.perf_counter()
    states = adapt(max(shots))  # already compiled, so this measures only the run time
    seconds = time.perf_counter() - start
    if choices.posts is not None and not any(need.startswith("posts") for need in method.needs):
        blind = replace(choices, posts=None)
        pairs = zip(jax.tree.leaves(states), jax.tree.leaves(adapt(width, blind)), strict=True)
        if not all(np.array_equal(leaf, other) for leaf, other in pairs):  # the method reads posts
            for count in shots:
                margins[NO_PROFILE, count] = judge(adapt(count, blind), blind)
    controls: Mapping[str, float] = {}
    if method.controls is not None:
        rows = contexts.first(max(shots), width=width)
        controls = method.controls(fitted, choices, rows, queries, key)
    figures = {
        "seconds_adapt_per_user": seconds / users,
        "bytes_per_user": bytes_per_user(states, users),
        "numbers": {name: np.asarray(value).tolist() for name, value in fitted.numbers.items()},
        "controls": {name: float(value) for name, value in controls.items()},
    }
    return Outcome.of(part, margins, figures), states


def _donor_rows(part: SplitData) -> np.ndarray:
    """Return, for each row, a row of another person of the same part: states rotate, so nobody keeps their own."""
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


def popularity(choices: Choices) -> np.ndarray:
    """Return the shrunk share of likes for each item, (liked + 1) / (times judged + 2), float64 [items]."""
    _, texts, signs = judgements(choices)
    size = 1 + int(max(np.asarray(choices.items).max(), texts.max(initial=0)))
    liked, judged = np.bincount(texts[signs > 0], minlength=size), np.bincount(texts, minlength=size)
    return (liked + 1) / (judged + 2)


BASELINES: Final[Mapping[str, Callable[[Population, SplitData], Any]]] = {
    "length": lambda population, part: [len(text) for text in population.texts],
    # from the choices that methods are fitted on, and the votes in the same people's profiles
    "popularity": lambda population, part: popularity(part.choices.only(part.split.trained))[
        part.choices.items
    ],
    "backbone": lambda population, part: part.choices.base_scores,
}
"""Scores of the feature rows, by the name of the baseline."""


def baselines_of(population: Population) -> list[str]:
    """Return the names of the baselines available in a study: "backbone" requires a reward model as backbone."""
    lacking = {"backbone"} if population.choices.base_scores is None else set()
    return [name for name in BASELINES if name not in lacking]


def run_baseline(name: str, population: Population, part: SplitData) -> Outcome:
    """Return the margins of a baseline on the queries of a split; it ignores users, and has no shots."""
    scores = np.asarray(BASELINES[name](population, part), np.float64)
    margins = scores[part.choices.chosen] - scores[part.choices.rejected]
    asked = part.queries.places[part.queries.mask]
    free = {"seconds_fit": 0.0, "seconds_adapt_per_user": 0.0, "bytes_per_user": 0}
    return Outcome.of(part, {(PLAIN, 0): margins[asked].astype(np.float32)}, free)
