"""What rollouts are worth: the reward's scores of their texts, a number for each or an error that names the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.options import flat_settings
from prb_jax.errors import PrbError, RunError, quote
from prb_jax.judges.open_judge import open_named_judge
from prb_jax.judges.options import RUBRIC, JudgeOptions, is_judge, parse_judge
from prb_jax.judges.scorer import JudgeScorer
from prb_jax.personal.folder import is_personalised
from prb_jax.personal.model import PersonalisedModel
from prb_jax.processes.sharing import on_first_process
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote import is_class_server, is_url
from prb_jax.remote.class_server import ClassServer
from prb_jax.remote.endpoint import REPLIES
from prb_jax.remote.score_server import RemoteScorer, open_remote
from prb_jax.rl.sections import ScoringSettings
from prb_jax.rl.settings import PpoSettings
from prb_jax.runs.behaviour import reward_identity
from prb_jax.scoring.load import Model, has_no_weights, open_scorer, read_history
from prb_jax.scoring.scorer import AdaptsToUsers, PlainScorer, Scorer

_VIEW = ("profile_posts", "protocol", "max_length")
_LOADING = ("dtype", "mesh")
_OF_POINTWISE = ("judge.template", "judge.system", "judge.lowest", "judge.highest")


@dataclass(frozen=True)
class Scores:
    """Scores of the rollouts of some prompts.

    Attributes:
      values: float32 [prompts, n], scaled.
      empty: rollouts without a letter.
      failed: rollouts whose reward failed.
    """

    values: np.ndarray
    empty: int
    failed: int


@dataclass(frozen=True)
class _Ask:
    """Texts of one prompt that the reward reads as one tree, and the rollouts that each of them stands for."""

    prompt: int
    comparison: Comparison
    rollouts: tuple[tuple[int, ...], ...]


class Reward:
    """The reward of a run, by name or as it is given. Build with :func:`open_reward`."""

    def __init__(
        self, scorer: Scorer, settings: ScoringSettings, facts: Mapping[str, Any], *, by_name: bool = True
    ) -> None:
        self.scorer, self.settings, self._facts, self.by_name = scorer, settings, facts, by_name
        self._view = {name: getattr(settings, name) for name in _VIEW}

    @property
    def name(self) -> str:
        """The scorer's name."""
        return str(self.scorer.identity()["name"])

    @property
    def uses(self) -> tuple[str, ...]:
        """The options of `scoring` by which it is opened and shown a comparison.

        `prb serve`, a function and a baseline decide all of it themselves; a fitted method was fitted with its view;
        of a class server the template is known here at most.
        """
        if isinstance(self.scorer, RemoteScorer | PlainScorer):
            return ()
        if isinstance(self.scorer, ClassServer):
            return ("profile_posts", "tokenizer")
        if isinstance(self.scorer, JudgeScorer):
            return _used_by_judge(self.scorer)
        if isinstance(self.scorer, PersonalisedModel):
            return (*(("mesh",) if self.by_name else ()), "history")
        adapts = ("history",) if isinstance(self.scorer, AdaptsToUsers) else ()
        return (*_VIEW, *(_LOADING if self.by_name else ()), *adapts)

    def unknown(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users of whom it knows nothing; of a reward that learns no users nobody."""
        return self.scorer.unknown(comparisons) if isinstance(self.scorer, AdaptsToUsers) else set()

    def identity(self) -> dict[str, Any]:
        """Return all that decides the scores, JSON-ready, without a name where there is more."""
        found = {**self.scorer.identity(), **self._facts}
        if len(found) > 1:
            found.pop("name")
        return found

    def model_identity(self) -> dict[str, Any]:
        """Return what tells the model from others, wherever it is and whatever it is shown."""
        return reward_identity({name: value for name, value in self.identity().items() if name != "view"})

    def score(
        self, comparisons: Sequence[Comparison], texts: Sequence[Sequence[str]], *, step: int
    ) -> Scores:
        """Return the scores of the texts [n] of each comparison's prompt.

        Equal texts are scored once. Texts that differ in outer blanks alone are never in one tree, for a template that
        strips them would make them equal.

        Raises:
          RunError: a reward that fails, is missing or not finite, or a text without a letter, where no setting says
            what such a text is worth; names the step and the prompt.
        """
        values = np.full((len(texts), max(map(len, texts))), np.nan, np.float64)
        empty = 0
        asks: list[_Ask] = []
        for prompt, (comparison, own) in enumerate(zip(comparisons, texts, strict=True)):
            blank = [place for place, text in enumerate(own) if not text.strip()]
            if blank and self.settings.empty is None:
                raise RunError(
                    f"step {step}: comparison {quote(comparison.id)}: rollout {blank[0]} has no letter, so nothing can "
                    "be scored; scoring.empty=NUMBER says what such a rollout is worth"
                )
            values[prompt, blank] = 0.0 if self.settings.empty is None else self.settings.empty
            empty += len(blank)
            asks += _asks(prompt, comparison, own)
        values, failed = self._filled(values, asks, step=step)
        scaled = values * self.settings.scale
        return Scores(scaled.astype(np.float32), empty, failed)

    def _filled(self, values: np.ndarray, asks: Sequence[_Ask], *, step: int) -> tuple[np.ndarray, int]:
        """The values with the reward's scores, and how many failed.

        A function and a server are asked by the first of several processes, a model on their devices by all together.
        """

        def fill() -> tuple[list[list[float]], int]:
            failed = self._fill(values, asks, step=step)
            return values.tolist(), failed

        scorer = self.scorer
        alone = isinstance(scorer, PlainScorer | RemoteScorer | ClassServer) or (
            isinstance(scorer, JudgeScorer) and scorer.endpoint
        )
        found, failed = on_first_process(fill) if alone else fill()
        return np.asarray(found), failed

    def _fill(self, values: np.ndarray, asks: Sequence[_Ask], *, step: int) -> int:
        """Put the reward's scores in their places, and return how many failed."""
        waiting = dict(enumerate(asks))
        failed = 0
        while waiting:
            order = list(waiting)
            found: list[tuple[int, np.ndarray]] = []
            problem: Exception | None = None
            try:
                stream = self.scorer.stream(
                    [asks[place].comparison for place in order], skip=lambda indices: False, **self._view
                )
                for batch in stream:
                    found += [
                        (order[index], row) for index, row in zip(batch.indices, batch.scores, strict=True)
                    ]
            except Exception as error:
                problem = error
            for place, row in found:
                ask = waiting.pop(place)
                if not np.isfinite(row).all():
                    unread = " (nan: no number in the reply)" if isinstance(self.scorer, JudgeScorer) else ""
                    gave = f"gave {quote(np.asarray(row).tolist())}{unread}"
                    failed += self._failed(values, ask, gave, step=step)
                    continue
                for score, rollouts in zip(row, ask.rollouts, strict=True):
                    values[ask.prompt, list(rollouts)] = score
            if problem is not None:
                # Of a scorer that takes one at a time the first that has no score is the culprit.
                place = next(iter(waiting))
                reason = (
                    str(problem) if isinstance(problem, PrbError) else f"{type(problem).__name__}: {problem}"
                )
                failed += self._failed(
                    values, waiting.pop(place), f"failed: {reason}", step=step, cause=problem
                )
            elif waiting:
                failed += self._failed(values, waiting.pop(next(iter(waiting))), "gave no score", step=step)
        return failed

    def _failed(
        self, values: np.ndarray, ask: _Ask, what: str, *, step: int, cause: Exception | None = None
    ) -> int:
        if self.settings.failed is None:
            raise RunError(
                f"step {step}: the reward {self.name} {what}; the first comparison without a score: "
                f"{quote(ask.comparison.id)}. Nothing was updated in this step; once the reward is put right, the same "
                "command continues the run"
            ) from cause
        places = [rollout for rollouts in ask.rollouts for rollout in rollouts]
        values[ask.prompt, places] = self.settings.failed
        return len(places)


def _asks(prompt: int, comparison: Comparison, texts: Sequence[str]) -> list[_Ask]:
    groups: list[dict[str, dict[str, list[int]]]] = []
    for place, text in enumerate(texts):
        bare = text.strip()
        if not bare:
            continue
        for group in groups:
            if text in group.get(bare, {text: []}):
                group.setdefault(bare, {}).setdefault(text, []).append(place)
                break
        else:
            groups.append({bare: {text: [place]}})
    found = []
    for group in groups:
        places = {text: rollouts for same in group.values() for text, rollouts in same.items()}
        asked = replace(comparison, responses=list(places), labels=None)
        found.append(_Ask(prompt, asked, tuple(map(tuple, places.values()))))
    return found


def open_reward(settings: PpoSettings, model: Model | None, *, out: Path | None = None) -> Reward:
    """Open a reward of a run.

    Args:
      settings: of the run.
      model: its name, the URL of `prb serve` or of a class server, a scorer or a function of a comparison.
      out: the run folder, where replies of a judge at an endpoint are kept; needed for such a judge alone.

    Raises:
      RunError, CheckpointError, MeshError: it cannot be loaded, or scores nothing.
    """
    facts: dict[str, Any] = {}
    opened: Any = model
    scoring = settings.scoring
    if isinstance(model, str) and is_judge(model):
        return Reward(_open_judge(settings, model, out=out), scoring, facts)
    options = LoadOptions()
    if is_class_server(model):
        options = LoadOptions(tokenizer=scoring.tokenizer)
    elif isinstance(model, str) and is_url(model):
        opened = open_remote(model)
        facts = {"view": opened.view}
    elif isinstance(model, str | Path) and not has_no_weights(model):
        options = LoadOptions(mesh=scoring.mesh or settings.mesh, dtype=scoring.dtype)
    history = None
    if scoring.history is not None and (is_personalised(opened) or isinstance(opened, AdaptsToUsers)):
        history = read_history(scoring.history.split(","))
    scorer = open_scorer(cast(Model, opened), options, recorded=True, history=history)
    if isinstance(scorer, PersonalisedModel) and scorer.earlier:
        scorer = replace(scorer, earlier=False)  # rollouts have no labels from which it could learn a user
    return Reward(scorer, scoring, facts, by_name=isinstance(model, str | Path))


def _open_judge(settings: PpoSettings, name: str, *, out: Path | None) -> JudgeScorer:
    """The judge of a name as `judge:MODEL` or `rubric:MODEL`; a run that was killed asks an endpoint nothing twice."""
    scoring, asked, named = settings.scoring, settings.scoring.judge, parse_judge(name)
    given: dict[str, Any] = {"reason": asked.reason}
    if named.protocol != RUBRIC:
        given |= {"template": asked.template, "system": asked.system, "scale": asked.scale}
    if named.url is not None:
        given["top_logprobs"] = asked.top_logprobs
    return open_named_judge(
        name,
        JudgeOptions(**given),
        loading=LoadOptions(mesh=scoring.mesh or settings.mesh, dtype=scoring.dtype),
        cache=(out or Path()) / REPLIES,
        concurrency=asked.concurrency,
    )


def _used_by_judge(scorer: JudgeScorer) -> tuple[str, ...]:
    """The options of `scoring` that a judge uses."""
    pointwise = () if scorer.identity()["judge"] == RUBRIC else _OF_POINTWISE
    if scorer.endpoint:
        opening: tuple[str, ...] = ("judge.top_logprobs", "judge.concurrency")
    else:
        opening = ("dtype", "mesh", *(("max_length",) if scorer.has_max_length else ()))
    return ("profile_posts", "judge.reason", *pointwise, *opening)


def check_scoring(scoring: ScoringSettings, rewards: Sequence[Reward]) -> None:
    """Refuse options of how a reward is opened and what it is shown that no reward of the run uses.

    Raises:
      RunError: there is one; it names the key.
    """
    used = {name for reward in rewards for name in reward.uses}
    given, unset = flat_settings(scoring), flat_settings(ScoringSettings())
    asked = [name for name in given if name.startswith("judge.")]
    for name in (*_VIEW, *_LOADING, "history", "tokenizer", *asked):
        if (value := given[name]) != unset[name] and name not in used:
            names = " or ".join(reward.name for reward in rewards)
            raise RunError(
                f"config key 'scoring.{name}': of no use to {names}: leave it out, found {quote(value)}"
            )
