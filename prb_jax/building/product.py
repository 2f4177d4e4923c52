"""The files of a finished benchmark: all pairs, the public and the private part, and what was left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prb_jax.building.card import data_card
from prb_jax.building.gates.gate import Pair
from prb_jax.building.parts import BenchmarkPart
from prb_jax.data.folders import README
from prb_jax.data.writing import whole_file, writing
from prb_jax.sources.prepare import prepare

PAIRS: Final = "pairs.jsonl"
DROPPED: Final = "dropped.jsonl"
SHARD: Final = "data/test-00000-of-00001.parquet"
ARRAY_RECORD: Final = "array_record"

_PRIVATE_FIELDS: Final = ("rubric_aspects", "narrative")


def write_product(
    out: Path,
    *,
    pairs: Sequence[Pair],
    parts: Sequence[BenchmarkPart],
    dropped: Iterable[Mapping[str, Any]],
    formats: Sequence[str],
    summary: Mapping[str, Any],
) -> None:
    """Write the benchmark into the folder of its build.

    ``pairs.jsonl`` has every pair with all that is known of it. PART.jsonl and PART/, in the hub's layout with a card,
    have each part; the public one lacks aspects and narratives.

    Args:
      out: the folder, held by this process.
      pairs: all that are kept.
      parts: the public and the private one.
      dropped: records without a pair, JSON-ready.
      formats: beside JSON lines: "parquet" and "array_record".
      summary: of the build, for the cards.

    Raises:
      RunError: it cannot be written.
    """
    canaries = {pair.id: part.canary for part in parts for pair in part.pairs}
    write_lines(out / PAIRS, (to_row(pair, canaries[pair.id]) for pair in pairs))
    write_lines(out / DROPPED, dropped)
    for part in parts:
        rows = [to_row(pair, part.canary) for pair in part.pairs]
        if part.name == "public":
            rows = [
                {name: value for name, value in row.items() if name not in _PRIVATE_FIELDS} for row in rows
            ]
        path = out / f"{part.name}.jsonl"
        if not rows:
            with writing(path):
                path.unlink(missing_ok=True)
            continue
        write_lines(path, rows)
        if "parquet" in formats:
            _write_parquet(out / part.name / SHARD, rows)
            _write_text(out / part.name / README, data_card(summary, part=part))
        if "array_record" in formats:
            prepare([str(path)], out=out / ARRAY_RECORD / part.name)
    _write_text(out / README, data_card(summary, part=None))


def to_row(pair: Pair, canary: str) -> dict[str, Any]:
    """Return the record of a pair, with its canary and how it came about."""
    return {**pair.comparison.to_row(), "canary": canary, "provenance": dict(pair.provenance)}


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, a whole file.

    Raises:
      RunError: it cannot be written.
    """
    with writing(path), whole_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)


def _write_text(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(text.encode())


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The columns of a record as the hub has them; provenance is one text, as its fields differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()

    def objects(*names: str) -> pa.DataType:
        return pa.list_(pa.struct([(name, text) for name in names]))

    types = {
        **dict.fromkeys(
            ("id", "question", "user_id", "profile_order", "category", "subset", "narrative"), text
        ),
        **dict.fromkeys(("chosen", "rejected", "canary", "provenance"), text),
        "prompt": objects("role", "content"),
        "profile": objects("id", "category", "text"),
        "rubric_aspects": objects("aspect", "evidence", "reason"),
    }
    used = [name for name in types if any(name in row for row in rows)]
    schema = pa.schema([(name, types[name]) for name in used])
    flat = [{**row, "provenance": json.dumps(row["provenance"], sort_keys=True)} for row in rows]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            pq.write_table(pa.Table.from_pylist(flat, schema=schema), file)
