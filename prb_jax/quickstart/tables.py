"""The figures of a quickstart, for the terminal and as a page to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

GENERIC, SEEN, UNSEEN = "generic-test", "test-seen", "test-unseen"
WORDING = "test-unseen-wording"
"""Parts of the generated benchmark: one response plainly worse for everyone; personas that also occur in
the training part, on new topics; personas that do not; and other ones who, like the answers to them, speak in
sentences that occur nowhere in training."""

KEYS = {
    GENERIC: "generic_accuracy",
    SEEN: "personalised_accuracy_seen",
    UNSEEN: "personalised_accuracy_unseen",
    WORDING: "personalised_accuracy_unseen_wording",
}
"""The accuracy on each part, as it is called in `summary.json`."""

NAMES = {"user_blind": "user-blind", "persona": "profile in context"}
"""What the trained models are called in tables."""

_HEADINGS = {GENERIC: "generic", SEEN: "seen personas", UNSEEN: "unseen personas", WORDING: "new wording"}

BOUNDED = (SEEN, UNSEEN, WORDING)
"""Parts for which it is known what is possible at best."""

_COSTS = ("served", "pairs", "shown", "ms/pair")

_NOTES = """\
[..] 95 % interval over personas and, where several of them judge the same answers, over the answers too;
persona x words: a linear model with a weight for each word and each persona of the training part; best, user
unknown: the Bayes accuracy; served: share of the seen and unseen personas whose accuracy in these two parts is
above chance (the coverage of a run is of all its parts); pairs: different ones trained on; shown: pairs in all
steps of training; ms/pair: scoring one pair in batches on this machine, tokenisation included.
"""


def quickstart_table(summary: Mapping[str, Any]) -> Group:
    """The summary as tables for the terminal: accuracies, and what they cost."""
    from rich.console import Group
    from rich.markup import escape

    from prb_jax.reports.style import new_table

    headings = [
        f"{heading.replace(' ', chr(10))}\n{summary['pairs'][part]:,} pairs"
        for part, heading in _HEADINGS.items()
    ]
    table = new_table("Accuracy on the generated benchmark", ("model", *headings), left=1 + len(headings))
    costs = new_table(headings=("model", *_COSTS))
    costs.caption = escape(_NOTES.strip())
    for name, figures in summary["models"].items():
        model, *cells = _cells(name, figures)
        table.add_row(model, *map(_on_two_lines, cells[: len(headings)]))
        costs.add_row(model, *cells[len(headings) :])
    table.add_section()
    for bound, figures in summary["bounds"].items():
        table.add_row(*_bound_cells(bound, figures))
    return Group(table, costs)


def quickstart_report(summary: Mapping[str, Any], *, folder: str) -> str:
    """The summary as a Markdown page with the commands that repeat each of its steps.

    Args:
      summary: what `summary.json` holds.
      folder: the run folder as the user named it.
    """
    parts = " ".join(f"personas:{part}" for part in KEYS)
    headings = ["model", *(f"{_HEADINGS[part]} ({summary['pairs'][part]:,} pairs)" for part in KEYS)]
    rows = [_cells(name, figures) for name, figures in summary["models"].items()]
    rows += [
        [*_bound_cells(name, figures), *[""] * len(_COSTS)] for name, figures in summary["bounds"].items()
    ]
    lines = [
        "# Accuracy on the generated benchmark",
        "",
        *_markdown([*headings, *_COSTS], rows),
        "",
        _NOTES.strip(),
        "",
        "Knowing the profile gains, on the same pairs (paired, 95 % interval as above):",
        "",
    ]
    for part, key in KEYS.items():
        gain = summary["persona_minus_user_blind"][key]
        low, high = gain["ci95"] or (None, None)
        bounds = "" if low is None else f" [{low:+.3f}..{high:+.3f}]"
        lines.append(f"- {_HEADINGS[part]}: {gain['difference']:+.3f}{bounds}")
    lines += ["", "Each step by itself:", ""]
    for name in NAMES:
        lines.append(f"    prb train {folder}/{name}.py --out {folder}/{name}")
        lines.append(f"    prb evaluate {folder}/{name} --data {parts} --out {folder}/scores/{name}")
    seconds = ", ".join(f"{phase} {value:.0f} s" for phase, value in summary["seconds"].items())
    lines += ["", f"Time of the command that finished it: {seconds}."]
    return "\n".join(lines) + "\n"


def _cells(name: str, figures: Mapping[str, Any]) -> list[str]:
    from prb_jax.reports.tables import interval

    accuracies = [interval(figures[key], figures[f"{key}_ci95"]) for key in KEYS.values()]
    served = "-" if figures["served"] is None else f"{figures['served']:.2f}"
    shown = NAMES.get(name, name.removeprefix("baseline:"))
    trained = [f"{figures[key]:,}" for key in ("train_pairs", "presentations")]
    return [shown, *accuracies, served, *trained, f"{figures['ms_per_pair']:.3g}"]


def _on_two_lines(cell: str) -> str:
    """A figure with its interval below it, so that four of them are whole in 80 columns."""
    value, _, bounds = cell.partition(" ")
    return f"{value}\n{bounds.strip('[]')}".rstrip()


def _bound_cells(name: str, figures: Mapping[str, float]) -> list[str]:
    return [name, "", *(f"{figures[KEYS[part]]:.3f}" for part in BOUNDED)]


def _markdown(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(cells)} |" for cells in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows)
    ]
