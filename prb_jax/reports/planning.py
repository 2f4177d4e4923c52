"""Tables around a study of people: who can take part, how many people a gain needs, and what to ask a person next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prb_jax.reports.study import PARTS
from prb_jax.reports.table import Table, field, first_words, number

if TYPE_CHECKING:
    from prb_jax.study.ask import Question

_NO_INFORMATION: Final = 1e-9  # nats; less information than this is only rounding


def render_people(people: Mapping[str, Sequence[int]], shots: Sequence[int]) -> Table:
    """Return the table of ``prb personalise --dry-run``: the number of people from
    :func:`prb_jax.study.personalise.people_of_study` who have k comparisons to adapt on."""
    rows = [
        (part, f"{len(counts):,}", *(f"{sum(count >= k for count in counts):,}" for k in shots))
        for part, counts in people.items()
    ]
    title = "people who have k comparisons to be adapted on"
    note = "; ".join(f"{part}: {PARTS[part]}" for part in people)
    return Table(title, ("", "people", *(f"k={k}" for k in shots)), rows, note=note)


def render_plan(plan: Mapping[str, Any]) -> Table:
    """Return the table of ``prb personalise --plan``, a result of :func:`prb_jax.study.simulation.plan_study`."""
    columns = {
        "people": field("people", "{:,}"),
        "choices predicted": field("choices", "{:,}"),
        "gain in accuracy": lambda row: _with_error(row, "gain", "{:+.4f}"),
        "95 % interval, half": field("ci95_half", "{:.4f}"),
        "power": lambda row: _with_error(row, "power", "{:.2f}"),
    }
    title, ceiling = f"bayes minus pooled with {plan['shots']} choices a person, simulated", plan["ceiling"]
    note = (
        f"the data have {plan['people']:,} people; given the true prior, {plan['shots']} choices are worth "
        f"{ceiling['choices']:+.4f} over an unknown person, and full knowledge of the person {ceiling['person']:+.4f}; "
        "power: chance that the interval of the gain is above 0; ± Monte Carlo standard error of "
        f"{plan['repeats']} simulated studies"
    )
    needed = plan["needed"]
    gain = f"\na gain of {needed['gain']:g}"
    if needed["people"] is None:
        note += f"{gain} cannot be planned for: no simulated study has an interval; try more --people or --repeats"
    else:
        note += (
            f"{gain} is found in {needed['power']:.0%} of studies of {needed['people']:,} people, with "
            f"{needed['choices']:,} choices predicted"
        )
    return Table.of(title, plan["rows"], columns, note=note)


def _with_error(row: Mapping[str, Any], figure: str, form: str) -> str:
    error = row.get(f"{figure}_error")
    return number(row[figure], form) + ("" if error is None else f" ± {form.replace('+', '').format(error)}")


def render_questions(questions: Sequence[Question], *, top: int) -> Table:
    """Return a line for each of the first questions, the value of a random one, and how much is already known."""
    from prb_jax.study.ask import known_of_person

    words = [first_words(one.question, most=60) or one.id for one in questions]
    named = {
        one.id: word if words.count(word) == 1 else f"{word} ({first_words(one.id, most=20)})"
        for one, word in zip(questions, words, strict=True)
    }
    columns = {
        "question": lambda question: "\n".join(
            (
                named[question.id],
                *(f"{k}: {first_words(text, most=60)}" for k, text in enumerate(question.responses, 1)),
            )
        ),
        "information": lambda question: f"{question.information:.4f}",
        "prefers the first": lambda question: f"{question.probability:.2f}",
        "anybody": lambda question: f"{question.of_anybody:.2f}",
    }
    information = [question.information for question in questions]
    mean, known = sum(information) / len(information), known_of_person(questions)
    notes = [
        f"information in nats; a question at random: {mean:.4f}; known of this person so far: {known:.4f}; anybody: "
        "an unknown person prefers the first response"
    ]
    if max(information) < _NO_INFORMATION:
        notes.append(
            "no answer tells anything: the fitted method found no differences between people, so it is the same for "
            "everybody; `numbers` in study.json has the chosen settings"
        )
    elif known < max(information):
        notes.append(
            "not enough is known of this person: one more answer would tell more than everything known so far"
        )
    if questions[0].pref_rule is not None:
        columns["PReF's rule"] = lambda question: f"{question.pref_rule:.3g}"
        chosen = max(questions, key=lambda question: question.pref_rule or 0.0)
        notes.append(f"PReF's rule asks {named[chosen.id]}: {chosen.information:.4f}")
    return Table.of(
        "The questions that tell most",
        questions[:top],
        columns,
        whole=True,
        narrow=True,
        note="\n".join(notes),
    )
