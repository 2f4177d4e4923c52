"""Collectives of several processes, by JAX."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from prb_jax.platform.processes.sharing import process_index


def broadcast(value: Any) -> Any:
    """Return process 0's JSON value in every process."""
    text = json.dumps(value).encode() if process_index() == 0 else b""
    # Share the length first: a broadcast needs the same shape everywhere.
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    # Round up to powers of two: every new length compiles a new program.
    buffer = np.zeros(1 << length.bit_length(), np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(buffer))[:length].tobytes())


def gathered(values: np.ndarray) -> list[np.ndarray]:
    """Return the int32 vectors [any length] of all processes, in process order."""
    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(values))))
    padded = np.zeros(1 << int(lengths.max()).bit_length(), np.int32)
    padded[: len(values)] = values
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def fetched(array: Any) -> np.ndarray:
    """Return a whole array, sharded over several processes, on the host."""
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
