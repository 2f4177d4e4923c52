"""Comparisons with token trees in a store: only their tokens are read, not their text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.errors import DataError, quote
from prb_jax.records.items import Items
from prb_jax.records.sources.prepared import prepared_sources, tokens_folder
from prb_jax.records.sources.source import same_subset
from prb_jax.scoring.inputs import SPLIT, Inputs
from prb_jax.scoring.large_table import LargeTable
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.scoring.reader import Reader
from prb_jax.text.view import TextProtocol, View
from prb_jax.trees.token_store import (
    STORE,
    TokenStore,
    first_difference,
    open_store,
)
from prb_jax.trees.tree import TokenisedComparison


class StoredComparisons(Items[TokenisedComparison]):
    """Comparisons of a store; each tree is read on access.

    Attributes:
      places: Indices of the comparisons in the store, int64.

    Args:
      table: Columns of the whole store.
    """

    in_memory = False

    def __init__(self, store: TokenStore, places: np.ndarray, *, table: LargeTable) -> None:
        self.store, self.places, self._table = store, places, table

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        place, table = int(self.places[index]), self._table
        return TokenisedComparison(table.id(place), table.users[place], partial(self.store.tree, place))

    def truncated(self) -> int:
        return int((self.store.arrays["cuts"][self.places] != 0).any(axis=1).sum())

    def table(self) -> LargeTable:
        """Return the columns of these comparisons."""
        return self._table if len(self.places) == len(self.store) else self._table.at(self.places)


def store_key(reader: Reader, view: View) -> dict[str, Any]:
    """Return everything that decides the trees of comparisons, JSON-ready."""
    tokenizer, paper = reader.tokenizer.tokenizer, view.protocol is TextProtocol.PAPER
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    else:
        text = backend.to_str()
    pad = reader.config.pad_token_id
    return {
        "tokenizer": f"sha256:{hashlib.sha256(text.encode()).hexdigest()}",
        "template": reader.tokenizer.template_hash,
        "protocol": view.protocol.value,
        "profile_posts": view.profile_posts,
        **view.wording,
        "max_length": reader.limit(view),
        "truncation_side": tokenizer.truncation_side if paper else None,
        # The paper protocol reads the score at the last token that is not padding.
        "pad_token_id": (reader.tokenizer.pad_token_id if pad is None else pad) if paper else None,
    }


def store_folder(tokens: Path, key: Mapping[str, Any], *, split: str) -> Path:
    """Return the folder of the store with this key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return tokens / name / split


def find_store(folder: Path, reader: Reader, view: View, *, split: str) -> TokenStore | None:
    """Return the store of a prepared folder for this model and view; None if no tokens were prepared.

    Raises:
      DataError: All stores are for other models or views (the message names the fields), or the store is damaged or
        was made from other data.
    """
    tokens = tokens_folder(folder)
    if tokens is None:
        return None
    key, name = store_key(reader, view), split
    splits = {path.parent.name for path in tokens.glob(f"*/*/{STORE}")}
    if not splits:
        raise DataError(f"{tokens}: not finished; the same `prb prepare` command finishes it")
    if split not in splits and len(splits) == 1:
        name = splits.pop()
    path = store_folder(tokens, key, split=name)
    if not (path / STORE).is_file():
        keys = [open_store(other.parent).key for other in sorted(tokens.glob(f"*/{name}/{STORE}"))]
        if not keys:
            raise DataError(f"{tokens}: no split {quote(split)}; it has {', '.join(sorted(splits))}")
        raise DataError(
            f"{tokens}: prepared for another model or view than {reader.name}: {first_difference(key, keys)}; prepare "
            "the data for this one too, with the same --out, or use the source itself as --data"
        )
    store = open_store(path)
    if store.key != key:
        raise DataError(f"{path / STORE}: {first_difference(key, [store.key])}")
    if store.data != (made := prepared_sources(folder, split=name)):
        raise DataError(f"{path / STORE}: data {quote(store.data)}, expected {quote(made)}")
    return store


def stored_table(folder: Path, *, split: str) -> LargeTable | None:
    """Return the columns of a prepared folder, the same for every model; None if no tokens were prepared.

    Raises:
      DataError: The store is damaged.
    """
    tokens = tokens_folder(folder)
    stores = [] if tokens is None else sorted(tokens.glob(f"*/*/{STORE}"))
    of_split = [path for path in stores if path.parent.name == split] or stores
    if len({path.parent.name for path in of_split}) != 1:
        return None
    return LargeTable.stored(open_store(of_split[0].parent).arrays)


def stored_comparisons(
    folder: Path,
    reader: Reader,
    view: View,
    *,
    split: str,
    places: np.ndarray | None = None,
    subset: str | None = None,
    limit: int | None = None,
) -> StoredComparisons | None:
    """Return the comparisons of a prepared folder as tokens; None if no tokens were prepared.

    Args:
      folder: Prepared folder, the only source of the comparisons.
      reader, view: Reader and view of the model.
      split: Split of the folder.
      places: Indices of the comparisons, int64; if not given, the first `limit` ones of a subset.
      subset, limit: Selection, as in `prb_jax.records.intake.read_comparisons`.

    Raises:
      DataError: Errors of `find_store`.
    """
    store = find_store(folder, reader, view, split=split)
    if store is None:
        return None
    table = LargeTable.stored(store.arrays)
    if places is None:
        places = places_of(table, subset=subset, limit=limit, where=folder)
    return StoredComparisons(store, places, table=table)


def places_of(table: LargeTable, *, subset: str | None, limit: int | None, where: str | Path) -> np.ndarray:
    """Return the indices of the first ``limit`` comparisons of a subset, int64.

    Raises:
      DataError: The subset is empty; the message begins with `where`.
    """
    if subset is None:
        return np.arange(len(table))[:limit]
    subsets = [table.subsets[place] for place in range(len(table))]
    places = np.flatnonzero([same_subset(name, subset) for name in subsets])[:limit]
    if not len(places):
        expected = ", ".join(sorted({name or "(none)" for name in subsets}))
        raise DataError(f"{where}: no subset {quote(subset)}; expected one of {expected}")
    return places


def tokens_of_job(
    reader: Reader, inputs: Inputs, view: View, options: EvaluateOptions
) -> StoredComparisons | None:
    """Return the tokens that `prb prepare` wrote for this model and view; None if text must be read."""
    assert inputs.prepared is not None
    of_data: dict[str, Any] = {"split": SPLIT, "subset": inputs.subset, "limit": options.limit}
    tokens = stored_comparisons(inputs.prepared, reader, view, **of_data)
    # A benchmark is read as text, for its rule; only its text tells which comparisons of the store it contains.
    if tokens and inputs.comparisons.in_memory and len(inputs.comparisons) != len(tokens.store):
        return None
    return tokens
