"""Training data larger than memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import resolve
from prb_jax.records.items import Held, Items
from prb_jax.records.joined import Joined
from prb_jax.scoring.large_table import LargeTable
from prb_jax.scoring.prepared_tokens import places_of, stored_table
from prb_jax.training.data import Examples, refuse_repeated_ids


def read_large(
    parts: Sequence[tuple[str, Items[Comparison]]], *, subset: str | None, limit: int | None, split: str
) -> Examples:
    """Read data larger than memory: one pass over all fields except texts, or none if tokens are prepared."""
    read: list[Examples] = []
    for name, part in parts:
        folder: Path | None = None
        rows: Items[Any] = part
        if not part.in_memory:
            folder = resolve(name, split="").tokens
            table = None if folder is None else stored_table(folder, split=split)
            table = LargeTable(part, baselines=False) if table is None else table
            places = places_of(table, subset=subset, limit=limit, where=name)
            part, rows = Joined([part], places), Joined([table], places)
        read.append(Examples(part, rows, None if folder is None else (folder, split)))
    if len(read) == 1:
        return read[0]
    rows = Held(row for part in read for row in part.known)
    refuse_repeated_ids(rows, "data")
    return Examples(Joined([part.comparisons for part in read]), rows)
