"""Generic pairs: a proper answer, and one that is plainly worse for everyone."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.sources.personas.answers import write_answer
from prb_jax.sources.personas.draws import Draws
from prb_jax.sources.personas.phrases import RunOut, Supply, Topic
from prb_jax.sources.personas.pools import Flaw, Pools

TEXTUAL_FLAWS = (
    Flaw("salad", "is a jumble of words", ()),
    Flaw("cut", "breaks off in the middle of a sentence", ()),
    Flaw("loop", "repeats one sentence over and over", ()),
)
"""Flaws that are made from a proper answer, beside those written in sentences of their own."""


@dataclass(frozen=True)
class FlawedPair:
    """A good answer, a bad one, and what is wrong with it."""

    good: str
    bad: str
    flaw: Flaw


def all_flaws(pools: Pools) -> tuple[Flaw, ...]:
    """Every way to be bad, in a fixed order."""
    return pools.flaws + TEXTUAL_FLAWS


def write_flawed_pair(draws: Draws, pools: Pools, topic: Topic, flaw: Flaw, *, longer: int) -> FlawedPair:
    """A pair in which the good answer is the longer one (``longer`` +1) or the shorter one (-1)."""
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
            return FlawedPair(good, bad, flaw)


def _write_bad(draws: Draws, pools: Pools, topic: Topic, flaw: Flaw, aim: int) -> str:
    """A bad answer of about ``aim`` characters."""
    if flaw.key == "salad":
        return _salad(draws, _plain(draws, pools, topic, aim))
    if flaw.key == "cut":
        return _cut(_plain(draws, pools, topic, aim + 40), aim)
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
        contradicting = flaw.key == "contradiction"
        supply = Supply(draws, written_about, fixed=fixed if contradicting else None)
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


def _salad(draws: Draws, text: str) -> str:
    """The words of the text in random order, punctuation gone astray with them."""
    return " ".join(draws.shuffled(text.split()))


def _cut(text: str, length: int) -> str:
    """The beginning of the text, ending on a bare word inside a sentence."""
    words = text[:length].split()[:-1]
    while not words[-1][-1].isalpha():
        words.pop()
    return " ".join(words)
