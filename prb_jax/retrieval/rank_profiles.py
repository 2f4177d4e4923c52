"""`prb rank-profiles`: the same records, each user's posts in the order in which they matter."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.data.comparison import Comparison
from prb_jax.data.files import Row
from prb_jax.data.writing import temporary_name, whole_file
from prb_jax.errors import DataError, RunError, quote
from prb_jax.retrieval.rankers import RANKERS, Query
from prb_jax.runs.progress import Count, show_progress
from prb_jax.sources.reading import source_rows
from prb_jax.text.protocol import TextProtocol, parse_protocol

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Ranked:
    """What was ranked.

    Attributes:
      path: the file that was written.
      records: in it.
      profiles: records with a profile.
      texts: distinct questions and posts that an encoder embedded; 0 for rankers without one.
      truncated: of these, how many lost their end because they are too long for the encoder.
    """

    path: Path
    records: int
    profiles: int
    texts: int = 0
    truncated: int = 0


def rank_profiles(
    data: str | Path,
    *,
    encoder: str,
    out: str | Path,
    protocol: str = TextProtocol.DEFAULT,
    mesh: str | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> Ranked:
    """Write the records of ``data`` with their profiles reordered, most relevant post first.

    The field "profile_order" says by what; every other field stays as it is, in JSON files fields outside the schema
    too.

    Args:
      data: a file, or any other source of ``read_comparisons``.
      encoder: "bm25", "recency", or a model: a folder or hub id of an encoder, as Contriever.
      out: the file to write, JSON lines, also gzipped; a file that is there is never replaced.
      protocol: "default"; or "paper", which does what the ranking script of Personalised RewardBench
        does: the i-th post gets category and text of the i-th best one, but keeps its own id.
      mesh, dtype, max_length, revision: for :func:`prb_jax.readouts.text_encoder.load_text_encoder`.
      progress: shows progress on standard error.

    Raises:
      DataError: a record that is not of the format, or an option that means nothing to the encoder.
      CheckpointError, MeshError: the model cannot be loaded.
      RunError: ``out`` is there already, or cannot be written.
    """
    options = {"mesh": mesh, "dtype": dtype, "max_length": max_length, "revision": revision}
    given = [name for name, value in options.items() if value is not None]
    if encoder in RANKERS and given:
        raise DataError(f"{', '.join(given)}: for encoders that are models, not for {encoder}")
    if encoder not in RANKERS and "/" not in encoder and not Path(encoder).exists():
        raise DataError(
            f"encoder {quote(encoder)}: expected {', '.join(RANKERS)}, a model folder, or a hub id like 'org/name'"
        )
    rules, target = parse_protocol(protocol), Path(out)
    if not target.name.endswith(SUFFIXES):
        raise RunError(f"{out}: expected a name ending in {' or '.join(SUFFIXES)}")
    if target.exists():
        raise RunError(f"{out}: is there already; remove it, or give --out another file")
    with contextlib.suppress(OSError):
        temporary_name(target).unlink(missing_ok=True)  # of a call that was killed
    rows, queries = read_queries(data)
    texts = truncated = 0
    if encoder in RANKERS:
        count = Count(len(queries), unit="profiles")
        with show_progress(f"ranking by {encoder}", count, enabled=progress) as display:
            orders = RANKERS[encoder](display.each(queries))
    else:
        # Here, so that rankers without a model start no JAX.
        from prb_jax.readouts.text_encoder import load_text_encoder
        from prb_jax.retrieval.rankers import rank_by_similarity

        loaded = load_text_encoder(encoder, **options)
        ranking = rank_by_similarity(queries, loaded, progress=progress)
        orders, texts, truncated = ranking.orders, ranking.texts, ranking.truncated
    # of a folder its name: where a model lies says nothing of it
    ordered_by = (
        Path(encoder).resolve().name if Path(encoder).exists() and encoder not in RANKERS else encoder
    )
    lines = []
    for row, query, order in zip(rows, queries, orders, strict=True):
        record = dict(row.value)
        if query.posts:
            record["profile"] = _reordered(query.posts, order, protocol=rules)
            record["profile_order"] = ordered_by
        lines.append(json.dumps(record, default=str) + "\n")
    _write(target, "".join(lines).encode())
    return Ranked(
        path=target,
        records=len(rows),
        profiles=sum(bool(query.posts) for query in queries),
        texts=texts,
        truncated=truncated,
    )


def read_queries(data: str | Path) -> tuple[list[Row], list[Query]]:
    """The records of a file, or of any other source of ``read_comparisons``, and the query of each.

    Raises:
      DataError: a record that is not of the format; no records.
    """
    rows = source_rows(data)
    queries = [
        Query(
            row.where,
            Comparison.from_row(row.value, where=row.where).question,
            row.value.get("profile") or (),
        )
        for row in rows
    ]
    return rows, queries


def _reordered(
    posts: Sequence[Mapping[str, Any]], order: Sequence[int], *, protocol: TextProtocol
) -> list[Mapping[str, Any]]:
    ranked = [posts[position] for position in order]
    if protocol is TextProtocol.PAPER:
        return [{**best, "id": post.get("id")} for post, best in zip(posts, ranked)]
    return ranked


def _write(path: Path, content: bytes) -> None:
    """Equal contents are equal bytes, gzipped or not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(gzip.compress(content, mtime=0) if path.name.endswith(".gz") else content)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
