"""Files of NumPy that strangers wrote: opened without pickles, and refused in one line."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from prb_jax.errors import PrbError
from prb_jax.records.reading import open_file

_DAMAGED: Final = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, SyntaxError, NotImplementedError),
    *(zipfile.BadZipFile, zlib.error, tokenize.TokenError),
)
"""What NumPy raises for damaged headers and archives."""


def load_array(path: Path, *, mapped: bool, error: type[PrbError], hint: str) -> np.ndarray:
    """Return the array in a `.npy` file.

    Args:
      path: File to read.
      mapped: If True, its bytes are read when they are asked for; a file without rows cannot be mapped.
      error: Class of the error to raise.
      hint: What the user can do, at the end of the message.

    Raises:
      PrbError: of the class `error`: the file cannot be read, or holds no array.
    """
    try:
        open_file(path).close()  # a pipe is no regular file
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays")
    except _DAMAGED as failed:
        raise error(f"{path}: cannot be read as an array: {_first_sentence(failed)}; {hint}") from failed
    return array


def load_arrays(path: Path, *, error: type[PrbError], hint: str) -> dict[str, np.ndarray]:
    """Return the arrays in a `.npz` file by name; arguments and errors as of :func:`load_array`."""
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (*_DAMAGED, AttributeError) as failed:
        raise error(f"{path}: cannot be read as arrays: {_first_sentence(failed)}; {hint}") from failed


def _first_sentence(failed: Exception) -> str:
    """What went wrong; a second sentence of NumPy's advises to run the pickle."""
    return str(failed).split(". ")[0].removesuffix(".")
