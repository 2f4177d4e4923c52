"""`prb build`: build a personalised benchmark from people's own wishes; a killed build can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypedDict

from prb_jax.building.card import build_inputs, build_summary, data_card
from prb_jax.building.gates.gate import Pair
from prb_jax.building.gating import run_gates
from prb_jax.building.models import Writer, open_judge, open_writer
from prb_jax.building.product import split_parts, write_product
from prb_jax.building.prompts import prompts_digest
from prb_jax.building.records import Record, load_redactor, read_records, redact
from prb_jax.building.settings import BuildSettings, load_build_settings
from prb_jax.building.writing import WrittenLine, lacking, match_pairs, read_candidates, write_rows
from prb_jax.errors import RunError, listed, quote
from prb_jax.platform.extras import need_extra
from prb_jax.records.reading import read_object
from prb_jax.records.writing import write_json
from prb_jax.runs.kind import SUMMARY, RunKind, RunResult
from prb_jax.runs.progress import Count, show_progress
from prb_jax.runs.rows import Row, RowFile, RowKind
from prb_jax.scoring.remote.endpoint import REPLIES, NoReplyError

ROWS: Final = "rows.jsonl"
FAILURES: Final = "failures.jsonl"
GATES_FILE: Final = "gate_figures.json"
_ROWS: Final = RowKind(ROWS, "a build", key=itemgetter("id"), schema=WrittenLine)


class _FailureLine(TypedDict):
    id: str
    at: str
    error: str


_FAILURES: Final = RowKind(FAILURES, "failures", key=itemgetter("id", "at"), schema=_FailureLine)
RUNS: Final = RunKind(name="prb_jax build", command="prb build", rows=_ROWS)


class Build(RunResult):
    """A folder, and its `summary.json`: counts, every gate with its figures, and the costs."""


def build(
    config: Any,
    *,
    out: str | Path,
    overrides: Sequence[str] = (),
    relax: Sequence[str] = (),
    progress: bool = True,
) -> Build:
    """Build a personalised benchmark: write pairs, pass them through the gates, and write the pairs that remain.

    The same call continues a killed build, and ends with the same bytes. Records for which an endpoint failed are
    noted in ``failures.jsonl``; the next call writes them.

    Args:
      config: Path of a config file, a ConfigDict, a mapping, or :class:`prb_jax.building.settings.BuildSettings`.
      out: Folder of the build.
      overrides: Settings as `key=value` with dotted keys.
      relax: Gates that may fail, in addition to the config's.
      progress: If True, show progress on standard error.

    Raises:
      DataError: a record is not usable.
      RunError: settings, folder or endpoint are not usable; records have no answer; a gate failed and is not relaxed.
        Everything written so far is kept.
      CheckpointError, MeshError: a model on this machine cannot be loaded.
    """
    settings = load_build_settings(config, overrides, relax=relax)
    need_extra("build", "prb build")
    folder = RUNS.check(out)
    redactor = load_redactor() if settings.redact else None
    records = read_records(settings)
    if redactor is not None:
        records = [redact(record, redactor) for record in records]
    cache = folder / REPLIES if settings.cache is None else Path(settings.cache)
    writer = open_writer(settings.generator, cache=cache)
    judge = open_judge(settings.judge, cache=cache) if settings.judge.given else None
    inputs = build_inputs(settings, records, writer=writer, judge=judge)
    session = {"started": datetime.now(UTC).isoformat(timespec="seconds"), "relax": list(settings.relax)}
    with RUNS.open(folder, inputs, notes={"data": settings.data}, session=session) as run:
        done = (folder / SUMMARY).exists()
        relaxed = sorted(
            {name for session in run.record.get("sessions", ()) for name in session.get("relax", ())}
        )
        if done:
            if further := sorted(set(settings.relax) - set(relaxed)):
                raise RunError(
                    f"{folder}: the build was finished without relaxing {', '.join(further)}: remove --relax, or "
                    "choose another folder with --out"
                )
            return Build(folder, read_object(folder / SUMMARY, error=RunError))
        settings = replace(settings, relax=tuple(relaxed))
        rows = _write_all(records, writer, settings, run.file, progress=progress)
        del writer  # frees the memory of a local model for the judge
        first, best, none = _pairs(records, rows, settings, inputs)
        gating: Any = {"settings": settings, "judge": judge, "folder": folder, "progress": progress}
        gated = run_gates(first, best, records=len(records), **gating)
        results = [result.to_json() for result in gated.results]
        write_json(folder / GATES_FILE, {"gates": results, "relaxed": relaxed})
        gated.check()
        gated.warn()
        if not gated.kept:
            raise RunError(f"{folder}: no pair is left of {len(records):,} records; {GATES_FILE} has reasons")
        product, command = settings.product, run.record.get("command") or []
        if command:  # it must repeat the build: the first command, with the gates that were relaxed later
            later = sorted(set(relaxed) - set(run.record["sessions"][0].get("relax", ())))
            command = [*command, *(word for name in later for word in ("--relax", name))]
        parts = split_parts(
            gated.kept, name=product.name, private_share=product.private_share, seed=settings.seed
        )
        summary = build_summary(settings, records, rows, gated, parts, inputs, folder=folder, command=command)
        reasons = {name: ("generator", reason) for name, reason in none.items()} | gated.dropped
        dropped = [
            {"id": record.id, "gate": reasons[record.id][0], "reason": reasons[record.id][1]}
            for record in records
            if record.id in reasons
        ]
        write_product(
            folder,
            pairs=gated.kept,
            parts=parts,
            dropped=dropped,
            formats=product.formats,
            card=partial(data_card, summary),
        )
        run.finish(summary)
    return Build(folder, summary)


def _write_all(
    records: Sequence[Record], writer: Writer, settings: BuildSettings, file: RowFile[Row], *, progress: bool
) -> Sequence[Row]:
    """Write the missing rows, some records at a time. Raise RunError for records without an answer, or early if the
    generator gives no pair for the first records."""
    together, folder = settings.writing.together, file.path.parent
    count = Count(len(records), len(file.rows), unit="records")
    with show_progress("build", count, enabled=progress) as display:
        failures: dict[str, str] = {}
        for start in range(0, len(records), together):
            unit = records[start : start + together]
            new = [record for record in unit if record.id not in file.rows]
            if new:
                written = write_rows(unit, writer, settings)
                file.append(row for row in written.values() if not isinstance(row, NoReplyError))
                lost = {name: str(error) for name, error in written.items() if name not in file.rows}
                if lost:
                    now = datetime.now(UTC).isoformat()
                    with _FAILURES.open(folder) as noted:
                        noted.append({"id": name, "at": now, "error": error} for name, error in lost.items())
                failures |= lost
                display.advance(len(new) - len(lost))
                if len(lost) == len(unit):
                    break  # no answer at all: further requests would fail too
            if start == 0:
                pairs = [(record, file.rows[record.id]) for record in unit if record.id in file.rows]
                faults = [
                    row["over"] or lacking(read_candidates(row, record, settings)) for record, row in pairs
                ]
                if faults and all(faults):
                    named = listed(sorted(set(filter(None, faults))))
                    raise RunError(
                        f"the generator gave no pair for any of the first {len(faults)} records: {named}; {ROWS} has "
                        "its replies"
                    )
        if failures:
            name, error = next(iter(failures.items()))
            raise RunError(
                f"{len(failures):,} of {len(records):,} records have no answer from the endpoint, first {quote(name)}: "
                f"{error}. {len(file.rows):,} are written and kept; {folder / FAILURES} lists the others, and the same "
                "command requests them again"
            )
        return file.finish([record.id for record in records])


def _pairs(
    records: Sequence[Record], rows: Sequence[Row], settings: BuildSettings, inputs: Mapping[str, Any]
) -> tuple[list[Pair], list[Pair], dict[str, str]]:
    """Return the first answers of both sides, the best-matched pairs, and the reason for each record without a pair."""
    candidates = [read_candidates(row, record, settings) for record, row in zip(records, rows, strict=True)]
    generator = hashlib.sha256(json.dumps(inputs["generator"], sort_keys=True).encode()).hexdigest()[:16]
    first, pairs, none = [], [], dict[str, str]()
    for record, row, sides, best in zip(records, rows, candidates, match_pairs(candidates), strict=True):
        early = [side[0] for side in sides.values() if side]
        if len(early) == 2 and all(candidate.text for candidate in early):
            comparison = record.pair(early[0].text, early[1].text, row["aspects"])
            first.append(Pair(comparison, (early[0].finish, early[1].finish)))
        if best is None:
            none[record.id] = row["over"] or lacking(sides) or ""
            continue
        chosen, rejected = best
        provenance = {
            "generator": inputs["generator"]["name"],
            "generator_digest": generator,
            "prompts": prompts_digest(),
            "seeds": {"chosen": chosen.seed, "rejected": rejected.seed},
            "candidates": {side: len(written) for side, written in sides.items()},
            "aspects_derived": row["aspects_derived"],
            **{name: row[name] for name in ("requests", "tries", "prompt_tokens", "completion_tokens")},
        }
        comparison = record.pair(chosen.text, rejected.text, row["aspects"])
        pairs.append(Pair(comparison, (chosen.finish, rejected.finish), provenance))
    return first, pairs, none
