"""Merge the parts of a run: copy all their rows to one folder; repeating the command there finishes the whole run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from prb_jax.errors import RunError, quote
from prb_jax.records.digests import check_digests
from prb_jax.records.files import bounded_lines
from prb_jax.records.reading import parse_json, read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import held_folder, whole_file, write_json, writing
from prb_jax.runs.evaluation import COMPUTED
from prb_jax.runs.kind import RUN, RunKind, RunRecord
from prb_jax.runs.other_inputs import check_same_inputs
from prb_jax.runs.parts import PART, Part, PartFile, parse_part

_KEYS = ("id", "sample", "judge")
"""Fields that identify the rows of a file; rows need not have all of them."""

_SUFFIXES = (".jsonl", ".npy", ".cut")  # suffixes of files of rows


def merge(parts: Sequence[str | Path], *, out: str | Path) -> Path:
    """Copy the rows of all parts of a run to one folder, in which the whole run can then be finished.

    Merging opens and runs nothing that the records of the parts name. To finish the run, repeat the command or the
    call of the parts, e.g. :func:`prb_jax.evaluate`, with the same arguments, without `part`, and with this folder as
    `out`. Nothing is left to compute, and every file has the same bytes as in an undivided run.

    Args:
      parts: Folders of `prb evaluate`, `judge`, `sample` or `features` with `--part I/N`, in any order.
      out: Run folder; a killed merge can be repeated.

    Raises:
      RunError: a part is missing, given twice, unfinished, lacks rows, is damaged, or belongs to another run; or
        `out` cannot be written. A new folder is removed after an error.
    """
    places: dict[str, Path] = {}
    for folder in map(Path, parts):
        record = read_object(folder / RUN, error=RunError) if (folder / RUN).is_file() else {"inputs": {}}
        check_schema(record, _PartRun, where=str(folder / RUN), error=RunError)
        part = record["inputs"].get("part")
        if not isinstance(part, str):
            raise RunError(f"{folder}: not a part of a run: expected folders of a command with --part I/N")
        if not (folder / PART).exists():
            raise RunError(f"{folder}: part {part} is not finished: repeat its command")
        if (other := places.setdefault(part, folder)) is not folder:
            raise RunError(f"{folder}: holds part {part}, but so does {other}; expected each part once")
    if not places:
        raise RunError("parts: expected the folders of all parts, found none")
    count = parse_part(next(iter(places))).count
    order = [str(Part(number, count)) for number in range(1, count + 1)]
    if lacking := [part for part in order if part not in places]:
        raise RunError(f"part {lacking[0]} is missing: {len(places)} of {count} parts are given")
    if odd := sorted(places.keys() - set(order)):
        raise RunError(f"{places[odd[0]]}: holds part {odd[0]}, expected parts of {count}")
    folders, target = [places[part] for part in order], Path(out)
    said = [_read_part(folder) for folder in folders]
    total = said[0].get("rows_of_all")
    for folder, part in zip(folders, said, strict=True):
        if part.get("rows_of_all") != total:
            raise RunError(
                f"{folder}: is a part of {part.get('rows_of_all')} rows, but {folders[0]} of {total}"
            )
    if total is not None and (found := sum(part["rows"] for part in said)) != total:
        raise RunError(f"{found:,} of {total:,} rows are in the parts: repeat the command of each part")
    names = list(dict.fromkeys(name for part in said for name in part["files"]))
    controls = sorted(path.parent.relative_to(folders[0]) for path in folders[0].glob(f"*/*/{RUN}"))
    is_new = not target.exists()
    try:
        for control in controls:
            _merge([folder / control for folder in folders], target / control, names)
        _merge(folders, target, names)
    except BaseException:
        if is_new:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return target


class _PartRun(TypedDict):
    kind: NotRequired[str]
    inputs: dict[str, Any]
    command: NotRequired[list[str]]
    sessions: NotRequired[list[dict[str, Any]]]


def _read_part(folder: Path) -> PartFile:
    """Return ``part.json`` of a finished part, after verifying the part's files."""
    path = folder / PART
    part = read_object(path, error=RunError)
    check_schema(part, PartFile, where=str(path), error=RunError)
    for name in part["files"]:
        if "/" in name or not name.endswith(_SUFFIXES):
            expected = f"expected names of row files ({', '.join(_SUFFIXES)}) in this folder"
            raise RunError(f"{path}: files: {expected}, found {quote(name)}")
    check_digests(folder, part.get("digests", {}), record=path, error=RunError)
    rows = folder / part["files"][0] if part["files"] else None
    if rows is not None and rows.suffix == ".jsonl":
        found = sum(1 for _ in _joined([rows])) if rows.exists() else 0
        if found != part["rows"]:
            raise RunError(
                f"{rows}: part {part['part']} has {found:,} rows, expected {part['rows']:,}: repeat its command"
            )
    return cast(PartFile, part)


def _merge(folders: Sequence[Path], out: Path, names: Sequence[str]) -> None:
    records = [read_object(folder / RUN, error=RunError) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        check_schema(record, RunRecord, where=str(folder / RUN), error=RunError)
    whole = [
        {name: value for name, value in record["inputs"].items() if name != "part"} for record in records
    ]
    for folder, record, inputs in zip(folders, records, whole, strict=True):
        if record["kind"] != records[0]["kind"]:
            raise RunError(
                f"{folder}: holds {record['kind']}, expected {records[0]['kind']} as in {folders[0]}"
            )
        check_same_inputs(folder, inputs, whole[0])
    command = records[0].get("command") or []
    kind = RunKind(name=records[0]["kind"], command=" ".join(command[:2]) or "prb", others=tuple(names))
    merged: dict[str, Any] = {
        **records[0],
        "inputs": whole[0],
        "command": whole_command(command, out),
        "sessions": [{"merged": [session for record in records for session in record.get("sessions", ())]}],
    }
    with held_folder(out):
        if (known := kind.read(out)) is not None:
            check_same_inputs(out, known["inputs"], whole[0])
            if not any("merged" in session for session in known.get("sessions", ())):
                raise RunError(f"{out} holds this run, but not merged from parts; choose another --out")
            if not known.get("merging"):
                return
        write_json(out / RUN, {**merged, "merging": True})
        for name in names:
            sources = [folder / name for folder in folders if (folder / name).is_file()]
            if sources:
                with writing(out / name), whole_file(out / name) as file:
                    file.writelines(_joined(sources))
        write_json(out / RUN, merged)


def _joined(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the rows of some files, each once; for other kinds of files, the bytes of all."""
    known: set[tuple[str, ...]] = set()
    for path in files:
        if path.suffix != ".jsonl" or path.name == COMPUTED:
            yield path.read_bytes()
            continue
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file, path, error=RunError), start=1):
                row = parse_json(line, where=f"{path}:{number}: not a row", error=RunError)
                if not isinstance(row, dict):
                    raise RunError(f"{path}:{number}: not a row: expected an object, found {quote(row)}")
                key = tuple(str(row.get(name)) for name in _KEYS)
                if key not in known:
                    yield line
                known.add(key)


def whole_command(words: Sequence[str], out: Path) -> list[str]:
    """Return the command of the whole run, in folder ``out``, from the command of a part."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--part", "--out"):
            next(rest, None)
        elif not word.startswith(("--part=", "--out=")):
            kept.append(word)
    return [*kept, "--out", str(out)] if kept else []
