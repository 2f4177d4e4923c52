"""A run in parts: jobs that know nothing of each other score a part of the batches each, and their rows are merged.

The batches are those of the whole run, so that every score has the same bytes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from prb_jax.data.writing import write_json, writing
from prb_jax.errors import RunError, quote
from prb_jax.runs.folder import COMPUTED, EVALUATION, SCORES, append_rows, open_run, read_scores
from prb_jax.runs.kind import check_same_inputs

PART: Final = "part.json"
"""In the folder of a part that is finished: the part, and how many rows it has."""

CONTROLS: Final = "controls"


@dataclass(frozen=True)
class Part:
    """The part ``number`` of ``count``, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, indices: Sequence[int]) -> bool:
        """Tell whether a batch belongs to this part: it falls to a part at random, by its first comparison."""
        return crc32(str(indices[0]).encode()) % self.count == self.number - 1


def parse_part(text: str) -> Part:
    """Return the part of a text as "2/7".

    Raises:
      RunError: it says something else.
    """
    if (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)) and int(match[1]) <= int(match[2]):
        return Part(int(match[1]), int(match[2]))
    raise RunError(f"part: expected I/N with 1 <= I <= N, as 2/7, found {quote(text)}")


@dataclass(frozen=True)
class Skip:
    """Tells of a batch's indices that they need no scores here: they have them, or are of another part."""

    finished: Callable[[Sequence[int]], bool]
    part: Part | None

    def __call__(self, indices: Sequence[int]) -> bool:
        return self.finished(indices) or (self.part is not None and not self.part.has(indices))

    def window(self, indices: Sequence[int]) -> bool:
        """As above, of a window of comparisons, which holds batches of all parts."""
        return self.finished(indices)


def finish_part(folder: Path, part: Part, *, rows: int) -> None:
    """Say that all rows of a part are there."""
    write_json(folder / PART, {"part": str(part), "rows": rows})


def merge(parts: Sequence[str | Path], *, out: str | Path) -> Path:
    """Put the rows of all parts of an evaluation into one run folder, which the whole evaluation then finishes.

    `prb merge` does both; from Python call :func:`prb_jax.evaluate` with the same arguments, without `part`, and this
    folder as `out`: nothing is left to score, and every file has the bytes of a run in one piece.

    Args:
      parts: folders of `prb evaluate --part I/N`, or of `prb_jax.evaluate(..., part="I/N")`, in any order.
      out: the run folder; a merge that was killed is repeated.

    Raises:
      RunError: a part is missing, given twice, not finished, or of another run; or `out` cannot be written.
    """
    folders = [Path(folder) for folder in parts]
    records = {folder: EVALUATION.read(folder) for folder in folders}
    places: dict[str, Path] = {}
    for folder, record in records.items():
        part = None if record is None else record["inputs"].get("part")
        if record is None or part is None:
            raise RunError(
                f"{folder}: holds no part of an evaluation: expected folders of prb evaluate --part I/N"
            )
        if not (folder / PART).exists():
            raise RunError(f"{folder}: part {part} is not finished: repeat its command")
        if (other := places.setdefault(part, folder)) is not folder:
            raise RunError(f"{folder}: holds part {part}, as {other} does")
    if not places:
        raise RunError("parts: expected the folders of all parts, found none")
    count = parse_part(next(iter(places))).count
    order = [str(Part(number, count)) for number in range(1, count + 1)]
    if lacking := [part for part in order if part not in places]:
        raise RunError(f"part {lacking[0]} is missing: {len(places)} of {count} parts are given")
    if odd := sorted(places.keys() - set(order)):
        raise RunError(f"{places[odd[0]]}: holds part {odd[0]}, expected parts of {count}")
    target = Path(out)
    _merge([places[part] for part in order], target)
    first = places[order[0]] / CONTROLS
    for name in sorted(control.name for control in first.iterdir()) if first.is_dir() else ():
        _merge([places[part] / CONTROLS / name for part in order], target / CONTROLS / name)
    for part in order:  # judgements, replies: what a scorer keeps beside its rows
        for path in sorted(places[part].glob("judgements.jsonl")):
            with (
                writing(target / path.name),
                (target / path.name).open("ab") as file,
                path.open("rb") as source,
            ):
                shutil.copyfileobj(source, file)
    return target


def _merge(folders: Sequence[Path], out: Path) -> None:
    records = [EVALUATION.read(folder) or {"inputs": {}} for folder in folders]
    whole = [
        {name: value for name, value in record["inputs"].items() if name != "part"} for record in records
    ]
    for folder, inputs in zip(folders[1:], whole[1:], strict=True):
        check_same_inputs(folder, inputs, whole[0])
    notes = {name: value for name, value in records[0].items() if name not in ("kind", "inputs", "sessions")}
    notes["command"] = whole_command(notes.get("command") or [], out)
    session: dict[str, Any] = {
        "merged": [session for record in records for session in record.get("sessions", ())]
    }
    with open_run(out, inputs=whole[0], session=session, notes=notes) as run:
        for folder in folders:
            append_rows(run, read_scores(folder / SCORES).values())
        computed = [path.read_bytes() for folder in folders if (path := folder / COMPUTED).exists()]
        if computed:
            with writing(out / COMPUTED):
                (out / COMPUTED).write_bytes(b"".join(computed))


def whole_command(words: Sequence[str], out: Path) -> list[str]:
    """Return the command of a part as that of the whole run, in another folder."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--part", "--out"):
            next(rest, None)
        elif not word.startswith(("--part=", "--out=")):
            kept.append(word)
    return [*kept, "--out", str(out)] if kept else []
