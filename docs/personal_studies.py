"""The studies of docs/personal_studies.md: features, methods and tables of five data sets, one command each.

    python docs/personal_studies.py ENCODER DATA OUT [NAME...]

ENCODER is MiniLM (all-MiniLM-L6-v2) or another encoder of texts, DATA the folder of `gd6.jsonl.gz`,
`polis_en.jsonl.gz`, `ukpconvarg1.jsonl.gz` and `prefeval.jsonl.gz`. Every command is printed as it would be typed; the
same call continues what was killed. The tables are written to OUT/NAME.md; with `--table` in the place of ENCODER they
alone are written.
"""

import gzip
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.cli import main

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study of one data set.

    Attributes:
      data: the name of the file; None for the generated personas.
      rows: what is used of each row of the file.
      methods: of `prb personalise`.
      shots, seeds: likewise.
      features: options of `prb features`.
      settings: of methods, as of `--set`.
    """

    data: str | None
    rows: Callable[[Row], Row]
    methods: str
    shots: str = "0,1,2,4,8,16"
    seeds: int = 5
    features: str = "--responses-alone"
    settings: str = ""


def _whole(row: Row) -> Row:
    return row


def _kind(row: Row) -> Row:
    return {**row, "subset": row["meta"]["kind"]}


def _majority(row: Row) -> Row:
    agree, against = row["meta"]["others_for"], row["meta"]["others_against"]
    side = (
        "with the majority"
        if agree > against
        else "against the majority"
        if agree < against
        else "no majority"
    )
    posts = [{**post, "text": post["text"].split("Reason given:")[0].strip()} for post in row["profile"]]
    return {**row, "subset": side, "profile": posts}


CHEAP = "pooled,offset,nearest,attention"
STUDIES = {
    "gd6": Study("gd6", _whole, f"{CHEAP},lore_free", features=""),
    "polis_en": Study(
        "polis_en",
        _kind,
        "pooled,offset,nearest",
        shots="0,2,8",
        seeds=2,
        settings="pooled.l2=0.01,1 offset.l2=1 offset.spread=1,3 nearest.neighbours=200 nearest.shrink=1,8",
    ),
    "ukpconvarg1": Study("ukpconvarg1", _majority, CHEAP, shots="0,1,2,4", seeds=2),
    "prefeval": Study("prefeval", _whole, "pooled,offset,attention", shots="0,1,2", seeds=2, features=""),
    "personas": Study(None, _whole, "pooled,offset,attention,lore_free", seeds=5),
}
PERSONAS = ("train", "test-seen", "test-unseen", "test-unseen-wording")


def run(command: str) -> None:
    """Run one command of `prb`, or end."""
    print(f"\n$ prb {command}", flush=True)
    status = main([*shlex.split(command), "--no-progress"])
    if status:
        sys.exit(status)


def prepare(name: str, data: Path, out: Path) -> Path:
    """Write the rows of a study as a file, and return its path; a file that is there already is kept."""
    study, path = STUDIES[name], out / f"{name}.jsonl"
    if study.rows is _whole and study.data is not None:
        return data / f"{study.data}.jsonl.gz"
    if not path.exists():
        rows = _personas() if study.data is None else _read(data / f"{study.data}.jsonl.gz")
        path.write_text("".join(json.dumps(study.rows(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def _read(path: Path) -> Iterable[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _personas() -> Iterable[Row]:
    """Every fourth comparison of the training part, and the tests; the part is the subset."""
    from prb_jax.sources import personas

    for part in PERSONAS:
        for one in personas.load(part)[:: 4 if part == "train" else 1]:
            yield {**one.to_row(), "subset": part}


def _figure(value: float | None, interval: list[float] | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    shown = f"{value:+.3f}" if signed else f"{value:.3f}"
    return shown if interval is None else f"{shown} [{interval[0]:.3f}, {interval[1]:.3f}]"


def table(results: list[Row], *, shots: tuple[int, ...]) -> str:
    """Return the rows of unseen people as a table of Markdown."""
    lines = [
        "| method | k | accuracy | minus pooled | minus pooled + offset | p, Holm | by the person |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        if row["split"] != "unseen" or row["control"] or row["shots"] not in shots:
            continue
        p = "-" if row.get("p_holm") is None else f"{row['p_holm']:.3f}"
        lines.append(
            f"| `{row['method']}` | {row['shots']} | {_figure(row['accuracy'], row['accuracy_ci95'])} | "
            f"{_figure(row['diff_to_pooled'], row['diff_to_pooled_ci95'], signed=True)} | "
            f"{_figure(row['diff_to_offset'], row['diff_to_offset_ci95'], signed=True)} | {p} | "
            f"{_figure(row['gain_from_user'], row['gain_from_user_ci95'], signed=True)} |"
        )
    return "\n".join(lines)


def write_table(name: str, folder: Path, out: Path) -> None:
    """Write the tables of a finished study: all choices, and each subset with the largest number of shots."""
    results = json.loads((folder / "results.json").read_text())
    counts = [int(text) for text in STUDIES[name].shots.split(",")]
    shown = tuple(dict.fromkeys((counts[0], counts[len(counts) // 2], counts[-1])))
    unseen = [row for row in results if row["split"] == "unseen"]
    parts = [
        f"{unseen[0]['n']:,} choices of {unseen[0]['users']:,} unseen people.",
        table(results, shots=shown),
    ]
    controls = [
        row
        for row in unseen
        if row["control"] in ("no user", "no profile") and row["shots"] in (0, counts[-1])
    ]
    parts.append(
        "\n".join(
            f"- `{row['method']}`, k = {row['shots']}: {_figure(row['accuracy'], row['accuracy_ci95'])}"
            for row in controls
        )
    )
    if (path := folder / "subsets.json").exists():
        subsets = json.loads(path.read_text())
        for subset in dict.fromkeys(row["subset"] for row in subsets):
            here = [row for row in subsets if row["subset"] == subset]
            parts.append(f"{subset}: {here[0]['n']:,} choices of {here[0]['users']:,} people.")
            parts.append(table(here, shots=(counts[-1],)))
    (out / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"written: {out / name}.md")


def studies(encoder: str, data: Path, out: Path, names: list[str]) -> None:
    """Run the studies that are named, or all."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or STUDIES:
        study = STUDIES[name]
        if encoder != "--table":
            path = prepare(name, data, out)
            features, methods = out / f"{name}.features", study.methods
            run(f"features {encoder} --data {path} {study.features} --out {features}")
            settings = f"--set {study.settings} " if study.settings else ""
            run(
                f"personalise --data {path} --backbone {features} --methods {methods} --shots {study.shots} "
                f"--seeds {study.seeds} {settings}--out {out / name}"
            )
        write_table(name, out / name, out)


if __name__ == "__main__":
    studies(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
