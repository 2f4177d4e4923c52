"""`prb bench all`: run each row of a machine's plan as a separate command, and collect the results in `bench.json`.

Measured rows are never measured again; the same command retries rows that failed or had no time. Other
devices or versions are another measurement, which needs another folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prb_jax.errors import PrbError, RunError
from prb_jax.measure.bench.machine import Machine
from prb_jax.measure.bench.models import make_model
from prb_jax.measure.bench.rows import BenchRow, missing_rivals, plan_rows
from prb_jax.measure.bench.suite_tables import BENCH, KIND, MEASURED, write_pages
from prb_jax.models.named_shapes import SHAPES
from prb_jax.records.writing import held_folder, write_json
from prb_jax.runs.kind import as_recorded, command_line
from prb_jax.runs.other_inputs import check_same_inputs

FAILED, UNPROVED, LEFT_OUT = "failed", "no parity", "not measured"
"""Status of rows without figures: an error; not run because scores differ from float32; no time or no rival."""

_LEAST_SECONDS = 30.0


class TimeIsOver(Exception):
    """A command exceeded its time limit."""


def bench_all(
    *,
    out: str | Path,
    minutes: float = 30.0,
    rows: Sequence[str] = (),
    model: str | None = None,
    prefix_tokens: int = 2000,
    response_tokens: int = 130,
    runner: Callable[..., list[dict[str, Any]]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure a machine, and write `bench.json`, `bench.md` and `bench.html` to a folder.

    Args:
      out: Folder; a measurement with the same machine, versions and arguments is continued.
      minutes: Time for starting rows, most important first; rows that would end later are left out.
      rows: Ids of the rows to measure, with the rows that they need; default: all.
      model: Folder or shape in place of the shapes that the memory allows.
      prefix_tokens, response_tokens: Mean lengths of texts.
      runner: Runs a command; default: `run_command`, in a separate process.
      clock: Returns seconds.
      say: Called with a line before and after each measured row.

    Returns:
      Contents of `bench.json`.

    Raises:
      RunError: the folder has something else, another machine or other versions (the message names each difference); a
        row is unknown; or no devices are found.
    """
    folder, run, begun = Path(out), runner or run_command, clock()
    with held_folder(folder):
        (facts_of_machine,) = run(
            ["machine"], environment={}, seconds=600, log=folder / "logs" / "machine.log"
        )
        machine = Machine.from_json(facts_of_machine)
        asked: Any = {"model": model, "prefix_tokens": prefix_tokens, "response_tokens": response_tokens}
        facts = {name: facts_of_machine[name] for name in ("platform", "kind", "count", "versions")}
        inputs = as_recorded(facts | asked)
        bench = KIND.read(folder)
        if bench is None:
            bench = {"kind": KIND.name, "format": 1, "inputs": inputs, "command": command_line()}
            bench |= {"machine": asdict(machine), "sessions": [], "rows": []}
        check_same_inputs(folder, bench["inputs"], inputs, file=BENCH)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        bench["sessions"].append({"started": now, "minutes": minutes})
        missing = missing_rivals(machine)
        plan = plan_rows(Machine.from_json(bench["machine"]), missing=missing, **asked)
        before = {row["id"]: row for row in bench["rows"]}
        wanted = _chosen(plan, rows) | {name for name, row in before.items() if row["status"] == MEASURED}
        done: dict[str, dict[str, Any]] = {}
        try:
            for row in (row for row in plan if row.id in wanted):
                left = 60 * minutes - (clock() - begun)
                done[row.id] = before.get(row.id, {})
                if done[row.id].get("status") != MEASURED:
                    done[row.id] = _measure(row, done, run, folder=folder, left=left, say=say)
                    say(_line(done[row.id]))
                others = [known for name, known in before.items() if name not in done]
                bench["rows"] = [*done.values(), *others]
                write_json(folder / BENCH, bench)
        finally:
            write_pages(folder, bench)
    return bench


def failures(bench: Mapping[str, Any]) -> list[str]:
    """Return the ids of the rows that failed, or that were not run because scores differ from float32."""
    return [row["id"] for row in bench["rows"] if row["status"] in (FAILED, UNPROVED)]


def run_command(
    words: Sequence[str], *, environment: Mapping[str, str], seconds: float, log: Path
) -> list[dict[str, Any]]:
    """Run a command of `prb bench` as a process, and return its JSON results.

    Its output is kept in the file ``log``.

    Raises:
      RunError: the command failed; with its message.
      TimeIsOver: the command took longer than ``seconds``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    results = log.with_suffix(".json")
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "prb_jax", "bench", *words, "--json", str(results)]
    with log.open("wb") as output:
        streams: Any = {"stdout": output, "stderr": subprocess.STDOUT, "env": {**os.environ, **environment}}
        try:
            status = subprocess.run(command, timeout=seconds, check=False, **streams).returncode
        except subprocess.TimeoutExpired:
            raise TimeIsOver from None
    if status or not results.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        message = last.removeprefix("prb: error: ").strip() or "no message"
        raise RunError(f"{message} (exit status {status}; {log})")
    # NaN becomes null: the file of all rows is strict JSON.
    return json.loads(results.read_text(encoding="utf-8"), parse_constant=lambda _: None)


def _chosen(plan: Sequence[BenchRow], names: Iterable[str]) -> set[str]:
    """Return the ids of the requested rows, and of the rows that they need."""
    known = {row.id: row for row in plan}
    names = list(names)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RunError(f"--rows: no row {', '.join(unknown)} on this machine; expected {', '.join(known)}")
    rows = [known[name] for name in names] or plan
    return {name for row in rows for name in (row.id, row.needs) if name is not None}


def _measure(
    row: BenchRow,
    done: Mapping[str, Mapping[str, Any]],
    run: Callable[..., Any],
    *,
    folder: Path,
    left: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run a row, and return its record for `bench.json`."""
    made = row.weights is not None and row.model in SHAPES
    model = str(folder / "models" / f"{row.model}-{row.weights}") if made else row.model
    words = row.words(model)
    record = {name: getattr(row, name) for name in ("id", "verb", "model", "flags", "rival", "absent")}
    record |= {"command": row.command(words), "result": None}
    if row.needs is not None and done[row.needs]["status"] != MEASURED:
        reason = f"{row.needs}: {done[row.needs]['message']}"
        broken = done[row.needs]["status"] in (FAILED, UNPROVED)
        return record | {"status": UNPROVED if broken else LEFT_OUT, "message": reason}
    if row.only_beside and row.absent:
        return record | {"status": LEFT_OUT, "message": row.absent}
    if row.seconds > left:
        text = f"it takes about {row.seconds:,.0f} s, but only {max(0.0, left):,.0f} s of --minutes were left"
        return record | {"status": LEFT_OUT, "message": text}
    say(f"{row.id}: about {row.seconds:,.0f} s ...")
    start = time.monotonic()
    options: dict[str, Any] = {"environment": row.environment, "log": folder / "logs" / f"{row.id}.log"}
    try:
        if made:
            make_model(row.model, Path(model), policy=row.weights == "policy")
        try:
            (result,) = run(words, seconds=max(left, _LEAST_SECONDS), **options)
        except RunError as error:
            if row.rival is None or row.only_beside:
                raise
            record["absent"] = f"{row.rival} failed: {error}"
            words = row.words(model, rival=False)
            record["command"] = row.command(words)
            left -= time.monotonic() - start
            (result,) = run(words, seconds=max(left, _LEAST_SECONDS), **options)
    except TimeIsOver:
        text = f"stopped after {time.monotonic() - start:,.0f} s, at the end of --minutes"
        return record | {"status": LEFT_OUT, "message": text}
    except PrbError as error:
        return record | {"status": FAILED, "message": str(error)}
    record |= {"status": MEASURED, "message": "", "result": result, "seconds": time.monotonic() - start}
    if row.verb == "parity" and not result["agrees"]:
        differences = {name: result.get(f"{name}_difference") for name in ("rms", "loss", "against")}
        shown = ", ".join(f"{name} {value:.1e}" for name, value in differences.items() if value is not None)
        text = f"scores differ from float32: {shown or 'no number'}; tolerance {result['tolerance']}"
        record |= {"status": FAILED, "message": text}
    return record


def _line(row: Mapping[str, Any]) -> str:
    if row["status"] != MEASURED:
        return f"{row['id']}: {row['status']}: {row['message']}"
    return f"{row['id']}: measured in {row['seconds']:,.0f} s"
