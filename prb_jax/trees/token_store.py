"""Trees on disk: memory-mapped stores from `prb prepare --model`, which read a tree only when it is needed.

A store is a folder of arrays. The tokens of a prefix are stored in pages of :data:`PAGE` tokens, and equal pages are
stored once: a prefix begins with the profile, so the comparisons of one person share pages. The rest of each prefix
after its last full page, and the responses, are in one array of tokens.

``store.json`` is written last, so a folder with this file is complete. It lists each array with its size and digest,
and records the tokenizer, protocol and data of the trees.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.errors import DataError, quote, short_repr
from prb_jax.records.arrays import load_array
from prb_jax.records.files import file_digest
from prb_jax.records.reading import read_object
from prb_jax.trees.tree import Tree, Truncation

_EMPTY: Final = 128  # bytes of a file without numbers, which cannot be memory-mapped
PAGE: Final = 128  # tokens of a page

STORE: Final = "store.json"
KIND: Final = "prb_jax tokens"
FORMAT: Final = 1
AGAIN: Final = "prepare the data set again, into another folder"

COLUMNS: Final[Mapping[str, str]] = {
    "pages": "int32",  # [pages, PAGE] tokens
    "page_numbers": "int32",  # page numbers of all prefixes
    "page_starts": "int64",  # [n + 1] start of each comparison in page_numbers
    "tokens": "int32",  # rest of the prefix and responses of each comparison
    "token_starts": "int64",  # [n + 1]
    "prefix_lengths": "int32",  # [n]
    "response_starts": "int64",  # [n + 1] in the arrays of responses
    "response_lengths": "int32",
    "read": "int32",
    "cuts": "int32",  # [n, 3] fields of Truncation
    "checks": "uint32",  # [n] crc32 of all tokens of a comparison
    "labels": "float64",  # labels of all responses
    "told": "uint8",  # [n] 1 for a comparison with a user or a profile
    "margins": "float64",  # [n] NaN for none
    "ids": "uint8",  # UTF-8
    "id_starts": "int64",  # [n + 1]
    "subsets": "int32",  # [n] index in the names, likewise for users
    "users": "int32",
    "subset_names": "uint8",  # JSON
    "user_names": "uint8",
    "baselines": "float64",  # [baselines, responses] scores
}
"""Arrays of a store, each in NAME.npy, with their dtypes."""

CHECKED_BY_TREE: Final = ("pages", "tokens")
"""Large arrays, which are checked tree by tree; all other arrays are checked when a store is opened."""


@dataclass(frozen=True)
class TokenStore:
    """An open store."""

    path: Path
    # everything that decides the trees: tokenizer, template, protocol, posts, maximum length
    key: Mapping[str, Any]
    data: Any  # description of their data, from `describe_source`
    arrays: Mapping[str, np.ndarray] = field(repr=False)  # by the names in `COLUMNS`, memory-mapped

    __repr__ = short_repr

    def __len__(self) -> int:
        return len(self.arrays["prefix_lengths"])

    def tree(self, index: int) -> Tree:
        """Read one tree.

        Raises:
          DataError: The tokens differ from the written ones.
        """
        of = self.arrays
        numbers = of["page_numbers"][of["page_starts"][index] : of["page_starts"][index + 1]]
        after_pages = np.array(of["tokens"][of["token_starts"][index] : of["token_starts"][index + 1]])
        responses = slice(int(of["response_starts"][index]), int(of["response_starts"][index + 1]))
        prefix, lengths = int(of["prefix_lengths"][index]), of["response_lengths"][responses].astype(np.int64)
        if len(numbers) and int(numbers.max()) >= len(of["pages"]):
            raise self._damaged(index)
        tokens = np.concatenate([of["pages"][numbers].reshape(-1), after_pages])
        if len(tokens) != prefix + lengths.sum() or zlib.crc32(tokens.tobytes()) != int(of["checks"][index]):
            raise self._damaged(index)
        parts = np.split(tokens, np.cumsum([prefix, *lengths])[:-1])
        return Tree(
            prefix=parts[0],
            responses=tuple(parts[1:]),
            read=tuple(of["read"][responses].tolist()),
            truncation=Truncation(*of["cuts"][index].tolist()),
        )

    def _damaged(self, index: int) -> DataError:
        return DataError(f"{self.path}: the tokens of comparison {index + 1} are damaged; {AGAIN}")


def open_store(path: Path) -> TokenStore:
    """Open the store in a folder.

    Raises:
      DataError: The folder has no store of this package, or the store is truncated or changed.
    """
    record = read_object(path / STORE, error=DataError, hint=AGAIN)
    if record.get("kind") != KIND or not isinstance(record.get("key"), dict):
        raise DataError(f"{path / STORE}: not written by `prb prepare --model`")
    if record.get("format") != FORMAT:
        raise DataError(
            f"{path / STORE}: format: expected {FORMAT}, found {quote(record.get('format'))}; {AGAIN}"
        )
    arrays: dict[str, np.ndarray] = {}
    files = record.get("files")
    for name, kind in COLUMNS.items():
        file = path / f"{name}.npy"
        written = files.get(file.name) if isinstance(files, dict) else None
        if not isinstance(written, dict) or not isinstance(size := written.get("bytes"), int):
            raise DataError(f"{path / STORE}: files: no entry for {file.name}; {AGAIN}")
        try:
            if file.stat().st_size != size:
                raise DataError(f"{file}: expected {size} bytes, found {file.stat().st_size}; {AGAIN}")
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror or error}; {AGAIN}") from error
        arrays[name] = load_array(file, mapped=size > _EMPTY, error=DataError, hint=AGAIN)
        if arrays[name].dtype != np.dtype(kind):
            raise DataError(f"{file}: expected {kind}, found {arrays[name].dtype}; {AGAIN}")
        if name not in CHECKED_BY_TREE and file_digest(file) != f"sha256:{written.get('sha256')}":
            raise DataError(f"{file}: changed since it was prepared; {AGAIN}")
    count = len(arrays["prefix_lengths"])
    responses = len(arrays["response_lengths"])
    pairs = {
        "page_starts": "page_numbers",
        "token_starts": "tokens",
        "response_starts": "read",
        "id_starts": "ids",
    }
    for starts, values in pairs.items():
        if len(arrays[starts]) != count + 1 or int(arrays[starts][-1]) != len(arrays[values]):
            raise DataError(f"{path / starts}.npy: does not belong to {values}.npy; {AGAIN}")
    if count == 0 or record.get("comparisons") != count or len(arrays["labels"]) != responses:
        raise DataError(
            f"{path / STORE}: expected {record.get('comparisons')} comparisons, found {count}; {AGAIN}"
        )
    return TokenStore(path, record["key"], record.get("data"), arrays)


def first_difference(expected: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """Return a phrase on the fields in which the nearest of the found keys differs from the expected key."""
    nearest = min(found, key=lambda key: sum(key.get(name) != value for name, value in expected.items()))
    return ", ".join(
        f"{name} {quote(nearest.get(name))}, expected {quote(value)}"
        for name, value in expected.items()
        if nearest.get(name) != value
    )
