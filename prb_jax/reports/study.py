"""Tables of a study of methods of personalisation: accuracy by shots, differences, controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prb_jax.data.reading import read_json, read_object
from prb_jax.errors import RunError
from prb_jax.reports.blocks import Cell, Chapter, Listing, PageTable, Section, figure_cell
from prb_jax.reports.drawings import draw_shots
from prb_jax.reports.style import NONE, new_table, signed

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

STUDY: Final = "study.json"
RESULTS: Final = "results.json"

_WIDE: Final = 6  # numbers of shots side by side
_PARTS: Final = {
    "unseen": "people on whom nothing was fitted",
    "seen": "held-out comparisons of people that were fitted on",
}


def render_study(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], *, title: str) -> Group:
    """Return the tables of a study.

    Args:
      rows: of ``results.json``.
      summary: of ``study.json``.
      title: above the tables.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="bold")]
    for part, about in _PARTS.items():
        here = [row for row in rows if row["split"] == part]
        if here:
            parts += [_curves(here, f"{part}: {about}"), _differences(here, part), _controls(here, part)]
            if any(row.get("log_loss") is not None for row in here):  # earlier versions did not have it
                parts.insert(-2, _curves(here, f"{part}: log-loss", figure="log_loss"))
    return Group(*parts, _cost_table(rows), Text("\n".join(_notes(summary))))


def render_people(people: Mapping[str, Sequence[int]], shots: Sequence[int]) -> RenderableType:
    """Return the table of ``prb personalise --dry-run``: how many people have k comparisons to be adapted on.

    Args:
      people: of :func:`prb_jax.study.personalise.people_of_study`.
      shots: numbers of comparisons.
    """
    table = new_table(
        "people who have k comparisons to be adapted on", ["", "people", *(f"k={k}" for k in shots)]
    )
    for part, counts in people.items():
        reached = (sum(count >= k for count in counts) for k in shots)
        table.add_row(part, f"{len(counts):,}", *(f"{number:,}" for number in reached))
    table.caption = "; ".join(f"{part}: {_PARTS[part]}" for part in people)
    return table


def render_plan(plan: Mapping[str, Any]) -> RenderableType:
    """Return the table of ``prb personalise --plan``.

    Args:
      plan: of :func:`prb_jax.study.power.plan_study`.
    """
    table = new_table(
        f"bayes minus pooled with {plan['shots']} choices a person, simulated",
        ("people", "choices predicted", "gain in accuracy", "95 % interval, half", "power"),
    )
    for row in plan["rows"]:
        gain = NONE if row["gain"] is None else f"{row['gain']:+.4f}"
        table.add_row(
            f"{row['people']:,}",
            f"{row['choices']:,}",
            gain,
            figure_cell(row["ci95_half"], form="{:.4f}").text,
            figure_cell(row["power"], form="{:.2f}").text,
        )
    ceiling = plan["ceiling"]
    table.caption = (
        f"the data have {plan['people']:,} people; the prior known, {plan['shots']} choices are worth "
        f"{ceiling['choices']:+.4f} over knowing nobody, and the whole person {ceiling['person']:+.4f}; power: chance "
        "that the interval of the gain lies above 0"
    )
    return table


def _notes(summary: Mapping[str, Any]) -> list[str]:
    """What the tables do not say: how many, what was left out, what is not beaten."""
    notes = [f"{summary['users']:,} people, {summary['choices']:,} choices"]
    notes += [f"left out: {count:,} {reason}" for reason, count in summary["excluded"].items() if count]
    if summary["users_with_one_choice"]:
        notes.append(
            f"{summary['users_with_one_choice']:,} people have one choice alone: nothing to adapt on beside it"
        )
    if any(summary["choices_that_tell_a_query"]):
        notes.append(
            f"{max(summary['choices_that_tell_a_query']):,} choices share a response with one to be predicted of the "
            "same person: nobody is adapted on them, and nothing is fitted on them"
        )
    if summary["posts_that_judge_a_candidate"]:
        notes.append(
            f"{summary['posts_that_judge_a_candidate']:,} posts that judge a response of the same person's comparisons "
            "were taken away"
        )
    if "wrapper" in summary.get("relaxed", ()):
        told = ", ".join(f"{check['wrapper_accuracy']:.3f}" for check in summary["checks"])
        notes.append(
            f"relaxed: the wrapping of the responses alone tells the labels with an accuracy of {told}"
        )
    elif seen := [
        check["wrapper_detectable"] for check in summary["checks"] if check.get("wrapper_detectable")
    ]:
        notes.append(
            "the wrapping of the responses does not tell the labels: a classifier that reads nothing else and is right "
            f"in {0.5 + max(seen):.3f} would have been found 80 % of the time"
        )
    notes += [f"{name} was left out: {reason}" for name, reason in summary["left_out_methods"].items()]
    if summary["not_above_offset"]:
        notes.append(
            "not above pooled + offset on unseen people, for any number of shots: "
            + ", ".join(summary["not_above_offset"])
        )
    for name, controls in summary["controls"].items():
        shown = ", ".join(f"{figure} {value:.3g}" for figure, value in controls[0].items())
        notes.append(f"{name}: {shown}")
    return notes


def _curves(rows: Sequence[Mapping[str, Any]], title: str, *, figure: str = "accuracy") -> RenderableType:
    """Accuracy, or another figure, of each method by shots."""
    plain = [row for row in rows if row["control"] is None]
    shots = sorted({row["shots"] for row in plain})[:_WIDE]
    table = new_table(title, ["method", *(f"k={count}" for count in shots)])
    # Studies of an earlier version did not count the people who have k.
    reached = {row["shots"]: row.get("reached") for row in plain}
    table.add_row(
        "people who have k",
        *(figure_cell(reached[count], form="{:,}").text for count in shots),
        end_section=True,
    )
    for name in dict.fromkeys(row["method"] for row in plain):
        found = {row["shots"]: row[figure] for row in plain if row["method"] == name}
        table.add_row(name, *(figure_cell(found[count]).text if count in found else "" for count in shots))
    simulated = [row for row in rows if row["control"] == "simulated"]
    if simulated:
        table.add_section()
    for name in dict.fromkeys(row["method"] for row in simulated):
        values = {row["shots"]: row[figure] for row in simulated if row["method"] == name}
        table.add_row(
            f"{name} (simulated)",
            *(figure_cell(values[count]).text if count in values else "" for count in shots),
        )
    one = max(plain, key=lambda row: row["n"])
    table.caption = (
        f"{figure.replace('_', '-')} after k comparisons of a person; {one['n']:,} choices of "
        f"{one['users']:,} people"
    )
    return table


def _last(
    rows: Sequence[Mapping[str, Any]], name: str, control: str | None = None
) -> Mapping[str, Any] | None:
    named = name if control is None else f"{name}, {control}"
    found = [row for row in rows if row["method"] == named and row["accuracy"] is not None]
    return max(found, key=lambda row: row["shots"]) if found else None


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows if row["control"] is None))


def _differences(rows: Sequence[Mapping[str, Any]], part: str) -> RenderableType:
    """With the largest number of shots: against pooled, and whether pooled + offset is beaten."""
    most = max(row["shots"] for row in rows if row["accuracy"] is not None)
    table = new_table(f"{part}, k={most}", ("method", "minus pooled", "p, Holm", "pooled + offset", "ties"))
    for name in _names(rows):
        row = _last(rows, name)
        if row is None:
            continue
        p = NONE if row["p_holm"] is None else f"{row['p_holm']:.3f}" if row["p_holm"] >= 0.001 else "<0.001"
        above = {None: "", True: "beaten", False: "not beaten"}[row["above_offset"]]
        table.add_row(
            name,
            signed(row["diff_to_pooled"], row["diff_to_pooled_ci95"]).replace("[", r"\["),
            p,
            above,
            f"{row['ties']:,} of {row['n']:,}" if row["ties"] else "0",
        )
    table.caption = r"\[..] 95 % interval of the paired difference, over people"
    return table


def _controls(rows: Sequence[Mapping[str, Any]], part: str) -> RenderableType:
    """The same states in other hands: of nobody, of another person, without the profile."""
    names = [name for name in _names(rows) if _last(rows, name, "shuffled user") is not None]
    table = new_table(f"{part}: controls", ("method", "own user", "no user", "shuffled", "no profile"))
    for name in names:
        found = [
            _last(rows, name),
            *(_last(rows, name, c) for c in ("no user", "shuffled user", "no profile")),
        ]
        table.add_row(name, *(NONE if row is None else f"{row['accuracy']:.3f}" for row in found))
    return table


_COSTS: Final = ("method", "fit", "adapt a person", "bytes of a state", "on disk")


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Time and memory of each method: fitting, adapting a person, a person's state on the device and on disk."""
    found = []
    for name in _names(rows):
        row = _last(rows, name)
        if row is None:
            continue
        disk = row.get("disk_bytes_per_user")
        if row["bytes_per_user"] or row["seconds_fit"]:  # baselines take nothing
            found.append(
                [
                    name,
                    f"{row['seconds_fit']:.1f} s",
                    f"{1e3 * row['seconds_adapt_per_user']:.3g} ms",
                    f"{row['bytes_per_user']:,}",
                    NONE if disk is None else f"{disk:,}",
                ]
            )
    return found


def _cost_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = new_table("time and memory", _COSTS)
    for row in _costs(rows):
        table.add_row(*row)
    table.caption = "adapting with the largest k, all people at once; bytes a person"
    return table


def study_chapter(folder: Path, title: str, name: str) -> Chapter:
    """Return the chapter of a page about a study.

    Args:
      folder: of `prb personalise`.
      title: of the chapter.
      name: by which the page refers to it.

    Raises:
      RunError: the study is not finished, or a file of it is damaged.
    """
    rows = read_json(
        folder / RESULTS, error=RunError, hint="the same `prb personalise` command finishes the study"
    )
    summary = read_object(folder / STUDY, error=RunError)
    table = [
        [
            Cell(row["method"]),
            Cell(row["split"]),
            Cell(str(row["shots"]), row["shots"]),
            figure_cell(row["accuracy"], row["accuracy_ci95"]),
            figure_cell(row["user_accuracy"], row["user_accuracy_ci95"]),
            Cell(signed(row["diff_to_pooled"], row["diff_to_pooled_ci95"]), row["diff_to_pooled"]),
            figure_cell(row["p_holm"], form="{:.2g}"),
            figure_cell(row.get("log_loss"), row.get("log_loss_ci95")),
            Cell(
                signed(row.get("log_loss_diff_to_pooled"), row.get("log_loss_diff_to_pooled_ci95")),
                row.get("log_loss_diff_to_pooled"),
            ),
            figure_cell(row.get("ece")),
            Cell({None: "", True: "beaten", False: "not beaten"}[row["above_offset"]]),
            figure_cell(row["ties"], form="{:,}"),
            figure_cell(row["n"], form="{:,}"),
            figure_cell(row.get("reached"), form="{:,}"),
        ]
        for row in rows
    ]
    heads = (
        "method",
        "people",
        "shots",
        "accuracy",
        "per user",
        "minus pooled",
        "p, Holm",
        "log-loss",
        "log-loss minus pooled",
        "calibration error",
        "pooled + offset",
        "ties",
        "n",
        "people who have k",
    )
    costs = [[Cell(text) for text in row] for row in _costs(rows)]
    meanings = [[Cell(field), Cell(meaning)] for field, meaning in summary["definitions"].items()]
    blocks = [
        draw_shots(rows),
        PageTable("Every method, number of shots and control", heads, table, words=2, filtered=True),
        PageTable("Time and memory of each method", _COSTS, costs),
        Listing(_notes(summary)),
    ]
    sections = [
        Section("Learning from a few comparisons of a person", blocks),
        Section(
            "Definitions", [PageTable("What the figures mean", ("figure", "meaning"), meanings, words=2)]
        ),
    ]
    return Chapter(title, name, sections)
