"""Why a person chose as they did: rubric aspects and narratives. Private, never shown to a model."""

from __future__ import annotations

from collections.abc import Sequence

from prb_jax.data.comparison import Post, RubricAspect
from prb_jax.sources.personas.people import Persona
from prb_jax.sources.personas.phrases import Draws, Topic
from prb_jax.sources.personas.pools import Flaw, Pools

OTHER_ASPECTS = 2
"""Tastes listed beside those that decide."""


def personal_aspects(
    draws: Draws, pools: Pools, person: Persona, profile: Sequence[Post], chosen: Sequence[int]
) -> tuple[RubricAspect, ...]:
    """What the person wants from this answer: the tastes that decide, then some that do not.

    Args:
      profile: the posts shown; the evidence of every aspect is one of them.
      chosen: levels of the chosen answer; the rejected one has the opposite levels.
    """
    aspects = []
    deciding = _deciding(person, chosen)
    for axis in deciding:
        wanted, other = (
            pools.axes[axis].pole(person.tastes[axis]),
            pools.axes[axis].pole(-person.tastes[axis]),
        )
        if person.tastes[axis] * chosen[axis] > 0:
            reason = f"The chosen answer {wanted.trait}; the other one {other.trait}."
        else:
            reason = (
                f"A slip: the rejected answer {wanted.trait}, as this person usually wants, "
                f"but this once they took the one that {other.trait}."
            )
        aspects.append(RubricAspect(wanted.label, _evidence(person, axis, profile), reason))
    for axis in draws.some([a for a in person.cares if a not in deciding], OTHER_ASPECTS):
        wanted = pools.axes[axis].pole(person.tastes[axis])
        reason = "The two answers do not differ in this, so it does not decide here."
        aspects.append(RubricAspect(wanted.label, _evidence(person, axis, profile), reason))
    return tuple(aspects)


def personal_narrative(
    draws: Draws, pools: Pools, person: Persona, topic: Topic, chosen: Sequence[int]
) -> str:
    """The choice in the person's own words."""
    deciding = _deciding(person, chosen)
    axes = [pools.axes[axis] for axis in deciding]
    wanted = [axis.pole(person.tastes[i]) for axis, i in zip(axes, deciding, strict=True)]
    other = [axis.pole(-person.tastes[i]) for axis, i in zip(axes, deciding, strict=True)]
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


def _evidence(person: Persona, axis: int, profile: Sequence[Post]) -> str:
    """A shown post that reveals this taste."""
    return next(post.text for post in profile if person.axis_of[post.id] == axis)
