"""Tables of a quickstart for the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from prb_jax.reports.table import Table, answered, gained, interval, percent, signed

if TYPE_CHECKING:
    from rich.console import Group

GENERIC, SEEN, UNSEEN = "generic-test", "test-seen", "test-unseen"
WORDING = "test-unseen-wording"
"""Parts of the generated benchmark: one response plainly worse for everyone; personas that also occur in
the training part, on new topics; personas that do not; and other personas whose wording, and the wording of the
answers to them, never occurs in training."""

KEYS = {
    GENERIC: "generic_accuracy",
    SEEN: "personalised_accuracy_seen",
    UNSEEN: "personalised_accuracy_unseen",
    WORDING: "personalised_accuracy_unseen_wording",
}
"""Names in `summary.json` of the accuracy on each part."""

NAMES = {"user_blind": "user-blind", "persona": "profile in context"}
"""Names of the trained models in tables."""

_HEADINGS = {GENERIC: "generic", SEEN: "seen personas", UNSEEN: "unseen personas", WORDING: "new wording"}

BOUNDED = (SEEN, UNSEEN, WORDING)  # parts with known upper bounds

Bounds = tuple[float, float] | None
_COSTS = ("served", "pairs", "shown", "ms/pair")
_NAME = 15  # characters of a name on one line

_NOTES = (
    "[..] 95 % interval, over personas and over answers that several of them judge",
    "served: share of personas with accuracy above chance; best: bounds of any model",
    "persona x words: a weight for each word and persona, without language",
)
"""Notes under the table on a terminal: one line each in 80 columns."""

_REPORT_NOTES = """\
[..] 95 % interval over personas and, if several of them judge the same answers, over the answers too;
persona x words: a linear model with a weight for each word and each persona of the training part; best, user
unknown: the Bayes accuracy; served: share of the seen and unseen personas with accuracy above chance in these two
parts (the coverage of a run uses all its parts); pairs: different pairs in training; shown: pairs in all
steps of training; ms/pair: time to score one pair in batches on this machine, with tokenisation.
"""


class _Figures(TypedDict):
    generic_accuracy: float
    generic_accuracy_ci95: Bounds
    personalised_accuracy_seen: float
    personalised_accuracy_seen_ci95: Bounds
    personalised_accuracy_unseen: float
    personalised_accuracy_unseen_ci95: Bounds
    personalised_accuracy_unseen_wording: float
    personalised_accuracy_unseen_wording_ci95: Bounds
    served: float | None
    train_pairs: int
    presentations: int
    ms_per_pair: float


_Pairs = TypedDict(
    "_Pairs", {"generic-test": int, "test-seen": int, "test-unseen": int, "test-unseen-wording": int}
)


class _Bounds(TypedDict):
    personalised_accuracy_seen: float
    personalised_accuracy_unseen: float
    personalised_accuracy_unseen_wording: float


class QuickstartSummary(TypedDict):
    """Fields of a quickstart's ``summary.json`` that its table shows."""

    pairs: _Pairs
    models: dict[str, _Figures]
    bounds: dict[str, _Bounds]


def quickstart_table(summary: Mapping[str, Any]) -> Group:
    """Return the summary for the terminal: the answer in one sentence, a table of accuracies, and notes."""
    heads = [
        f"{heading.replace(' ', chr(10))}\n{summary['pairs'][part]:,} pairs"
        for part, heading in _HEADINGS.items()
    ]
    rows, bounds = _rows(summary)
    shown = [_on_two_lines(row[: 2 + len(heads)]) for row in rows]
    table = Table(
        "Accuracy on the generated benchmark",
        ("model", *heads, "served"),
        [*shown, [], *(_on_two_lines([*row, ""]) for row in bounds)],
        words=1 + len(heads),
        narrow=True,
    )
    return answered(table, answer=quickstart_answer(summary), notes=_NOTES)


def quickstart_answer(summary: Mapping[str, Any]) -> str:
    """Return the gain from reading the profile, in one sentence, for personas that no model was trained on."""
    key = KEYS[UNSEEN]
    persona, blind = (summary["models"][name] for name in ("persona", "user_blind"))
    gain = summary["persona_minus_user_blind"][key]
    return (
        f"On personas that neither model has seen, {NAMES['persona']} prefers what the persona wants in "
        f"{percent(persona[key], persona[f'{key}_ci95'])} of pairs, ahead of {NAMES['user_blind']} "
        f"({percent(blind[key], None)}) by {gained(gain['difference'], gain['ci95'])}."
    )


def quickstart_report(summary: Mapping[str, Any], *, folder: str) -> str:
    """Return the summary as a Markdown page with the commands that repeat each step; ``folder`` is the user's name of
    the folder."""
    parts = " ".join(f"personas:{part}" for part in KEYS)
    heads = ["model", *(f"{_HEADINGS[part]} ({summary['pairs'][part]:,} pairs)" for part in KEYS), *_COSTS]
    rows, bounds = _rows(summary)
    lines = ["# Accuracy on the generated benchmark", "", quickstart_answer(summary), ""]
    lines += Table("", heads, [*rows, *([*row, *[""] * len(_COSTS)] for row in bounds)]).markdown(str)
    lines += ["", _REPORT_NOTES.strip(), ""]
    lines += ["Gain from knowing the profile, on the same pairs (paired, 95 % interval as above):", ""]
    for part, key in KEYS.items():
        gain = summary["persona_minus_user_blind"][key]
        lines.append(f"- {_HEADINGS[part]}: {signed(gain['difference'], gain['ci95'])}")
    lines += ["", "Commands of the single steps:", ""]
    for name in NAMES:
        lines.append(f"    prb train {folder}/{name}.py --out {folder}/{name}")
        lines.append(f"    prb evaluate {folder}/{name} --data {parts} --out {folder}/scores/{name}")
    seconds = ", ".join(f"{phase} {value:.0f} s" for phase, value in summary["seconds"].items())
    lines += ["", f"Time of the last command: {seconds}."]
    return "\n".join(lines) + "\n"


def _rows(summary: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the cells of each model (name, accuracies, costs) and of each bound (name, accuracies)."""
    models = []
    for name, figures in summary["models"].items():
        accuracies = (interval(figures[key], figures[f"{key}_ci95"]) for key in KEYS.values())
        served = "-" if figures["served"] is None else f"{figures['served']:.2f}"
        trained = (f"{figures[key]:,}" for key in ("train_pairs", "presentations"))
        shown = NAMES.get(name, name.removeprefix("baseline:"))
        models.append([shown, *accuracies, served, *trained, f"{figures['ms_per_pair']:.3g}"])
    bounds = [
        [name, "", *(f"{figures[KEYS[part]]:.3f}" for part in BOUNDED)]
        for name, figures in summary["bounds"].items()
    ]
    return models, bounds


def _on_two_lines(row: Sequence[str]) -> list[str]:
    """Put intervals, and the end of a long name, on a second line, so five figures fit in 80 columns."""
    name, *cells = row
    if len(name) > _NAME:
        name = "\n".join(name.rsplit(" ", 1))
    parts = (cell.partition(" ") for cell in cells)
    return [name, *(f"{value}\n{bounds.strip('[]')}".rstrip() for value, _, bounds in parts)]
