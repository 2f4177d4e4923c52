"""Records of a build: the inputs that decide it, `summary.json`, and the data cards made from the summary."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.judges.chat import InWords
from prb_jax.building.gates.judged import read_judgements
from prb_jax.building.gating import GatedPairs, figure_in_words
from prb_jax.building.models import EndpointWriter, Writer
from prb_jax.building.product import BenchmarkPart
from prb_jax.building.prompts import prompt_digests
from prb_jax.building.records import Record
from prb_jax.building.settings import BuildSettings, ChatModelSettings
from prb_jax.building.writing import total
from prb_jax.metrics.clusters import OVER_USERS
from prb_jax.records.intake import digest
from prb_jax.records.options import flat_settings
from prb_jax.runs.rows import Row
from prb_jax.scoring.clusters import clusters_of
from prb_jax.seams import get
from prb_jax.version import __version__, computing_versions

_NOT_COMPARED: Final = ("data", "relax", "cache")
_MODELS: Final = ("generator.", "judge.")
_LATER: Final = ("gates.plugins", "gates.margin", "gates.require_sound")
"""Options that earlier builds lack: a build with their defaults can continue an earlier one."""


def build_inputs(
    settings: BuildSettings, records: Sequence[Record], *, writer: Writer, judge: InWords | None
) -> dict[str, Any]:
    """Return everything that decides a build, JSON-ready: records, models, prompts and settings."""
    usual, names = flat_settings(BuildSettings()), settings.gates.plugins
    compared = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flat_settings(settings).items()
        if name not in _NOT_COMPARED and not name.startswith(_MODELS)
        if name not in _LATER or value != usual[name]
    }
    local = not isinstance(writer, EndpointWriter) or (judge is not None and isinstance(judge.model, Policy))
    return {
        "records": {"count": len(records), "sha256": digest(record.comparison for record in records)},
        "generator": dict(writer.identity()),
        "judge": None if judge is None else dict(judge.identity()),
        "prompts": prompt_digests(),
        "settings": compared,
        **({"plugins": {name: get("gates", name).origin for name in names}} if names else {}),
        **({"versions": computing_versions(plain=False)} if local else {}),
    }


def build_summary(
    settings: BuildSettings,
    records: Sequence[Record],
    rows: Sequence[Row],
    gated: GatedPairs,
    parts: Sequence[BenchmarkPart],
    inputs: Mapping[str, Any],
    *,
    folder: Path,
    command: Sequence[str],
) -> dict[str, Any]:
    """Return the contents of `summary.json`, from which the cards are made."""
    clusters = clusters_of([pair.comparison for pair in gated.kept])
    kept = {pair.id for pair in gated.kept}
    judged = read_judgements(folder)
    counted = ("prompt_tokens", "completion_tokens")
    written = [total([row[name] for row in rows]) for name in counted]
    replied = [total([count for row in judged for count in row[name]]) for name in counted]
    asked = {name: sum(row[name] for row in rows) for name in ("tries", "requests")}
    judgements = {
        "tries": sum(sum(row["tries"]) for row in judged),
        "requests": sum(len(row["replies"]) for row in judged),
    }
    return {
        "name": settings.product.name,
        "licence": settings.product.licence,
        "data": Path(settings.data).name if settings.data and Path(settings.data).exists() else settings.data,
        "records": len(records),
        "pairs": len(gated.kept),
        "parts": {part.name: len(part.pairs) for part in parts},
        "canaries": {part.name: part.canary for part in parts},
        "users": len(set(clusters.users) - {None}) if any(clusters.users) else len(kept),
        "users_are": "users" if clusters.over == OVER_USERS else clusters.over,
        "relaxed": list(settings.relax),
        "gates": [result.to_json() for result in gated.results],
        "level": settings.gates.level,
        "margin": settings.gates.margin,
        "redacted": settings.redact,
        "generator": settings.generator.called,
        "judge": settings.judge.called if settings.judge.given else None,
        "aspects_derived": sum(row["aspects_derived"] for row in rows if row["id"] in kept),
        "spent": {
            "generator": _spent(settings.generator, asked, *written),
            "judge": _spent(settings.judge, judgements, *replied),
        },
        "prompts": inputs["prompts"],
        "seed": settings.seed,
        "command": list(command),
    }


def _spent(
    settings: ChatModelSettings, asked: Mapping[str, int], prompts: int | None, replies: int | None
) -> dict[str, Any]:
    """Return a model's requests, tokens and their price in dollars; None for unknown tokens or prices."""
    dollars = None
    if settings.prices is not None and prompts is not None and replies is not None:
        dollars = (prompts * settings.prices[0] + replies * settings.prices[1]) / 1e6
    return {**asked, "prompt_tokens": prompts, "reply_tokens": replies, "dollars": dollars}


def data_card(summary: Mapping[str, Any], part: BenchmarkPart | None) -> str:
    """Return the card in Markdown: of the whole build, or of a part, whose card has a header for the hub."""
    name = summary["name"] + (f" ({part.name} part)" if part else "")
    lines = [
        *(_header(summary, part) if part else ()),
        f"# {_inline(name)}",
        "",
        f"Pairs of answers to people's questions, built by `prb build` of `prb_jax` {__version__}. The chosen answer "
        "follows what the person wanted; the rejected one avoids it, and is meant to be as correct, relevant and "
        "helpful.",
        "",
    ]
    if summary["relaxed"]:
        names = _inline(", ".join(summary["relaxed"]))
        lines += [f"**Relaxed gates: {names}.** These were allowed to fail; read their figures below.", ""]
    if untried := [gate["gate"] for gate in summary["gates"] if gate["verdict"] == "not tried"]:
        lines += [f"**Never tried: {_inline(', '.join(untried))}.** Their models or data were not given.", ""]
    lines += list(_size(summary, part))
    lines += ["", "## Gates", "", *_gates(summary)]
    lines += ["", "## How it was made", "", *_made(summary)]
    if part is not None:
        lines += [
            "",
            "## Canary",
            "",
            "Every record of this part contains this line:",
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
    sizes = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K"}  # the hub's own names
    size = next((name for most, name in sizes.items() if len(part.pairs) < most), "100K<n<1M")
    yield f"size_categories: [{json.dumps(size)}]"
    yield from ("configs:", "- config_name: default", "  data_files:", "  - split: test")
    yield from ('    path: "data/test-*"', "---", "")


def _size(summary: Mapping[str, Any], part: BenchmarkPart | None) -> Iterator[str]:
    counts = ", ".join(f"{summary['parts'][name]:,} {name}" for name in summary["parts"])
    users = f"{summary['users']:,} {summary['users_are']}"
    yield from (f"{summary['pairs']:,} pairs of {users}, of {summary['records']:,} records ({counts}).", "")
    yield (
        "No person, question or answer is in both parts, not even with a few words changed. Aspects and narratives, "
        "which a scored model must not see, are only in the private part."
    )
    if part is not None:
        yield from ("", "    prb evaluate MODEL --data FOLDER --out runs/first    # the folder of this card")


def _gates(summary: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| gate | before | after | pairs dropped | |", "|---|---:|---:|---:|---|")
    for gate in summary["gates"]:
        shown = f"**relaxed** ({gate['verdict']})" if gate["relaxed"] else gate["verdict"]
        before, after = figure_in_words(gate["before"]), figure_in_words(gate["after"])
        yield f"| {gate['gate']} | {before} | {after} | {gate['dropped']:,} | {shown} |"
    yield ""
    for gate in summary["gates"]:
        note = f" ({_inline(gate['after']['note'])})" if gate["after"]["note"] else ""
        yield f"- {gate['gate']}: {_inline(gate['definition'])}{note}"
    yield ""
    level = f"{summary['level']:.3g}"
    yield (
        "Before: figures of the first answers written for both sides of a record; for judges and reward models: "
        f"of pairs that reached them. After: figures of the pairs here. [..]: interval of level {level} over users."
    )
    if leaks := [gate for gate in summary["gates"] if gate["after"]["leak"]]:
        yield from ("", "### Leaks that these gates could detect", "")
        yield "| gate | verdict | not excluded | found 80 % of the time | planted leak |"
        yield "|---|---|---:|---:|---|"
        for gate in leaks:
            leak = gate["after"]["leak"]
            least = "none" if leak["detectable"] is None else f"{leak['detectable']:.3f}"
            row = (gate["gate"], gate["verdict"], f"{leak['excluded']:.3f}", least, _inline(leak["planted"]))
            yield f"| {' | '.join(row)} |"
        yield ""
        yield (
            f"A leak is the distance of the figure beyond 0.5. Sound: it is surely (two one-sided tests at 0.05) below "
            f"{summary['margin']:g}. Cannot tell: no leak was found, but the pairs are too few to exclude one of "
            "that size. Found 80 % of the time: the smallest leak that fails the gate in 80 % of builds of this size."
        )


def _made(summary: Mapping[str, Any]) -> Iterator[str]:
    redacted = "; redacted by scrubadub" if summary["redacted"] else ""
    yield f"- records: {_inline(summary['data'])}{redacted}"
    yield f"- generator: {_inline(summary['generator'])}"
    yield f"- judge: {_inline(summary['judge'] or 'none')}"
    derived = summary["aspects_derived"]
    from_narrative = f"; for {derived:,} pairs derived from the narrative" if derived else ""
    yield f"- aspects: of the records{from_narrative}"
    for who, spent in summary["spent"].items():
        counts = (spent["prompt_tokens"], spent["reply_tokens"])
        tokens = ["unknown" if count is None else f"{count:,}" for count in counts]
        cost = "" if spent["dollars"] is None else f", {spent['dollars']:.2f} dollars"
        yield (
            f"- asked of the {who}: {spent['requests']:,} requests, {tokens[0]} tokens of prompts, {tokens[1]} of "
            f"replies{cost}"
        )
    yield f"- prompts: {_inline(', '.join(f'{name} {digest}' for name, digest in summary['prompts'].items()))}"
    yield f"- seed: {summary['seed']}"
    if summary["command"]:
        command = shlex.join(summary["command"]).replace("\n", " ")
        yield from ("", "This command repeats the build:", "", f"    {command}")


def _inline(text: str) -> str:
    """Escape text for the middle of a line of Markdown: nothing in it becomes markup."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
