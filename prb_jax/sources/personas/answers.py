"""Questions and answers: an answer is shown in the poles it realises, otherwise all are alike."""

from __future__ import annotations

from collections.abc import Sequence

from prb_jax.sources.personas.draws import Draws
from prb_jax.sources.personas.phrases import RunOut, Supply, Template, Topic, task_order
from prb_jax.sources.personas.pools import Pole, Pools


def write_question(draws: Draws, pools: Pools, topic: Topic) -> str:
    """What a user asks about the topic."""
    return Supply(draws, topic).fill(draws.pick(pools.questions))


def write_answer(
    draws: Draws,
    pools: Pools,
    topic: Topic,
    poles: Sequence[Pole],
    *,
    neutral: int = 1,
    order: Sequence[int] | None = None,
) -> str:
    """An answer of one sentence for each entry of ``poles`` (repeats allowed) and ``neutral`` others.

    The sentences come in random order; no task, fact or phrase is used twice. Tasks are taken in the
    given ``order``, if any, so that two answers can give the same advice.
    """
    while True:
        templates: list[Template] = draws.some(pools.neutral, neutral)
        for pole in poles:
            templates.append(draws.pick([t for t in pole.sentences if t not in templates]))
        opening = [t for t in templates if not any(t in pole.continuations for pole in poles)]
        if not opening:
            continue
        first = draws.pick(opening)
        rest = draws.shuffled([t for t in templates if t is not first])
        try:
            supply = Supply(draws, topic, order=order or task_order(draws, topic))
            return " ".join(supply.fill(template) for template in (first, *rest))
        except RunOut:
            continue


def write_contrast(
    draws: Draws, pools: Pools, topic: Topic, first: Sequence[Pole], second: Sequence[Pole]
) -> tuple[str, str]:
    """Two answers that give much the same advice, one in either manner."""
    order = task_order(draws, topic)
    return (
        write_answer(draws, pools, topic, first, order=order),
        write_answer(draws, pools, topic, second, order=order),
    )
