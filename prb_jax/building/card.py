"""The card of a built benchmark, made from its run: every gate with its figures, what was relaxed, how it was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from prb_jax.building.parts import BenchmarkPart
from prb_jax.version import __version__


def data_card(summary: Mapping[str, Any], *, part: BenchmarkPart | None) -> str:
    """Return the card in Markdown; that of a part has the header that the hub reads.

    Args:
      summary: what `summary.json` says.
      part: that the card lies beside; None for the whole build.
    """
    name = summary["name"] + (f" ({part.name} part)" if part else "")
    lines = [*(_header(summary, part) if part else ()), f"# {_inline(name)}", ""]
    lines += [
        f"Pairs of answers to people's questions, built by `prb build` of `prb_jax` {__version__}. The chosen answer "
        "follows what the person wanted; the rejected one avoids it, and is meant to be as correct, relevant and "
        "helpful.",
        "",
    ]
    if summary["relaxed"]:
        names = ", ".join(summary["relaxed"])
        lines += [
            f"**Relaxed gates: {_inline(names)}.** These were allowed to fail; read their figures below.",
            "",
        ]
    if untried := [gate["gate"] for gate in summary["gates"] if gate["verdict"] == "not tried"]:
        lines += [f"**Never tried: {_inline(', '.join(untried))}.** Nothing was given to try them with.", ""]
    lines += list(_size(summary, part))
    lines += ["", "## Gates", "", *_gates(summary)]
    lines += ["", "## How it was made", "", *_made(summary)]
    if part is not None:
        lines += [
            "",
            "## Canary",
            "",
            "This line stands in every record of this part:",
            "",
            f"    {part.canary}",
        ]
    return "\n".join(lines) + "\n"


def _header(summary: Mapping[str, Any], part: BenchmarkPart) -> Iterator[str]:
    yield "---"
    yield f"pretty_name: {json.dumps(summary['name'])}"
    if summary["licence"]:
        yield f"license: {json.dumps(summary['licence'])}"
    yield 'tags: ["preference", "personalization", "reward-model", "prb_jax"]'
    yield f"size_categories: [{json.dumps(_size_category(len(part.pairs)))}]"
    yield from (
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: test",
        '    path: "data/test-*"',
    )
    yield from ("---", "")


def _size_category(pairs: int) -> str:
    """The hub's own names for sizes."""
    for most, name in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K")):
        if pairs < most:
            return name
    return "100K<n<1M"


def _size(summary: Mapping[str, Any], part: BenchmarkPart | None) -> Iterator[str]:
    counts = ", ".join(f"{summary['parts'][name]:,} {name}" for name in summary["parts"])
    users = f"{summary['users']:,} {summary['users_are']}"
    yield f"{summary['pairs']:,} pairs of {users}, of {summary['records']:,} records ({counts})."
    yield ""
    yield (
        "No person, question or answer is in both parts, not even but for a few words. Aspects and narratives, which a "
        "scored model must not see, are in the private part alone."
    )
    if part is not None:
        yield ""
        yield "    prb evaluate MODEL --data FOLDER --out runs/first    # the folder of this card"


def _gates(summary: Mapping[str, Any]) -> Iterator[str]:
    yield "| gate | before | after | pairs dropped | |"
    yield "|---|---:|---:|---:|---|"
    for gate in summary["gates"]:
        shown = f"**relaxed** ({gate['verdict']})" if gate["relaxed"] else gate["verdict"]
        before, after = _figure(gate["before"]), _figure(gate["after"])
        yield f"| {gate['gate']} | {before} | {after} | {gate['dropped']:,} | {shown} |"
    yield ""
    for gate in summary["gates"]:
        note = f" ({_inline(gate['after']['note'])})" if gate["after"]["note"] else ""
        yield f"- {gate['gate']}: {_inline(gate['definition'])}{note}"
    yield ""
    level = f"{summary['level']:.3g}"
    yield (
        "Before: of the first answers that were written for both sides of a record; of judges and reward models: of "
        f"pairs that reached them. After: of the pairs here. [..]: interval of level {level} over users."
    )
    if leaks := [gate for gate in summary["gates"] if gate["after"]["leak"]]:
        yield from ("", "### What these gates could see", "")
        yield "| gate | leak | not excluded | found 80 % of the time | that is |"
        yield "|---|---|---:|---:|---|"
        for gate in leaks:
            leak = gate["after"]["leak"]
            least = "none" if leak["detectable"] is None else f"{leak['detectable']:.3f}"
            row = (gate["gate"], gate["verdict"], f"{leak['excluded']:.3f}", least, _inline(leak["planted"]))
            yield f"| {' | '.join(row)} |"
        yield ""
        yield (
            f"A leak is how far beyond 0.5 the figure is. Sound: it is surely (two one-sided tests at 0.05) below "
            f"{summary['margin']:g}. Cannot tell: no leak was found, and there are too few pairs to exclude one of "
            "that size. Found 80 % of the time: the smallest leak that fails the gate in 80 % of builds of this size."
        )


def _figure(figure: Mapping[str, Any] | None) -> str:
    if figure is None or figure["value"] is None:
        return "-"
    low_high = figure["interval"]
    interval = "" if low_high is None else f" [{low_high[0]:.3f}..{low_high[1]:.3f}]"
    return f"{figure['value']:.3f}{interval}"


def _made(summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"- records: {_inline(summary['data'])}" + (
        "; redacted by scrubadub" if summary["redacted"] else ""
    )
    yield f"- generator: {_inline(summary['generator'])}"
    yield f"- judge: {_inline(summary['judge'] or 'none')}"
    derived = summary["aspects_derived"]
    yield (
        f"- aspects: of the records; for {derived:,} pairs derived from the narrative"
        if derived
        else ("- aspects: of the records")
    )
    for who in ("generator", "judge"):
        spent = summary["spent"][who]
        tokens = [
            f"{spent[key]:,}" if spent[key] is not None else "unknown"
            for key in ("prompt_tokens", "reply_tokens")
        ]
        cost = "" if spent["dollars"] is None else f", {spent['dollars']:.2f} dollars"
        yield (
            f"- asked of the {who}: {spent['requests']:,} requests, {tokens[0]} tokens of prompts, {tokens[1]} of "
            f"replies{cost}"
        )
    yield f"- prompts: {_inline(', '.join(f'{name} {digest}' for name, digest in summary['prompts'].items()))}"
    yield f"- seed: {summary['seed']}"
    if summary["command"]:
        yield from (
            "",
            "The command that repeats it:",
            "",
            f"    {shlex.join(summary['command'])}".replace("\n", " "),
        )


def _inline(text: str) -> str:
    """Return text for the middle of a line of Markdown: nothing in it is markup."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
