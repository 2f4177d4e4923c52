"""Output of `prb bench all` and `prb bench compare`: a page, a table in Markdown, ratios of two machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from prb_jax.errors import RunError
from prb_jax.measure.bench.machine import Machine
from prb_jax.platform.processes.agreement import differences
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import write_file
from prb_jax.reports.page import Chapter, Preformatted, Section, render_page
from prb_jax.reports.table import NONE, Cell, Table
from prb_jax.runs.kind import RunKind

BENCH = "bench.json"
KIND = RunKind("prb_jax bench", "prb bench all", file=BENCH)
MEASURED = "measured"  # status of a row with figures

_HEADS = ("row", "model", "dtype, attention", "rate", "of the peak", "beside", "ratio", "memory")
_SECONDS = ("rollout_seconds", "update_seconds")


class _Result(TypedDict, total=False):
    pairs_per_second: float | None
    tokens_per_second: float | None
    scores_per_second: float | None
    rollout_seconds: float
    update_seconds: float


class _Row(TypedDict):
    id: str
    verb: str
    model: str
    flags: dict[str, Any]
    status: str
    result: _Result | None


class _Machine(TypedDict):
    kind: str


class _Bench(TypedDict):
    """Fields of ``bench.json`` that `prb bench compare` reads."""

    kind: Literal["prb_jax bench"]
    inputs: dict[str, Any]
    machine: _Machine
    rows: list[_Row]


@dataclass(frozen=True)
class BenchComparison:
    """Two machines, row by row."""

    names: tuple[str, str]
    # (id, unit, rate of the first, rate of the second), both measured in the same way
    rows: Sequence[tuple[str, str, float, float]]
    refused: Mapping[str, str]  # by id, the reason why rates are not compared
    # other differences between the two, e.g. versions, by name, with both values
    differing: Mapping[str, tuple[str, str]]

    def __rich__(self) -> Any:
        """The table of ratios."""
        rows = [
            (name, f"{first:,.3g} {unit}", f"{second:,.3g} {unit}", f"{second / first:.2f}x")
            for name, unit, first, second in self.rows
        ]
        return Table("second / first", ["row", *self.names, "ratio"], rows)


def rate(row: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the speed of a row of `bench.json` (more is faster) and its unit; None if it has no speed."""
    result = row["result"] or {}
    if row["verb"] == "ppo":
        seconds = sum(result.get(name, 0.0) for name in _SECONDS)
        return (60 / seconds if seconds else None), "steps/min"
    key, unit = {
        "score": ("pairs_per_second", "comparisons/s"),
        "train": ("pairs_per_second", "pairs/s"),
        "sample": ("tokens_per_second", "tokens/s"),
        "serve": ("scores_per_second", "scores/s"),
    }.get(row["verb"], ("", ""))
    return result.get(key), unit


def compare_benches(first: str | Path, second: str | Path) -> BenchComparison:
    """Compare the measurements of two machines, from files of `prb bench all` or their folders.

    Raises:
      RunError: one of them is not a file of `prb bench all`, or no row is comparable.
    """
    benches = [_read(first), _read(second)]
    sides = [{row["id"]: row for row in bench["rows"]} for bench in benches]
    rows, refused = [], {}
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        both = [side.get(name) for side in sides]
        missing = [str(place) for place, row in zip((first, second), both, strict=True) if row is None]
        if missing:
            refused[name] = f"no such row in {missing[0]}"
            continue
        before, after = (row or {} for row in both)
        changed = differences(_shape(before), _shape(after))
        (old, unit), (new, _) = rate(before), rate(after)
        if changed:
            refused[name] = "; ".join(f"{key}: {a} -> {b}" for key, (a, b) in changed.items())
        elif {before["status"], after["status"]} != {MEASURED}:
            refused[name] = f"{before['status']} -> {after['status']}"
        elif old and new:
            rows.append((name, unit, old, new))
    if not rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise RunError(f"{first} and {second} have no row to compare: {reasons or 'no row was measured'}")
    names = tuple(str(bench["machine"]["kind"]) for bench in benches)
    facts = [{key: value for key, value in bench["inputs"].items() if key != "model"} for bench in benches]
    return BenchComparison((names[0], names[1]), rows, refused, differences(*facts))


def write_pages(folder: Path, bench: Mapping[str, Any]) -> None:
    """Write `bench.md` and `bench.html`; raise RunError if they cannot be written."""
    page = render_page([_chapter(bench)], title="prb bench all")
    write_file(folder / "bench.md", _markdown(bench).encode())
    write_file(folder / "bench.html", page.encode())


def _read(place: str | Path) -> dict[str, Any]:
    path = Path(place)
    path = path / BENCH if path.is_dir() else path
    bench = read_object(path, error=RunError)
    check_schema(bench, _Bench, where=f"{path}: expected a file of `prb bench all`", error=RunError)
    return bench


def _shape(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that decide how much a row computes, without the number of rounds."""
    flags = {key: value for key, value in row["flags"].items() if key != "rounds"}
    return {"model": Path(row["model"]).name, **flags}


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of :data:`_HEADS`."""
    result, (speed, unit) = row["result"] or {}, rate(row)
    if row["verb"] == "parity" and result:
        agrees = "as float32" if result["agrees"] else "NOT as float32"
        text = f"{agrees}: {result['rms_difference']:.1e} of {result['tolerance']:.1e}"
    elif speed is None:
        text = f"{row['status']}: {row['message']}"
    else:
        text = f"{speed:,.3g} {unit}"
    share, memory = result.get("peak_share"), result.get("peak_memory_bytes")
    ratio = result.get("speedup")
    beside = row["absent"] or row["rival"] or NONE
    if row["verb"] == "serve" and speed and result.get("offline_per_second"):
        beside, ratio = "prb evaluate", speed / result["offline_per_second"]
    flags = row["flags"]
    return [
        row["id"],
        Path(row["model"]).name,
        f"{flags.get('dtype')}, {result.get('attention') or flags.get('attention', 'auto')}",
        text,
        NONE if share is None else f"{share:.0%}",
        beside,
        NONE if ratio is None else f"{ratio:.2f}x",
        NONE if memory is None else f"{memory / 2**30:.2f} GiB of the {result.get('peak_memory_of')}",
    ]


def _facts(bench: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = Machine.from_json(bench["machine"])
    devices = f"{machine.count} x {machine.kind} ({machine.platform}), {machine.cores} CPU cores"
    return [("devices", devices), *machine.words.items()]


def _markdown(bench: Mapping[str, Any]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    lines = [f"- {name}: {value}" for name, value in _facts(bench)]
    lines += ["", line(_HEADS), line(["---"] * len(_HEADS)), *(line(_cells(row)) for row in bench["rows"])]
    lines += ["", *(f"- {row['id']}: `{row['command']}`" for row in bench["rows"])]
    return "\n".join(lines) + "\n"


def _answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many rows were measured, and which is nearest to the peak of the machine."""
    measured = sum(row["status"] == MEASURED for row in rows)
    shares = {row["id"]: (row["result"] or {}).get("peak_share") or 0.0 for row in rows}
    best = max(shares, key=shares.__getitem__)
    nearest = (
        f" {best} reaches {shares[best]:.0%} of the machine's matrix peak, the most." if shares[best] else ""
    )
    return f"{measured} of {len(rows)} rows were measured.{nearest}"


def _chapter(bench: Mapping[str, Any]) -> Chapter:
    facts = [[Cell(name), Cell(value)] for name, value in _facts(bench)]
    rows = []
    for row in bench["rows"]:
        numbers = (None, None, None, rate(row)[0], *[None] * 4)
        rows.append([Cell(*pair) for pair in zip(_cells(row), numbers, strict=True)])
    note = (
        "Scores were compared with float32 first; a row that failed this has no speed. Ratio: speed relative to the "
        "column beside it. The peak share counts padding as waste. Memory: peak use of one device or of "
        "the process, including the library beside it."
    )
    commands = "\n".join(f"{row['id']}: {row['command']}" for row in bench["rows"])
    return Chapter(
        str(bench["machine"]["kind"]),
        "machine",
        _answer(bench["rows"]),
        [],
        [
            Section("The machine", [Table("Devices", ("", ""), facts, words=2)]),
            Section("Rows", [Table("What was measured", _HEADS, rows, words=3, note=note)]),
            Section("Commands", [Preformatted("The command of each row", commands)]),
        ],
    )
