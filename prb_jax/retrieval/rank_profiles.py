"""`prb rank-profiles`: the same records, each user's posts in the order in which they matter."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.data.files import Row, has_known_suffix, read_rows
from prb_jax.errors import DataError, RunError
from prb_jax.retrieval.rankers import RANKERS, Query
from prb_jax.scoring.runs import replace_file
from prb_jax.text.protocol import Protocol, parse_protocol

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Ranked:
    """What was ranked: the file, its records, and how many of them have a profile."""

    path: Path
    records: int
    profiles: int


def rank_profiles(
    data: str | Path, *, encoder: str, out: str | Path, protocol: str = Protocol.DEFAULT
) -> Ranked:
    """Writes the records of ``data`` with their profiles reordered, most relevant post first.

    Every other field stays as it is, in JSON files fields outside the schema too.

    Args:
      data: a file, or any other source of ``read_comparisons``.
      encoder: "bm25" or "recency".
      out: the file to write, JSON lines, also gzipped; replaced if it is there.
      protocol: "default"; or "paper", which does what the ranking script of Personalised RewardBench
        does: the i-th post gets category and text of the i-th best one, but keeps its own id.

    Raises:
      DataError: for an encoder that does not exist, or a record that is not of the format.
      RunError: ``out`` cannot be written.
    """
    ranker = RANKERS.get(encoder)
    if ranker is None:
        raise DataError(f"encoder {encoder!r}: expected one of {', '.join(RANKERS)}")
    rules, target = parse_protocol(protocol), Path(out)
    if not target.name.endswith(SUFFIXES):
        raise RunError(f"{out}: expected a name ending in {' or '.join(SUFFIXES)}")
    if Path(data).exists() and target.exists() and Path(data).samefile(target):
        raise RunError(f"{out}: is the data itself; give --out another file")
    rows = _rows(data)
    queries = [
        Query(
            row.where,
            Comparison.from_row(row.value, where=row.where).question,
            row.value.get("profile") or (),
        )
        for row in rows
    ]
    lines = []
    for row, query, order in zip(rows, queries, ranker(queries), strict=True):
        record = dict(row.value)
        if query.posts:
            record["profile"] = _reordered(query.posts, order, protocol=rules)
        lines.append(json.dumps(record, default=str) + "\n")
    _write(target, "".join(lines).encode())
    return Ranked(path=target, records=len(rows), profiles=sum(bool(query.posts) for query in queries))


def _reordered(
    posts: Sequence[Mapping[str, Any]], order: Sequence[int], *, protocol: Protocol
) -> list[Mapping[str, Any]]:
    ranked = [posts[position] for position in order]
    if protocol is Protocol.PAPER:
        return [{**best, "id": post.get("id")} for post, best in zip(posts, ranked)]
    return ranked


def _rows(data: str | Path) -> list[Row]:
    path = Path(data)
    if has_known_suffix(path):
        rows = list(read_rows(path))
    else:
        from prb_jax.data.sources import read_comparisons

        found = read_comparisons(data)
        rows = [Row(f"{data}: record {number}", each.to_row()) for number, each in enumerate(found, start=1)]
    if not rows:
        raise DataError(f"{data}: no comparisons in it")
    return rows


def _write(path: Path, content: bytes) -> None:
    """Equal contents are equal bytes, gzipped or not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
