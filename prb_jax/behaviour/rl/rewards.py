"""Rewards of rollouts: a score for each text, or an error that names the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import numpy as np

from prb_jax.behaviour.judges.names import is_judge
from prb_jax.behaviour.rl.sections import ScoringSettings
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.errors import PrbError, RunError, quote
from prb_jax.models.readouts.load_options import IMPLICIT, LoadOptions
from prb_jax.personal import is_personalised
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.records.options import flat_settings, from_flat
from prb_jax.runs.behaviour import reward_identity
from prb_jax.scoring.kinds import has_no_weights
from prb_jax.scoring.open_scorer import Model, open_scorer
from prb_jax.scoring.remote import is_class_server, is_url
from prb_jax.scoring.scorer import Scorer
from prb_jax.seams import get
from prb_jax.text.view import View, ViewOptions

if TYPE_CHECKING:
    from prb_jax.scoring.personalised import PersonalisedModel


_USED_BY: dict[str, tuple[str, ...]] = {
    "history": ("adapts",), "profile_posts": ("model", "class server", "judge"), "protocol": ("model",),
    "max_length": ("model", "cut judge"), "dtype": ("loaded", "judge here"),
    "mesh": ("loaded", "fitted", "judge here"), "tokenizer": ("class server",),
    "reference": ("implicit",), "beta": ("implicit",), "reference_free": ("implicit",), "logprobs": ("implicit",),
    "judge.template": ("judge with a scale", "judge with a template"),
    "judge.system": ("judge with a scale", "judge with a system turn"),
    "judge.lowest": ("judge with a scale",), "judge.highest": ("judge with a scale",), "judge.reason": ("judge",),
    "judge.pairing": ("judge of pairs",), "judge.ties": ("judge of pairs",), "judge.reason_tokens": ("judge",),
    "judge.temperature": ("judge",), "judge.votes": ("judge",), "judge.chat_template_kwargs": ("judge",),
    "judge.min_mass": ("judge by letters",),
    "judge.top_logprobs": ("judge elsewhere",), "judge.concurrency": ("judge elsewhere",),
}  # fmt: skip
"""Kinds of rewards (:attr:`Reward.kinds`) that use an option of `scoring`; options not listed apply to all rewards."""


@dataclass(frozen=True)
class Scores:
    """Scores of the rollouts of some prompts."""

    values: np.ndarray  # float32 [prompts, n], scaled
    empty: int  # rollouts without a letter
    failed: int  # rollouts whose reward failed


class _Ask(NamedTuple):
    """Texts of one prompt that the reward reads as one tree, and the rollouts with each of these texts."""

    prompt: int
    comparison: Comparison
    rollouts: Sequence[list[int]]


class Reward:
    """The reward of a run, opened by name or given as an object. Build with :func:`open_reward`."""

    def __init__(
        self, scorer: Scorer, settings: ScoringSettings, facts: Mapping[str, Any], *, by_name: bool = True
    ) -> None:
        self.scorer, self.settings, self._facts, self.by_name = scorer, settings, facts, by_name

    @cached_property
    def _view(self) -> View | None:
        """The view that the settings define for the reward; None for its default view."""
        asked = from_flat(ViewOptions, vars(self.settings))
        if asked == ViewOptions():
            return None
        chosen = self.scorer.choose_view(asked)
        chosen.warn(self.name)
        return chosen.view

    @property
    def name(self) -> str:
        """The scorer's name."""
        return str(self.scorer.identity()["name"])

    @property
    def kinds(self) -> set[str]:
        """The kinds of this reward, which determine the options of `scoring` that apply.

        None apply to `prb serve`, functions and baselines, which decide everything themselves. A fitted method keeps
        the view it was fitted with. For a class server, at most the template is known here.
        """
        scorer = self.scorer
        if not (scorer.uses or scorer.adapts):
            return set()
        if not scorer.has_weights:
            return {"class server"}
        if scorer.judges:
            return get("training", "kinds of judge").value(scorer)
        fitted = _is_fitted(scorer)
        kinds = {"adapts"} if scorer.adapts else set[str]()
        kinds |= set() if fitted else {"model"}
        if self.by_name and scorer.identity().get("readout") == "implicit":
            kinds.add("implicit")
        return kinds | ({"fitted" if fitted else "loaded"} if self.by_name else set())

    def unknown(self, comparisons: Sequence[Comparison]) -> set[str]:
        """Return the users that the reward has no data about; empty for a reward that does not learn users."""
        return (self.scorer.unknown(comparisons) or set()) if self.scorer.adapts else set()

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the scores, JSON-ready; the name only if nothing else does."""
        identity = {**self.scorer.identity(), **self._facts}
        if len(identity) > 1:
            identity.pop("name")
        return identity

    def model_identity(self) -> dict[str, Any]:
        """Return the identity of the model, whatever its location and view."""
        return reward_identity({name: value for name, value in self.identity().items() if name != "view"})

    def score(
        self, comparisons: Sequence[Comparison], texts: Sequence[Sequence[str]], *, step: int
    ) -> Scores:
        """Return the scores of the texts [n] of each comparison's prompt.

        Equal texts are scored once, except by a judge of pairs, which gets all rollouts of a prompt. Texts that differ
        only in outer whitespace are never in one tree, because a template that strips it would make them equal.

        Raises:
          RunError: a reward fails, is missing or not finite, or a text has no letter and no setting gives its score;
            names the step and the prompt.
        """
        values = np.full((len(texts), max(map(len, texts))), np.nan, np.float64)
        empty = 0
        asks: list[_Ask] = []
        for prompt, (comparison, rollouts) in enumerate(zip(comparisons, texts, strict=True)):
            blank = [place for place, text in enumerate(rollouts) if not text.strip()]
            if blank and self.settings.empty is None:
                raise RunError(
                    f"step {step}: comparison {quote(comparison.id)}: rollout {blank[0]} has no letter, so nothing can "
                    "be scored; scoring.empty=NUMBER sets the score of such rollouts"
                )
            values[prompt, blank] = 0.0 if self.settings.empty is None else self.settings.empty
            empty += len(blank)
            asks += _asks(prompt, comparison, rollouts, whole=self.scorer.compares)

        def fill() -> tuple[list[list[float]], int]:
            failed = self._fill(values, asks, step=step)
            return values.tolist(), failed

        # Only the first process calls functions and servers; a model on the devices runs on all processes together.
        alone = not self.scorer.has_weights or "judge elsewhere" in self.kinds
        scores, failed = on_first_process(fill) if alone else fill()
        scaled = np.asarray(scores) * self.settings.scale
        return Scores(scaled.astype(np.float32), empty, failed)

    def _fill(self, values: np.ndarray, asks: Sequence[_Ask], *, step: int) -> int:
        """Fill in the reward's scores, and return how many failed."""
        waiting, failed = dict(enumerate(asks)), 0

        def fail(place: int, what: str, cause: Exception | None = None) -> int:
            ask = waiting.pop(place)
            if self.settings.failed is None:
                raise RunError(
                    f"step {step}: the reward {self.name} {what}; the first comparison without a score: "
                    f"{quote(ask.comparison.id)}. Nothing was updated in this step; after you fix the reward, the "
                    "same command continues the run"
                ) from cause
            places = [rollout for rollouts in ask.rollouts for rollout in rollouts]
            values[ask.prompt, places] = self.settings.failed
            return len(places)

        while waiting:
            order, scored = list(waiting), []
            problem: Exception | None = None
            try:
                asked = [asks[place].comparison for place in order]
                for batch in self.scorer.stream(asked, view=self._view):
                    scored += zip(batch.indices, batch.scores, strict=True)
            except Exception as error:
                problem = error
            for index, row in scored:
                if not np.isfinite(row).all():
                    unread = " (nan: no number in the reply, or no verdict)" if self.scorer.judges else ""
                    failed += fail(order[index], f"gave {quote(np.asarray(row).tolist())}{unread}")
                    continue
                ask = waiting.pop(order[index])
                for score, rollouts in zip(row, ask.rollouts, strict=True):
                    values[ask.prompt, rollouts] = score
            # For a scorer that handles one at a time, the first comparison without a score is the failing one.
            if problem is not None:
                known = isinstance(problem, PrbError)
                reason = str(problem) if known else f"{type(problem).__name__}: {problem}"
                failed += fail(next(iter(waiting)), f"failed: {reason}", problem)
            elif waiting:
                failed += fail(next(iter(waiting)), "gave no score")
        return failed


def _asks(prompt: int, comparison: Comparison, texts: Sequence[str], *, whole: bool = False) -> list[_Ask]:
    if whole:
        places = [place for place, text in enumerate(texts) if text.strip()]
        asked = (
            replace(comparison, responses=[texts[place] for place in places], labels=None) if places else None
        )
        return [] if asked is None else [_Ask(prompt, asked, [[place] for place in places])]
    groups: list[dict[str, list[int]]] = []  # texts that differ by more than outer blanks
    for place, text in enumerate(texts):
        if not text.strip():
            continue
        for group in groups:
            if text in group or all(text.strip() != other.strip() for other in group):
                group.setdefault(text, []).append(place)
                break
        else:
            groups.append({text: [place]})
    return [
        _Ask(prompt, replace(comparison, responses=list(group), labels=None), list(group.values()))
        for group in groups
    ]


def open_reward(
    settings: PpoSettings, model: Model | None, *, out: Path | None = None, trains: bool = True
) -> Reward:
    """Open a reward of a run.

    Args:
      settings: Settings of the run.
      model: Name, URL of `prb serve` or of a class server, scorer, or function of a comparison.
      trains: Whether the policy learns from this reward; `scoring.reference` and the other options of implicit rewards
        apply only to such a reward, not to `watch.gold`.
      out: Run folder, which caches replies of a judge at an endpoint; needed only for such a judge.

    Raises:
      RunError, CheckpointError, MeshError: the reward cannot be loaded, or cannot score.
    """
    scoring, options = settings.scoring, LoadOptions()
    if isinstance(model, str) and is_judge(model):
        return Reward(get("training", "judge").value(settings, model, out=out), scoring, {})
    if is_class_server(model):
        options = LoadOptions(tokenizer=scoring.tokenizer)
    elif isinstance(model, str | Path) and not (is_url(model) or has_no_weights(model)):
        options = LoadOptions(mesh=scoring.mesh or settings.mesh, dtype=scoring.dtype)
        if trains and not is_personalised(model):
            options = replace(options, **{name: getattr(scoring, name) for name in IMPLICIT})
    history = None
    if scoring.history is not None and (is_personalised(model) or getattr(model, "adapts", False)):
        history = get("evaluation", "history").value(scoring.history.split(","))
    scorer = open_scorer(cast(Model, model), options, recorded=True, history=history)
    if _is_fitted(scorer):
        scorer = replace(scorer, earlier=False)  # rollouts have no labels to learn a user from
    told: Any = scorer
    facts = {"view": told.view} if is_url(model) and not is_class_server(model) else {}
    return Reward(scorer, scoring, facts, by_name=isinstance(model, str | Path))


def _is_fitted(scorer: Any) -> TypeGuard[PersonalisedModel]:
    """Return whether a reward was fitted by `prb personalise`."""
    return scorer.adapts and hasattr(scorer, "fitted")


def check_scoring(scoring: ScoringSettings, rewards: Sequence[Reward]) -> None:
    """Reject options for opening or showing a reward that no reward of the run uses.

    Raises:
      RunError: an option is set but unused; names its key.
    """
    kinds = set().union(*(reward.kinds for reward in rewards))
    given, unset = flat_settings(scoring), flat_settings(ScoringSettings())
    for name, users in _USED_BY.items():
        if given[name] != unset[name] and kinds.isdisjoint(users):
            names = " or ".join(reward.name for reward in rewards)
            raise RunError(
                f"config key 'scoring.{name}': not used by {names}; remove it, found {quote(given[name])}"
            )
