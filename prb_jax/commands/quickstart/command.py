"""`prb quickstart`: data, two trainings, six evaluations, one table.

A quickstart can be killed at any moment, and the same command continues it. Its folder contains:

``quickstart.json``  Recipe and versions. Its ``inputs`` decide the result.
``start/``           The untrained model and its tokenizer, a Hugging Face folder.
``data/``            Training pairs of each model, as JSON lines.
``user_blind.py``, ``persona.py``  Configs of the two trainings, for `prb train`.
``user_blind/``, ``persona/``      Their run folders, each with the trained model in ``model/``.
``scores/NAME/``     Run folders of the evaluations, including the baselines.
``page.html``        A page about both models, to open in a browser.
``report.md``        The table, its explanations, and the single commands.
``summary.json``     The figures; written last: a folder that has it is finished.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.commands.quickstart.recipe import (
    PERSONA,
    PROFILE_POSTS,
    USER_BLIND,
    Recipe,
    make_start,
    training_pairs,
    without_profiles,
    write_config,
    write_pairs,
)
from prb_jax.commands.quickstart.tables import (
    BOUNDED,
    KEYS,
    SEEN,
    UNSEEN,
    QuickstartSummary,
    quickstart_report,
)
from prb_jax.errors import RunError
from prb_jax.metrics.rows import ScoredRow
from prb_jax.metrics.summary import summarise
from prb_jax.metrics.uncertainty import paired_difference
from prb_jax.records.comparison import Comparison
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.records.sources.personas import generate, load
from prb_jax.records.writing import writing
from prb_jax.reports.report import report as write_page
from prb_jax.runs.kind import RUN, SUMMARY, RunKind
from prb_jax.runs.training import TRAIN
from prb_jax.scoring.baselines import score_baseline
from prb_jax.scoring.clusters import clusters_of
from prb_jax.scoring.evaluate import run_evaluation
from prb_jax.scoring.load import load as load_model
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.training.record import computing_versions
from prb_jax.training.train import train

REPORT, PAGE = "report.md", "page.html"
START, DATA, SCORES = "start", "data", "scores"
QUICKSTARTS = RunKind(
    "prb_jax quickstart",
    "prb quickstart",
    file="quickstart.json",
    others=(RUN, TRAIN, START, SCORES),
)

BOUNDS = {"best, user unknown": "user_blind_expected", "best, user known": "persona_aware"}
"""Bounds known from the benchmark's construction: a scorer that ignores the profile is not expected above the first
(the Bayes value), and no scorer is above the second."""

SHOWN_BASELINES = ("baseline:length", "baseline:random", "baseline:profile-overlap")
"""Baselines in the tables of the quickstart."""

LINEAR = "persona x words"  # a baseline fitted to the training part
TRAINING = ("train", "train-more-wording")  # parts with the personalised training pairs
TIMED_PAIRS = 256  # pairs for measuring latency

Score = Callable[[Sequence[Comparison]], object]


@dataclass(frozen=True)
class Quickstart:
    """Result of `quickstart`: its `summary.json`, which is empty if a signal ended the run; ``stopped_by`` names the
    signal, e.g. "SIGTERM"."""

    out: Path
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None

    @property
    def report(self) -> Path:
        """Path of the table and the commands of each step, in Markdown."""
        return self.out / REPORT

    @property
    def page(self) -> Path:
        """Path of the page about the two models: figures, comparisons, learning curves, pairs to read."""
        return self.out / PAGE

    @property
    def path(self) -> Path:
        """Path of the figures."""
        return self.out / SUMMARY


def quickstart(*, out: str | Path, recipe: Recipe | None = None, progress: bool = True) -> Quickstart:
    """Train a user-blind and a persona-conditioned reward model on the generated benchmark, and evaluate both.

    Everything uses `prb_jax.train` and `prb_jax.evaluate`, which leave their run folders in `out`. The same call
    continues a killed run and does nothing for a finished one. In `summary.json`, `models` has for each model and
    baseline the accuracy on generic pairs and on personalised pairs: of seen personas, of unseen personas, and of
    unseen personas in new wording (each with its 95 % interval). It also has the share of personas covered, the
    number of different training pairs, the number shown in all steps, and milliseconds of scoring per pair.
    `bounds` has the upper bounds.

    Args:
      out: Folder of the run.
      recipe: Sizes, data and schedules; default: the recipe of `prb quickstart`.
      progress: If True, show progress on standard error.

    Raises:
      RunError: `out` has another run, is a file, or cannot be written.
    """
    chosen = Recipe() if recipe is None else recipe
    inputs = {"recipe": dataclasses.asdict(chosen), "versions": computing_versions()}
    with QUICKSTARTS.open(out, inputs) as run:
        hint = "remove it, and the same command writes it again"
        summary = read_json(run.path / SUMMARY, error=RunError, hint=hint, optional=True)
        if summary is None:
            return _run(run.path, chosen, progress=progress)
        check_schema(summary, QuickstartSummary, where=str(run.path / SUMMARY), error=RunError, hint=hint)
        return Quickstart(run.path, summary)


def _run(folder: Path, recipe: Recipe, *, progress: bool) -> Quickstart:
    seconds: dict[str, float] = {}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        if progress:
            print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 1)

    with step("benchmark and tokenizer"), writing(folder):
        personal = [one for part in TRAINING for one in load(part)[: recipe.limit]]
        generic = load("generic-train")[: recipe.limit]
        make_start(folder / START, [*personal, *generic], recipe)
        for name, make in ((USER_BLIND, without_profiles), (PERSONA, training_pairs)):
            write_pairs(folder / DATA / f"{name}.jsonl.gz", make(personal, generic, recipe))
            write_config(folder, name, recipe)
    for name in (USER_BLIND, PERSONA):
        with step(f"training {name}"):
            result = train(folder / f"{name}.py", out=folder / name, progress=progress)
        if result.stopped_by is not None:
            return Quickstart(folder, stopped_by=result.stopped_by)
    with step("evaluation"):
        summary = _evaluate(folder, recipe, [*personal, *generic], progress=progress)
    with step("page"):
        runs = [place / name for place in (folder / SCORES, folder) for name in (PERSONA, USER_BLIND)]
        title = "Quickstart: a reward model that reads the profile, and one that does not"
        write_page(runs, out=folder / PAGE, title=title)
    summary["seconds"] = seconds
    with writing(folder / REPORT):
        (folder / REPORT).write_text(quickstart_report(summary, folder=str(folder)), encoding="utf-8")
    QUICKSTARTS.finish(folder, summary)
    return Quickstart(folder, summary)


def _evaluate(
    folder: Path, recipe: Recipe, training: Sequence[Comparison], *, progress: bool
) -> dict[str, Any]:
    parts = {part: load(part)[: recipe.limit] for part in KEYS}
    models: dict[str, dict[str, Any]] = {}
    scored: dict[str, dict[str, list[ScoredRow]]] = {}

    def add(name: str, model: Any, score: Score, *, pairs: int = 0, shown: int = 0) -> None:
        options = EvaluateOptions(
            out=folder / SCORES / name.replace(":", "-").replace(" ", "-"),
            name=name if name == LINEAR else None,
            limit=recipe.limit,
            progress=progress,
        )
        result = run_evaluation(model, [f"personas:{part}" for part in parts], options)
        rows = {row.id: row for row in result.rows}
        scored[name] = {part: [rows[one.id] for one in comparisons] for part, comparisons in parts.items()}
        models[name] = _figures(scored[name], parts) | {
            "train_pairs": pairs,
            "presentations": shown,
            "ms_per_pair": _milliseconds(score, parts[SEEN][:TIMED_PAIRS]),
        }

    for name in (USER_BLIND, PERSONA):
        model, schedule = load_model(folder / name), recipe.schedule(name)
        add(name, model, model.score, pairs=len(training), shown=schedule.steps * schedule.comparisons)
    for name in SHOWN_BASELINES:
        add(name, name, partial(score_baseline, name))
    linear = fit_persona_words(training)
    shown = linear.presentations
    add(LINEAR, linear, lambda pairs: list(map(linear, pairs)), pairs=len(training), shown=shown)
    ceilings = generate().ceilings
    return {
        "pairs": {part: len(comparisons) for part, comparisons in parts.items()},
        "profile_posts": PROFILE_POSTS,
        "models": models,
        "persona_minus_user_blind": {
            KEYS[part]: paired_difference(
                scored[PERSONA][part], scored[USER_BLIND][part], clusters=clusters_of(comparisons)
            )
            for part, comparisons in parts.items()
        },
        "bounds": {
            bound: {KEYS[part]: getattr(ceilings[part], attribute) for part in BOUNDED}
            for bound, attribute in BOUNDS.items()
        },
    }


def _figures(
    scored: Mapping[str, Sequence[ScoredRow]], parts: Mapping[str, Sequence[Comparison]]
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for part, key in KEYS.items():
        summary = summarise(scored[part], clusters=clusters_of(parts[part]))
        figures[key] = summary["accuracy"]
        figures[f"{key}_ci95"] = summary["ci95"]
    # no clusters needed for coverage by user; a run's own summary covers all parts
    figures["served"] = summarise([*scored[SEEN], *scored[UNSEEN]])["coverage"]
    return figures


def _milliseconds(score: Score, pairs: Sequence[Comparison]) -> float:
    """Return milliseconds per pair: the better of two timed runs after one that compiles."""
    if not pairs:
        raise RunError("found no pairs for measuring latency")
    score(pairs)
    times: list[float] = []
    for _ in range(2):
        start = time.perf_counter()
        score(pairs)
        times.append(time.perf_counter() - start)
    return 1000 * min(times) / len(pairs)


LEAST_RESPONSES = 20  # fewest training responses with a word that gets a weight
PENALTY = 3.0
"""Penalty of the squared weights, shared and per persona; half of it is added to the sum of the losses."""
ITERATIONS = 60

_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class PersonaWords:
    """Linear bag-of-words model with weights per persona: shows how far choices lead without language.

    The score of a response is the sum of the weights of its distinct words.
    """

    columns: Mapping[str, int]  # index of each word among the W weights
    common: np.ndarray  # float [W], weights shared by all
    # by persona, float [W], added to the shared weights; missing for personas without training pairs
    own: Mapping[str | None, np.ndarray]
    presentations: int  # pairs visited during fitting

    def __call__(self, comparison: Comparison) -> list[float]:
        """Return the scores of the responses."""
        weights = self.common + self.own.get(comparison.user_id, 0.0)
        return [
            float(sum(weights[self.columns[word]] for word in sorted(_words(text)) if word in self.columns))
            for text in comparison.responses
        ]


def fit_persona_words(pairs: Sequence[Comparison]) -> PersonaWords:
    """Fit the model to pairs of the training part: Bradley-Terry with an L2 penalty, by L-BFGS. The user of a pair is
    its persona, and profiles are not used."""
    import scipy.optimize
    import scipy.sparse

    counts = Counter(word for pair in pairs for text in pair.responses for word in _words(text))
    columns = {word: i for i, word in enumerate(sorted(w for w, n in counts.items() if n >= LEAST_RESPONSES))}
    blocks: dict[str | None, int] = {}
    rows, places, values = [], [], []
    for row, pair in enumerate(pairs):
        block = blocks.setdefault(pair.user_id, 1 + len(blocks)) * len(columns)
        chosen, rejected = (
            {columns[word] for word in _words(text) if word in columns} for text in pair.responses
        )
        for sign, words in ((1.0, chosen - rejected), (-1.0, rejected - chosen)):
            for word in sorted(words):
                rows += [row, row]
                places += [word, block + word]
                values += [sign, sign]
    shape = (len(pairs), (1 + len(blocks)) * len(columns))
    features = scipy.sparse.csr_matrix((values, (rows, places)), shape)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = features @ weights
        slope = -0.5 * (1 - np.tanh(margins / 2))
        value = np.logaddexp(0, -margins).sum() + PENALTY / 2 * (weights @ weights)
        return float(value), features.T @ slope + PENALTY * weights

    start = np.zeros(shape[1])
    options = {"maxiter": ITERATIONS}
    fitted = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    weights = fitted.x.reshape(-1, len(columns))
    of_personas = {persona: weights[block] for persona, block in blocks.items()}
    return PersonaWords(columns, weights[0], of_personas, presentations=fitted.nfev * len(pairs))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
