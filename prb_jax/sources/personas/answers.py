"""Questions and answers: an answer shows the poles it realises, and is otherwise like all others, or flawed."""

from __future__ import annotations

from collections.abc import Sequence

from prb_jax.sources.personas.phrases import Draws, RunOut, Sentence, Supply, Topic, task_order
from prb_jax.sources.personas.pools import Flaw, Pole, Pools

TEXTUAL_FLAWS = (
    Flaw("salad", "is a jumble of words"),
    Flaw("cut", "breaks off in the middle of a sentence"),
    Flaw("loop", "repeats one sentence over and over"),
)
"""Flaws that are made from a proper answer, beside those written in sentences of their own."""


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
        templates: list[Sentence] = draws.some(pools.neutral, neutral)
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


def write_flawed_pair(
    draws: Draws, pools: Pools, topic: Topic, flaw: Flaw, *, longer: int
) -> tuple[str, str]:
    """A good and a bad answer, of which the good one is the longer one (``longer`` +1) or the shorter one (-1)."""
    pole = draws.pick(draws.pick(pools.axes).poles)
    poles = (pole, pole) if draws.chance(0.5) else (pole,)
    while True:
        good = write_answer(draws, pools, topic, poles, neutral=3 - len(poles))
        # The bad one is aimed at a length a little beyond or short of the good one's.
        aim = round(len(good) * (1 - longer * (0.05 + 0.25 * draws.below(1000) / 1000)))
        try:
            bad = _write_bad(draws, pools, topic, flaw, aim)
        except RunOut:
            continue
        if (len(good) - len(bad)) * longer > 0 and abs(len(bad) - aim) <= 0.2 * len(good):
            return good, bad


def _write_bad(draws: Draws, pools: Pools, topic: Topic, flaw: Flaw, aim: int) -> str:
    """A bad answer of about ``aim`` characters."""
    if flaw.key == "salad":  # punctuation goes astray with the words
        return " ".join(draws.shuffled(_plain(draws, pools, topic, aim).split()))
    if flaw.key == "cut":  # on a bare word inside a sentence
        words = _plain(draws, pools, topic, aim + 40)[:aim].split()[:-1]
        while not words[-1][-1].isalpha():
            words.pop()
        return " ".join(words)
    if flaw.key == "loop":
        sentence = Supply(draws, topic).fill(draws.pick(pools.neutral))
        return " ".join([sentence] * max(2, round(aim / (len(sentence) + 1))))
    sentences: list[str] = []
    if draws.chance(0.5):  # it may begin like a proper answer
        sentences.append(Supply(draws, topic).fill(draws.pick(pools.neutral)))
    subject = draws.pick([t for t in pools.topics_of(topic.split) if t.domain != topic.domain])
    written_about = subject if flaw.key == "drift" else topic
    fixed = {"x": draws.pick(topic.tasks), "fact": topic.fact, "trap": topic.trap}
    for template in draws.shuffled(flaw.sentences):
        if sum(map(len, sentences)) + len(sentences) >= aim - 20 and len(sentences) > 1:
            break
        supply = Supply(draws, written_about, fixed=fixed if flaw.key == "contradiction" else None)
        sentences.append(supply.fill(template))
    return " ".join(sentences)


def _plain(draws: Draws, pools: Pools, topic: Topic, at_least: int) -> str:
    """Unremarkable sentences about the topic, at least so many characters. Raises RunOut."""
    supply = Supply(draws, topic)
    text = ""
    for template in draws.shuffled(pools.neutral):
        try:
            text += (" " if text else "") + supply.fill(template)
        except RunOut:
            continue
        if len(text) >= at_least:
            return text
    raise RunOut
