"""Questions and answers: an answer shows the poles it realises, and is otherwise like all others, or flawed.

And why somebody chose one of two answers: the private fields of a record.
"""

from __future__ import annotations

from collections.abc import Sequence

from prb_jax.records.comparison import Post, RubricAspect
from prb_jax.records.sources.personas.people import Persona
from prb_jax.records.sources.personas.phrases import Draws, RunOut, Sentence, Supply, Topic, task_order
from prb_jax.records.sources.personas.pools import Flaw, Pole, Pools

TEXTUAL_FLAWS = (
    Flaw("salad", "is a jumble of words"),
    Flaw("cut", "breaks off in the middle of a sentence"),
    Flaw("loop", "repeats one sentence over and over"),
)
"""Flaws that are derived from a proper answer; other flaws have separate sentences."""


def write_question(draws: Draws, pools: Pools, topic: Topic) -> str:
    """Return a user's question about the topic."""
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
    given ``order``, if any, to let two answers give the same advice.
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


def write_flawed_pair(
    draws: Draws, pools: Pools, topic: Topic, flaw: Flaw, *, longer: int
) -> tuple[str, str]:
    """Return a good and a bad answer; the good one is longer (``longer`` +1) or shorter (-1)."""
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
    """Unremarkable sentences about the topic, at least ``at_least`` characters.

    Raises:
      RunOut: the pools have no sentence left.
    """
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


OTHER_ASPECTS = 2  # tastes listed beside those that decide


def personal_aspects(
    draws: Draws, pools: Pools, person: Persona, profile: Sequence[Post], chosen: Sequence[int]
) -> tuple[RubricAspect, ...]:
    """Return the person's wishes for this answer: the tastes that decide, then some that do not.

    Args:
      profile: the posts shown; the evidence of every aspect is one of them.
      chosen: levels of the chosen answer; the rejected one has the opposite levels.
    """
    aspects = []
    others = [axis for axis in person.cares if not chosen[axis]]
    for axis in (*_deciding(person, chosen), *draws.some(others, OTHER_ASPECTS)):
        wanted = pools.axes[axis].pole(person.tastes[axis])
        other = pools.axes[axis].pole(-person.tastes[axis])
        pleases = person.tastes[axis] * chosen[axis]
        if pleases > 0:
            reason = f"The chosen answer {wanted.trait}; the other one {other.trait}."
        elif pleases < 0:
            reason = (
                f"A slip: the rejected answer {wanted.trait}, as this person usually wants, "
                f"but this once they took the one that {other.trait}."
            )
        else:
            reason = "The two answers do not differ in this, so it does not decide here."
        # a shown post that reveals this taste
        evidence = next(post.text for post in profile if person.axis_of[post.id] == axis)
        aspects.append(RubricAspect(wanted.label, evidence, reason))
    return tuple(aspects)


def personal_narrative(
    draws: Draws, pools: Pools, person: Persona, topic: Topic, chosen: Sequence[int]
) -> str:
    """The choice in the person's own words."""
    deciding = _deciding(person, chosen)
    wanted = [pools.axes[axis].pole(person.tastes[axis]) for axis in deciding]
    other = [pools.axes[axis].pole(-person.tastes[axis]) for axis in deciding]
    wishes = "; and ".join(pole.wish for pole in wanted)
    good = "; it also ".join(pole.trait for pole in wanted)
    bad = "; it also ".join(pole.trait for pole in other)
    asked = draws.pick((f"When I asked how to {topic.goal},", f"My question was how to {topic.goal}, and"))
    if person.leaning(chosen) > 0:
        verdict = (
            f"{asked} one answer spoke to me because it {good}. "
            f"The other one {bad}. That may suit others, but not me."
        )
    else:
        verdict = (
            f"{asked} one answer did just that: it {good}. All the same, this once I took the other, "
            f"although it {bad}. Tomorrow I would choose differently."
        )
    rest = [axis for axis in person.cares if axis not in deciding]
    labels = [pools.axes[axis].pole(person.tastes[axis]).label.lower() for axis in draws.shuffled(rest)]
    also = f"I also care for {', '.join(labels[:-1])} and {labels[-1]}, but there the two were alike."
    return f"{person.background}. {wishes}. {verdict} {also}"


def generic_aspects(topic: Topic, flaw: Flaw) -> tuple[RubricAspect, ...]:
    """What everybody wants: a proper answer."""
    return (
        RubricAspect(
            aspect="A usable answer",
            evidence=f"The question is how to {topic.goal}.",
            reason=f"The chosen answer helps with {topic.thing}; the other one {flaw.trait}.",
        ),
    )


def generic_narrative(person: Persona, topic: Topic, flaw: Flaw) -> str:
    """The obvious choice in the person's own words."""
    return (
        f"{person.background}. I wanted to know how to {topic.goal}. One answer helped, whatever I may think "
        f"of its manner; the other one {flaw.trait}, which helps nobody."
    )


def _deciding(person: Persona, levels: Sequence[int]) -> list[int]:
    """The axes in which the answers differ and about which the person cares."""
    return [axis for axis in person.cares if levels[axis]]
