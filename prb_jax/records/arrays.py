"""Read untrusted NumPy files without pickles; a damaged file gives a one-line error."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from prb_jax.errors import PrbError
from prb_jax.records.files import open_file

_DAMAGED: Final = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, SyntaxError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
"""Exceptions of NumPy for damaged headers and archives."""


def load_array(path: Path, *, mapped: bool, error: type[PrbError], hint: str) -> np.ndarray:
    """Return the array in a `.npy` file.

    Args:
      path: File to read.
      mapped: If True, memory-map the file, which must have rows.
      error: Class of the error to raise.
      hint: Advice for the user, at the end of the message.

    Raises:
      PrbError: (class `error`) The file cannot be read, or does not contain an array.
    """
    try:
        open_file(path).close()  # refuses pipes, which NumPy would wait for
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays")
    except _DAMAGED as failed:
        raise error(f"{path}: cannot be read as an array: {_first_sentence(failed)}; {hint}") from failed
    return array


def load_arrays(path: Path, *, error: type[PrbError], hint: str) -> dict[str, np.ndarray]:
    """Return the arrays in a `.npz` file by name; arguments and errors as in :func:`load_array`."""
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (*_DAMAGED, AttributeError) as failed:
        raise error(f"{path}: cannot be read as arrays: {_first_sentence(failed)}; {hint}") from failed


def _first_sentence(failed: Exception) -> str:
    """Return the first sentence of an error; NumPy's second sentence advises to load the pickle."""
    return str(failed).split(". ")[0].removesuffix(".")
