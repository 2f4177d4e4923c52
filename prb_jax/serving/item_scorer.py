"""Scores single responses, with their prompts and users, by any kind of scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prb_jax.behaviour.judges.scorer import JudgeScorer
from prb_jax.errors import DataError, PrbError, RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.open_scorer import Model, open_scorer
from prb_jax.scoring.remote.score_server import ScoreClient
from prb_jax.scoring.scorer import Scorer
from prb_jax.serving.items import (
    ChatItem,
    NotFiniteError,
    Score,
    Scores,
    alike,
    as_comparison,
    refuse_rendered,
)
from prb_jax.text.view import View, ViewOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from prb_jax.behaviour.judges.options import JudgeOptions

JUDGED_AT_ONCE = 32  # concurrent requests to the endpoint of a judge

ItemScorer = Callable[[Sequence[ChatItem]], Sequence[Score | PrbError]]
"""Gives the score of each item, or why it has none."""


def open_reward(
    model: Model,
    loading: LoadOptions,
    *,
    history: Sequence[Comparison] | Path | None = None,
    judge: JudgeOptions | None = None,
) -> Scorer:
    """Open a scorer that gives a number for each response.

    Args:
      model: Any model that `prb_jax.evaluate` accepts, or a judge: `judge:MODEL`, or `judge:URL#NAME` at an endpoint.
        `pairs:MODEL` compares the responses of a prompt with each other.
      history: Comparisons of the users, or a folder of their states, for a fitted method of personalisation.
      judge: Options of a judge.

    Raises:
      RunError: If a judge needs the true rubric, because no request contains one; or see :func:`prb_jax.evaluate`.
    """
    from prb_jax.behaviour.judges.names import RUBRIC, is_judge
    from prb_jax.behaviour.judges.options import parse_judge

    if not is_judge(model):
        if judge is not None:
            raise RunError(
                f"{model}: is not a judge (judge:MODEL, pairs:MODEL); remove the options of judges"
            )
        return open_scorer(model, loading, history=history)
    from prb_jax.behaviour.judges.judge import open_named_judge

    if parse_judge(str(model)).protocol == RUBRIC:
        raise RunError(
            f"{model}: rates aspects of the true rubric, which no request contains; use judge:MODEL"
        )
    if history is not None:
        raise RunError(f"history: {model} does not adapt to users: leave it out")
    return open_named_judge(str(model), judge, loading=loading, cache=None, concurrency=JUDGED_AT_ONCE)


def open_item_scorer(
    model: Model,
    *,
    view: ViewOptions,
    batch_tokens: int | None = None,
    mesh: str | Mesh | None = None,
    history: Sequence[Comparison] | Path | None = None,
    judge: JudgeOptions | None = None,
) -> ItemScorer:
    """Return a function that scores items.

    Args:
      model, history, judge: See :func:`open_reward`; the model may also be the URL of a running `prb serve`.
      mesh: Devices for a model given by name; see :func:`prb_jax.load`. A loaded model must already be on the devices
        of this mesh.
      view: Options for the parts of an item that the model sees; only for models that read tokens.
      batch_tokens: Approximate tokens per batch; only for reward models.

    Raises:
      RunError: If an option has no effect on this model, or the model is on other devices; or see
        :func:`open_reward`.
    """
    placed = getattr(model, "mesh", None)
    if mesh is not None and placed is not None:
        from prb_jax.platform.sharding import as_mesh

        wanted = set(as_mesh(mesh).devices.flat)
        if set(placed.devices.flat) != wanted:
            raise RunError(
                f"mesh: the model was loaded on {placed.size} devices, and the mesh has {len(wanted)} or other ones: "
                "load it there: prb.load(MODEL, mesh=...)"
            )
        mesh = None
    scorer = open_reward(model, LoadOptions(mesh=mesh), history=history, judge=judge)
    if not isinstance(scorer, ScoreClient):  # a ScoreClient does not start JAX
        from prb_jax.scoring.reward_model import RewardModel

        if isinstance(scorer, RewardModel):
            from prb_jax.serving.tree_scorer import open_tree_scorer

            return open_tree_scorer(scorer, view, batch_tokens=batch_tokens)
    return comparison_scores(scorer, view, batch_tokens=batch_tokens)[0]


def comparison_scores(
    scorer: Scorer, view: ViewOptions, *, batch_tokens: int | None = None
) -> tuple[ItemScorer, View]:
    """Return a function that scores items as comparisons, and the view that the scorer has of them.

    Raises:
      RunError: If an option has no effect on this scorer.
    """
    options = ({} if scorer.uses else asdict(view)) | {"batch_tokens": batch_tokens}
    if given := [name for name, value in options.items() if value is not None]:
        name = scorer.identity().get("name", "this model")
        raise RunError(
            f"{', '.join(given)}: no effect on {name}; remove {'it' if len(given) == 1 else 'them'}"
        )
    why = "which is not a finite number"
    if isinstance(scorer, JudgeScorer):
        why = "the reply of the judge names no number of its scale"
        if scorer.compares:
            why = "the judge gave no verdict on it, or its prompt has no other response in this call to compare it with"
        _check_judge(scorer, view)
    shown = scorer.choose_view(view).view

    def score(items: Sequence[ChatItem]) -> Scores:
        members, scores = list[list[int]](), dict[int, Score | PrbError]()
        for places in alike(items):
            try:
                refuse_rendered(items[places[0]], scorer.rendered_mark)
                members.append(places)
            except DataError as error:
                scores |= dict.fromkeys(places, error)
        comparisons = [
            as_comparison([items[place] for place in places], name=str(number))
            for number, places in enumerate(members)
        ]
        for batch in scorer.stream(comparisons, view=shown) if comparisons else ():
            for row, (index, values) in enumerate(zip(batch.indices, batch.scores, strict=True)):
                numbers, cut = np.asarray(values).tolist(), batch.truncation[row].any
                lengths = batch.lengths[row] if batch.lengths else [0] * len(numbers)
                for place, value, length in zip(members[index], numbers, lengths, strict=True):
                    error = None if np.isfinite(value) else NotFiniteError(f"the score is {value}, {why}")
                    scores[place] = error or Score(value, length, cut)
        return [scores[place] for place in range(len(items))]

    return score, shown


def _check_judge(judge: JudgeScorer, view: ViewOptions) -> None:
    """Raise RunError for options that a judge cannot use as a reward."""
    if view.protocol is not None:
        raise RunError(
            f"protocol: {judge.identity()['name']} has prompts of its own: leave it out; pairs:MODEL compares the "
            "responses of a prompt, and judge:MODEL rates each response by itself"
        )
