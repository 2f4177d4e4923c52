"""A study of personalisation methods: its answer, its table for the terminal, and its chapter of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NotRequired, TypedDict

from prb_jax.errors import RunError, counted
from prb_jax.metrics.paired import LEVEL
from prb_jax.records.reading import read_json
from prb_jax.records.schema import check_schema
from prb_jax.reports.drawings import drawing
from prb_jax.reports.forest import BASELINE, MODEL, Estimate, draw_forest
from prb_jax.reports.page import Block, Chapter, Listing, Section
from prb_jax.reports.summary import about_figure
from prb_jax.reports.table import (
    NONE,
    Cell,
    Getter,
    Table,
    answered,
    bounded,
    field,
    gained,
    number,
    percent,
    signed,
)

if TYPE_CHECKING:
    from rich.console import Group

STUDY: Final = "study.json"
RESULTS: Final = "results.json"

_MOST_NOTES: Final = 4
_WIDE: Final = 4  # maximum number of columns of shots
PARTS: Final = {
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
    half_credit_accuracy: NotRequired[float | None]
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
    without_ceiling: NotRequired[dict[str, str]]
    controls: dict[str, list[dict[str, float]]]
    definitions: dict[str, str]


Row = Mapping[str, Any]
"""One row of ``results.json``: a method with a number of shots and a control, for one part of the people."""


def _p(value: float | None) -> str:
    return "<0.001" if value is not None and value < 0.001 else number(value)


def _difference(key: str, p: str) -> Getter:
    """Return the getter of a difference from pooled, with its interval and its p-value, as ``+0.03 [..], p 0.01``."""

    def get(row: Row) -> str:
        value, tested = row.get(key), row.get(p)  # earlier versions have no differences of log-losses
        if value is None:
            return NONE
        text = signed(value, row.get(f"{key}_ci95"))
        return Cell(text if tested is None else f"{text}, p {_p(tested)}", value)

    return get


_DIFFERENCES: Final[Mapping[str, Getter]] = {
    "minus pooled": _difference("diff_to_pooled", "p_holm"),
    "log-loss\nminus pooled": _difference("log_loss_diff_to_pooled", "p_log_loss_holm"),
}
"""Columns of the differences of a method from pooled, for the terminal and the page; p is adjusted by Holm's method."""


def render_study(rows: Sequence[Row], summary: Mapping[str, Any], *, title: str) -> Group:
    """Return the answer of a study and one table, from the rows of ``results.json`` and the contents of
    ``study.json``."""
    plain = [row for row in rows if row["control"] is None]
    every = sorted({row["shots"] for row in plain})
    shots = every if len(every) <= _WIDE else [*every[: _WIDE - 1], every[-1]]
    lines: list[list[str]] = []
    for part in PARTS:
        if here := [row for row in rows if row["split"] == part]:
            lines += [[]] if lines else []
            lines.append([f"{part} people", *[""] * (len(shots) + len(_DIFFERENCES))])
            lines += _curves(here, shots)
    most = max(plain, key=lambda row: row["n"])
    notes = [
        f"accuracy after k comparisons of a person, and differences at the most, p by Holm; {most['n']:,} choices of "
        f"{most['users']:,} people; [..] 95 % interval over people; {'; '.join(map(': '.join, PARTS.items()))}",
        _remarks(summary),
        "prb report shows the controls, the calibration, time and memory of each method",
    ]
    heads = ["method", *(f"k={count}" for count in shots), *_DIFFERENCES]
    return answered(Table("", heads, lines), answer=study_answer(rows), notes=notes, title=title)


def study_answer(rows: Sequence[Row]) -> str:
    """Return which method predicts a person best after the most comparisons, and whether it beats pooled."""
    part = [row for row in rows if row["split"] == "unseen"] or rows
    person = "new person" if part is not rows else "person"
    compared = [row for row in _last(part).values() if row["diff_to_pooled"] is not None]
    methods = [row for row in compared if row["p_holm"] is not None] or compared
    if not methods:
        return "No method has a figure to compare with pooled, which treats all people alike."
    best = max(methods, key=lambda row: row["diff_to_pooled"])
    share = percent(best["accuracy"], best["accuracy_ci95"])
    gain, p = gained(best["diff_to_pooled"], best["diff_to_pooled_ci95"]), _p(best["p_holm"])
    after = f"After {counted(best['shots'], 'comparison')} of a {person}"
    verdict = f"p {p}, adjusted for all methods and shots" if best["p_holm"] is not None else "not tested"
    if (loss := best.get("log_loss_diff_to_pooled")) is not None:
        verdict += f"; its log-loss changes by {loss:+.4f}, p {_p(best.get('p_log_loss_holm'))}"
    if best["diff_to_pooled"] > 0 and best["p_holm"] is not None and best["p_holm"] <= LEVEL:
        return (
            f"{after}, {best['method']} predicts {share} of the person's choices, {gain} more than pooled, which "
            f"treats all people alike ({verdict})."
        )
    return (
        f"{after}, no method is shown to predict more choices than pooled, which treats all people alike: the best, "
        f"{best['method']}, predicts {share}, {gain} from pooled ({verdict})."
    )


def _curves(rows: Sequence[Row], shots: Sequence[int]) -> Iterator[list[str]]:
    """Yield the accuracy of each method by shots, and its differences from pooled at the most shots."""
    plain = [row for row in rows if row["control"] is None]
    # Earlier versions did not count the people with k comparisons.
    reached = {row["shots"]: row.get("reached") for row in plain}
    yield ["people who have k", *(number(reached.get(k), "{:,}") for k in shots), *[""] * len(_DIFFERENCES)]
    last = _last(rows)
    for simulated in (False, True):
        known = [row for row in rows if row["control"] == "simulated" and row["accuracy"] is not None]
        shown = known if simulated else plain
        for name in dict.fromkeys(row["method"] for row in shown):
            by_shots = {row["shots"]: number(row["accuracy"]) for row in shown if row["method"] == name}
            row = None if simulated else last.get(name)
            differences = [getter(row) if row else "" for getter in _DIFFERENCES.values()]
            cells = ["" if cell == NONE else cell for cell in differences]
            yield [
                f"{name} (simulated)" if simulated else name,
                *(by_shots.get(k, "") for k in shots),
                *cells,
            ]


def _remarks(summary: Mapping[str, Any]) -> str:
    """Return the notes for a terminal on one line."""
    notes = list(_notes(summary))
    rest = f"; and {len(notes) - _MOST_NOTES} more notes" if len(notes) > _MOST_NOTES else ""
    return "; ".join(notes[:_MOST_NOTES]) + rest


def _last(rows: Sequence[Row], control: str | None = None) -> dict[str, Row]:
    """Return each method's row with the most shots, for a control if given."""
    last: dict[str, Row] = {}
    for name in dict.fromkeys(row["method"] for row in rows if row["control"] is None):
        named = name if control is None else f"{name}, {control}"
        of_method = [row for row in rows if row["method"] == named and row["accuracy"] is not None]
        if of_method:
            last[name] = max(of_method, key=lambda row: row["shots"])
    return last


def _controls(rows: Sequence[Row]) -> Table:
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
    return Table.of("Controls", by_control["shuffled"], columns)


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
    """Yield notes beyond the tables, the gravest first: doubts, baselines that are not beaten, exclusions, sizes."""
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
    yield from (f"{name} was left out: {reason}" for name, reason in summary["left_out_methods"].items())
    for part, reason in summary.get("without_ceiling", {}).items():  # absent in earlier versions
        yield f"no ceiling of {part} people: {reason}"
    if not_above := summary["not_above_offset"]:
        yield f"not above pooled + offset on unseen people, for any number of shots: {', '.join(not_above)}"
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
    for name, controls in summary["controls"].items():
        yield f"{name}: {', '.join(f'{figure} {value:.3g}' for figure, value in controls[0].items())}"
    seen = list(filter(None, (check.get("wrapper_detectable") for check in summary["checks"])))
    if (
        seen
        and "wrapper" not in summary.get("relaxed", ())
        and not any("wrapper" in c for c in summary["checks"])
    ):
        yield (
            "the wrapping of the responses does not tell the labels: a classifier that reads nothing else and is right "
            f"in {0.5 + max(seen):.3f} would have been found 80 % of the time"
        )


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
        **_DIFFERENCES,
        "pooled + offset": lambda row: _BEATEN[row["above_offset"]],
        "log-loss": bounded("log_loss"),
        "calibration error": field("ece", "{:.3f}"),
        "Brier score": lambda row: number(row.get("brier"), "{:.3f}"),
        "ties": field("ties", "{:,}"),
        "half credit": lambda row: number(row.get("half_credit_accuracy"), "{:.3f}"),
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
    people = [row for row in rows if row["split"] == "unseen"] or rows
    blocks: list[Block] = [
        Table.of(every, rows, columns, words=2, filtered=True),
        _controls(people),
        _costs(rows, "Time and memory of each method"),
    ]
    meanings = Table(
        "What the figures mean", ("figure", "meaning"), list(summary["definitions"].items()), words=2
    )
    opening = [*_pictures(people), Listing("Notes on the data and the methods", list(_notes(summary)))]
    sections = [
        Section("Learning from a few comparisons of a person", [picture]),
        Section("Figures", blocks),
        Section("Definitions", [meanings]),
    ]
    return Chapter(f"{run_name}: methods of personalisation", anchor, study_answer(rows), opening, sections)


def _pictures(rows: Sequence[Row]) -> Iterator[Block]:
    """Yield forest plots of the methods after the most comparisons: accuracy, and the difference from pooled."""
    last = sorted(
        (row for row in _last(rows).values() if row["accuracy"] is not None), key=lambda row: -row["accuracy"]
    )
    estimates = []
    for row in last:
        kind = MODEL if row["p_holm"] is not None else BASELINE
        after = f"after {counted(row['shots'], 'comparison')}" if row["shots"] else ""
        name = row["method"] if kind == MODEL else f"baseline:{row['method']}"
        remark = "; ".join(filter(None, (after, about_figure(name, row, of=row["n"]))))
        estimates.append(Estimate(row["method"], row["accuracy"], row["accuracy_ci95"], kind, remark))
    yield draw_forest("Accuracy of each method", estimates, reference=("chance 0.5", 0.5), what="a method")
    gains = [
        Estimate(row["method"], row["diff_to_pooled"], row["diff_to_pooled_ci95"])
        for row in last
        if row["diff_to_pooled"] is not None and row["p_holm"] is not None
    ]
    if gains:
        title = "Accuracy minus the accuracy of pooled, on the same choices"
        yield draw_forest(title, gains, reference=("pooled", 0.0), figure=signed, what="a method")
