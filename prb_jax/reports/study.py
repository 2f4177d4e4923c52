"""Tables for personalisation methods: a study's accuracy by shots, differences, controls; plans; questions to ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict

from prb_jax.errors import RunError
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.reports.drawings import drawing
from prb_jax.reports.page import Chapter, Listing, Section
from prb_jax.reports.table import Table, bounded, change, field, number

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from prb_jax.study.ask import Question

STUDY: Final = "study.json"
RESULTS: Final = "results.json"

_WIDE: Final = 6  # maximum number of columns of shots
_NO_INFORMATION: Final = 1e-9  # nats; less information than this is only rounding
_PARTS: Final = {
    "unseen": "people not used for fitting",
    "seen": "held-out comparisons of people that were fitted on",
}
_BEATEN: Final = {None: "", True: "beaten", False: "not beaten"}

Bounds = tuple[float, float] | None


class StudyRow(TypedDict):
    """A row of ``results.json``; fields that were added later are optional."""

    method: str
    control: str | None
    split: str
    shots: int
    n: int
    users: int | None
    accuracy: float | None
    accuracy_ci95: Bounds
    user_accuracy: float | None
    user_accuracy_ci95: Bounds
    ties: int | None
    diff_to_pooled: float | None
    diff_to_pooled_ci95: Bounds
    p_holm: float | None
    p_log_loss_holm: NotRequired[float | None]
    above_offset: bool | None
    seconds_fit: float | None
    seconds_adapt_per_user: float | None
    bytes_per_user: int | None
    disk_bytes_per_user: NotRequired[int | None]
    reached: NotRequired[int | None]
    log_loss: NotRequired[float | None]
    log_loss_ci95: NotRequired[Bounds]
    log_loss_diff_to_pooled: NotRequired[float | None]
    log_loss_diff_to_pooled_ci95: NotRequired[Bounds]
    ece: NotRequired[float | None]
    brier: NotRequired[float | None]


class _Check(TypedDict):
    wrapper_accuracy: NotRequired[float | None]
    wrapper_detectable: NotRequired[float | None]
    wrapper: NotRequired[str]
    wrapper_chance: NotRequired[float]
    wrapper_both_ways: NotRequired[float | None]


class StudySummary(TypedDict):
    """The contents of ``study.json``."""

    users: int
    choices: int
    excluded: dict[str, int]
    users_with_one_choice: int
    choices_that_tell_a_query: list[int]
    posts_that_judge_a_candidate: int
    checks: list[_Check]
    relaxed: NotRequired[list[str]]
    left_out_methods: dict[str, str]
    not_above_offset: list[str]
    controls: dict[str, list[dict[str, float]]]
    definitions: dict[str, str]


Row = Mapping[str, Any]
"""One row of ``results.json``: a method with a number of shots and a control, for one part of the people."""


def render_study(rows: Sequence[Row], summary: Mapping[str, Any], *, title: str) -> Group:
    """Return the tables of a study, from the rows of ``results.json`` and the contents of ``study.json``."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")]
    for part, about in _PARTS.items():
        if here := [row for row in rows if row["split"] == part]:
            parts += [_curves(here, f"{part}: {about}"), *_differences(here, part), _controls(here, part)]
            if any(row.get("log_loss") is not None for row in here):  # absent in earlier versions
                parts.insert(-2, _curves(here, f"{part}: log-loss", figure="log_loss"))
    return Group(*parts, _costs(rows, "time and memory"), Text("\n".join(_notes(summary))))


def _curves(rows: Sequence[Row], title: str, *, figure: str = "accuracy") -> Table:
    """Return accuracy, or another figure, of each method by shots."""
    plain = [row for row in rows if row["control"] is None]
    shots = sorted({row["shots"] for row in plain})[:_WIDE]
    # Earlier versions did not count the people with k comparisons.
    reached = {row["shots"]: row.get("reached") for row in plain}
    lines = [["people who have k", *(number(reached[count], "{:,}") for count in shots)]]
    for simulated in (False, True):
        shown = [row for row in rows if row["control"] == "simulated"] if simulated else plain
        lines += [[]] if shown else []
        for name in dict.fromkeys(row["method"] for row in shown):
            by_shots = {row["shots"]: number(row[figure]) for row in shown if row["method"] == name}
            label = f"{name} (simulated)" if simulated else name
            lines.append([label, *(by_shots.get(count, "") for count in shots)])
    most = max(plain, key=lambda row: row["n"])
    note = (
        f"{figure.replace('_', '-')} after k comparisons of a person; {most['n']:,} choices of "
        f"{most['users']:,} people"
    )
    return Table(title, ["method", *(f"k={count}" for count in shots)], lines, note=note)


def _last(rows: Sequence[Row], control: str | None = None) -> dict[str, Row]:
    """Return each method's row with the most shots, for a control if given."""
    last: dict[str, Row] = {}
    for name in dict.fromkeys(row["method"] for row in rows if row["control"] is None):
        named = name if control is None else f"{name}, {control}"
        of_method = [row for row in rows if row["method"] == named and row["accuracy"] is not None]
        if of_method:
            last[name] = max(of_method, key=lambda row: row["shots"])
    return last


def _differences(rows: Sequence[Row], part: str) -> list[Table]:
    """Return differences from pooled at the most shots, in log-loss and in accuracy; each fits 80 columns."""
    most = max(row["shots"] for row in rows if row["accuracy"] is not None)
    log_loss = {
        "method": field("method"),
        "log-loss\nminus pooled": lambda row: number(row.get("log_loss_diff_to_pooled"), "{:+.4f}"),
        "p, Holm": lambda row: _p(row.get("p_log_loss_holm")),  # absent in earlier versions
    }
    accuracy = {
        "method": field("method"),
        "accuracy\nminus pooled": change("diff_to_pooled"),
        "p, Holm": lambda row: _p(row["p_holm"]),
        "pooled + offset": lambda row: _BEATEN[row["above_offset"]],
        "ties": lambda row: f"{row['ties']:,} of {row['n']:,}" if row["ties"] else "0",
    }
    note = "[..] 95 % interval of the paired difference, over people"
    last = _last(rows).values()
    return [
        Table.of(f"{part}, k={most}: log-loss", last, log_loss),
        Table.of(f"{part}, k={most}", last, accuracy, note=note),
    ]


def _p(value: float | None) -> str:
    return "<0.001" if value is not None and value < 0.001 else number(value)


def _controls(rows: Sequence[Row], part: str) -> Table:
    """Return accuracy with each person's own state, with none, with another person's, and without the profile."""
    controls = {
        "own user": None,
        "no user": "no user",
        "shuffled": "shuffled user",
        "no profile": "no profile",
    }
    by_control = {head: _last(rows, control) for head, control in controls.items()}
    columns = {
        "method": str,
        **{
            head: lambda name, figures=figures: number(figures.get(name, {}).get("accuracy"))
            for head, figures in by_control.items()
        },
    }
    return Table.of(f"{part}: controls", by_control["shuffled"], columns)


def _costs(rows: Sequence[Row], title: str) -> Table:
    """Return time and memory of each method: fitting, adapting a person, a person's state on the device and on disk."""
    columns = {
        "method": field("method"),
        "fit": field("seconds_fit", "{:.1f} s"),
        "adapt a person": lambda row: number(1e3 * row["seconds_adapt_per_user"], "{:.3g} ms"),
        "bytes of a state": field("bytes_per_user", "{:,}"),
        "on disk": field("disk_bytes_per_user", "{:,}"),
    }
    # omits baselines
    costly = [row for row in _last(rows).values() if row["bytes_per_user"] or row["seconds_fit"]]
    note = "adapting with the largest k, all people at once; bytes a person"
    return Table.of(title, costly, columns, note=note)


def _notes(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes beyond the tables: sizes, exclusions, and baselines that are not beaten."""
    yield f"{summary['users']:,} people, {summary['choices']:,} choices"
    yield from (f"left out: {count:,} {reason}" for reason, count in summary["excluded"].items() if count)
    if alone := summary["users_with_one_choice"]:
        yield f"{alone:,} people have only one choice: there is nothing to adapt on"
    if any(telling := summary["choices_that_tell_a_query"]):
        yield (
            f"{max(telling):,} choices share a response with a choice to predict of the same person: methods are "
            "neither adapted nor fitted on them"
        )
    if posts := summary["posts_that_judge_a_candidate"]:
        yield f"{posts:,} posts that judge a response of the same person's comparisons were taken away"
    if "wrapper" in summary.get("relaxed", ()):
        told = ", ".join(f"{check['wrapper_accuracy']:.3f}" for check in summary["checks"])
        yield f"relaxed: the wrapping of the responses alone tells the labels with an accuracy of {told}"
    elif suspicious := [check for check in summary["checks"] if "wrapper" in check]:
        for check in suspicious:
            both = check.get("wrapper_both_ways")
            told = "" if both is None else f"; {both:.0%} of the texts with it both win and lose"
            yield (
                f"{check['wrapper']} correlates with the choices: a classifier that only uses this is right in "
                f"{check['wrapper_accuracy']:.3f}, by chance {check['wrapper_chance']:.3f}{told}"
            )
    elif seen := list(filter(None, (check.get("wrapper_detectable") for check in summary["checks"]))):
        yield (
            "the wrapping of the responses does not tell the labels: a classifier that reads nothing else and is right "
            f"in {0.5 + max(seen):.3f} would have been found 80 % of the time"
        )
    yield from (f"{name} was left out: {reason}" for name, reason in summary["left_out_methods"].items())
    if not_above := summary["not_above_offset"]:
        yield f"not above pooled + offset on unseen people, for any number of shots: {', '.join(not_above)}"
    for name, controls in summary["controls"].items():
        yield f"{name}: {', '.join(f'{figure} {value:.3g}' for figure, value in controls[0].items())}"


def render_people(people: Mapping[str, Sequence[int]], shots: Sequence[int]) -> Table:
    """Return the table of ``prb personalise --dry-run``: the number of people from
    :func:`prb_jax.study.personalise.people_of_study` who have k comparisons to adapt on."""
    rows = [
        (part, f"{len(counts):,}", *(f"{sum(count >= k for count in counts):,}" for k in shots))
        for part, counts in people.items()
    ]
    title = "people who have k comparisons to be adapted on"
    note = "; ".join(f"{part}: {_PARTS[part]}" for part in people)
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

    columns = {
        "question": lambda question: question.id,
        "information": lambda question: f"{question.information:.4f}",
        "prefers the first": lambda question: f"{question.probability:.2f}",
        "anybody": lambda question: f"{question.of_anybody:.2f}",
    }
    information = [question.information for question in questions]
    mean, known = sum(information) / len(information), known_of_person(questions)
    notes = [
        f"information in nats; a question at random: {mean:.4f}; known of this person so far: {known:.4f}"
    ]
    if known < max(information):
        notes.append(
            "not enough is known of this person: one more answer would tell more than everything known so far"
        )
    if max(information) < _NO_INFORMATION:
        notes.append(
            "no answer tells anything: the fitted method found no differences between people, so it is the same for "
            "everybody; `numbers` in study.json has the chosen settings"
        )
    if questions[0].pref_rule is not None:
        columns["PReF's rule"] = lambda question: f"{question.pref_rule:.3g}"
        chosen = max(questions, key=lambda question: question.pref_rule or 0.0)
        notes.append(f"PReF's rule asks {chosen.id}: {chosen.information:.4f}")
    return Table.of("The questions that tell most", questions[:top], columns, note="\n".join(notes))


def study_chapter(folder: Path, run_name: str, anchor: str) -> Chapter:
    """Return the chapter of a page about a study of `prb personalise`.

    Raises:
      RunError: the study is not finished, or one of its files is damaged.
    """
    from prb_jax.study.personalise import RUNS
    from prb_jax.study.picture import curves_figure

    hint = "the same `prb personalise` command finishes the study"
    rows = read_json(folder / RESULTS, error=RunError, hint=hint)
    summary = read_json(folder / STUDY, error=RunError)
    RUNS.read_finished(folder)
    check_schema(rows, list[StudyRow], where=str(folder / RESULTS), error=RunError)
    check_schema(summary, StudySummary, where=str(folder / STUDY), error=RunError)
    if not any(row["control"] is None for row in rows):
        raise RunError(f"{folder / RESULTS}: expected the figures of a method, found none")
    columns = {
        "method": field("method"),
        "people": field("split"),
        "shots": field("shots"),
        "accuracy": bounded("accuracy"),
        "per user": bounded("user_accuracy"),
        "minus pooled": change("diff_to_pooled"),
        "p, Holm": field("p_holm", "{:.2g}"),
        "log-loss": bounded("log_loss"),
        "log-loss minus pooled": change("log_loss_diff_to_pooled"),
        "its p, Holm": lambda row: number(row.get("p_log_loss_holm"), "{:.2g}"),
        "calibration error": field("ece", "{:.3f}"),
        "Brier score": lambda row: number(row.get("brier"), "{:.3f}"),
        "pooled + offset": lambda row: _BEATEN[row["above_offset"]],
        "ties": field("ties", "{:,}"),
        "n": field("n", "{:,}"),
        "people who have k": field("reached", "{:,}"),
    }
    picture = drawing(
        partial(curves_figure, rows),
        "Few-shot curves",
        "Accuracy on people not used for fitting, against the number of a person's comparisons that a method is "
        "adapted on: a panel for each method, with its 95 % interval as a band. Dotted: 0.5.",
    )
    every = "Every method, number of shots and control"
    blocks = [
        picture,
        Table.of(every, rows, columns, words=2, filtered=True),
        _costs(rows, "Time and memory of each method"),
        Listing(list(_notes(summary))),
    ]
    meanings = Table(
        "What the figures mean", ("figure", "meaning"), list(summary["definitions"].items()), words=2
    )
    sections = [
        Section("Learning from a few comparisons of a person", blocks),
        Section("Definitions", [meanings]),
    ]
    return Chapter(f"{run_name}: methods of personalisation", anchor, sections)
