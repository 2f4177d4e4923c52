"""The finished benchmark: its public and private parts, and its files.

No person, question or answer is in both parts.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.building.gates.faults import NearTexts
from prb_jax.building.gates.gate import Pair
from prb_jax.errors import short_repr
from prb_jax.metrics.clusters import Components
from prb_jax.records.sources.folders import README
from prb_jax.records.sources.prepare import prepare
from prb_jax.records.writing import whole_file, write_file, writing
from prb_jax.scoring.clusters import clusters_of

PAIRS: Final = "pairs.jsonl"
DROPPED: Final = "dropped.jsonl"
SHARD: Final = "data/test-00000-of-00001.parquet"
ARRAY_RECORD: Final = "array_record"

_PRIVATE_FIELDS: Final = ("rubric_aspects", "narrative")

_NEAR: Final = 0.6
"""Similarity of questions and answers from which pairs share a part; lower than for duplicates, to be safe."""


@dataclass(frozen=True)
class BenchmarkPart:
    """The public or the private part of the benchmark.

    Every record contains the part's canary, a line with a unique number. If it appears in a corpus or in a model's
    output, the part has leaked.
    """

    name: str
    pairs: tuple[Pair, ...]
    canary: str

    __repr__ = short_repr


def split_parts(
    pairs: Sequence[Pair], *, name: str, private_share: float, seed: int
) -> tuple[BenchmarkPart, BenchmarkPart]:
    """Split pairs into the public and the private part.

    Pairs that share a person, or nearly the same question or answer, form a group. Groups are shuffled by the seed, and
    fill the private part up to its share of the pairs, never beyond it. The canaries contain the name of the
    benchmark.
    """
    groups: dict[str, list[str]] = {}
    for pair, group in zip(pairs, _groups(pairs), strict=True):
        groups.setdefault(group, []).append(pair.id)
    order = sorted(groups.values(), key=lambda ids: hashlib.sha256(f"{seed}\0{min(ids)}".encode()).digest())
    held: set[str] = set()
    for ids in order:
        if len(held) + len(ids) <= private_share * len(pairs):
            held |= set(ids)

    def part(part_name: str, of_part: tuple[Pair, ...]) -> BenchmarkPart:
        # the canary's number depends only on the texts, so equal builds have equal bytes
        texts = "\0".join(text for pair in of_part for text in (pair.id, *pair.comparison.responses))
        digest = hashlib.sha256(texts.encode()).hexdigest()
        number = uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{part_name}\0{digest}")
        about = f"BENCHMARK DATA ({part_name} part of {name}) SHOULD NEVER APPEAR IN TRAINING CORPORA."
        return BenchmarkPart(part_name, of_part, f"{about} canary GUID {number}")

    public = tuple(pair for pair in pairs if pair.id not in held)
    return part("public", public), part("private", tuple(pair for pair in pairs if pair.id in held))


def _groups(pairs: Sequence[Pair]) -> list[str]:
    """Return the name of its group for each pair."""
    together = Components()
    users = clusters_of([pair.comparison for pair in pairs]).users
    questions, answers = NearTexts(_NEAR), NearTexts(_NEAR)
    for pair, user in zip(pairs, users, strict=True):
        this = f"pair {pair.id}"
        if user is not None:
            together.join(this, f"user {user}")
        texts = ((questions, pair.comparison.question), (answers, pair.chosen), (answers, pair.rejected))
        for index, text in texts:
            for other in index.owners(text):
                together.join(this, f"pair {other}")
            index.add(pair.id, text)
    return [str(together.root(f"pair {pair.id}")) for pair in pairs]


def write_product(
    out: Path,
    *,
    pairs: Sequence[Pair],
    parts: Sequence[BenchmarkPart],
    dropped: Iterable[Mapping[str, Any]],
    formats: Sequence[str],
    card: Callable[[BenchmarkPart | None], str],
) -> None:
    """Write the benchmark into the folder of its build, which this process has locked.

    ``pairs.jsonl`` has every pair with all fields. PART.jsonl and PART/ (in the hub's layout, with a card) have the
    pairs of each part; the public part lacks aspects and narratives.

    Args:
      dropped: Records without a pair, JSON-ready.
      formats: Formats besides JSON lines: "parquet" and "array_record".
      card: Returns the card of a part, or of the whole build for None, in Markdown.

    Raises:
      RunError: a file cannot be written.
    """
    canaries = {pair.id: part.canary for part in parts for pair in part.pairs}
    _write_lines(out / PAIRS, (_to_row(pair, canaries[pair.id]) for pair in pairs))
    _write_lines(out / DROPPED, dropped)
    for part in parts:
        left_out = _PRIVATE_FIELDS if part.name == "public" else ()
        rows = [
            {name: value for name, value in _to_row(pair, part.canary).items() if name not in left_out}
            for pair in part.pairs
        ]
        path = out / f"{part.name}.jsonl"
        if not rows:
            with writing(path):
                path.unlink(missing_ok=True)
            continue
        _write_lines(path, rows)
        if "parquet" in formats:
            _write_parquet(out / part.name / SHARD, rows)
            write_file(out / part.name / README, card(part).encode())
        if "array_record" in formats:
            prepare([str(path)], out=out / ARRAY_RECORD / part.name)
    write_file(out / README, card(None).encode())


def _to_row(pair: Pair, canary: str) -> dict[str, Any]:
    """Return the record of a pair, with its canary and its provenance."""
    return {**pair.comparison.to_row(), "canary": canary, "provenance": dict(pair.provenance)}


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with writing(path), whole_file(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in rows)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write records with the hub's column types; provenance is stored as JSON text, because its fields differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()

    def objects(*names: str) -> pa.DataType:
        return pa.list_(pa.struct([(name, text) for name in names]))

    texts = "id question user_id profile_order category subset narrative chosen rejected canary provenance"
    types = {
        **dict.fromkeys(texts.split(), text),
        "prompt": objects("role", "content"),
        "profile": objects("id", "category", "text"),
        "rubric_aspects": objects("aspect", "evidence", "reason"),
    }
    used = [name for name in types if any(name in row for row in rows)]
    schema = pa.schema([(name, types[name]) for name in used])
    flat = [{**row, "provenance": json.dumps(row["provenance"], sort_keys=True)} for row in rows]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(flat, schema=schema), buffer)
    write_file(path, memoryview(buffer.getvalue()))
