"""Tokenise comparisons on several processes: each tokenises a part, and all exchange their parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from prb_jax.errors import PrbError, class_named
from prb_jax.platform.processes.sharing import gather_int32, parts_of, process_count, process_index
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.batching import Gather
from prb_jax.scoring.reader import Encode
from prb_jax.trees.tree import Tree, Truncation

_ERROR = -1
_AT_A_TIME = 4096


def encode_part(comparisons: Sequence[Comparison], encode: Encode) -> Gather:
    """Tokenise this process's part of the comparisons; return a collective that exchanges the parts.

    An error in one process is raised by the exchange in all processes.
    """
    parts = parts_of(len(comparisons))
    try:
        sent = packed_trees(encode([comparisons[place] for place in parts[process_index()]]))
    except PrbError as error:
        text = json.dumps([type(error).__name__, str(error)])
        sent = np.concatenate([[_ERROR], np.frombuffer(text.encode(), np.uint8)]).astype(np.int32)

    def gather() -> list[Tree]:
        trees: dict[int, Tree] = {}
        for process, vector in enumerate(gather_int32(sent)):
            if len(vector) and vector[0] == _ERROR:
                kind, text = json.loads(vector[1:].astype(np.uint8).tobytes())
                raise class_named(kind)(text if process == process_index() else f"process {process}: {text}")
            trees.update(zip(parts[process], unpacked_trees(vector), strict=True))
        return [trees[place] for place in range(len(trees))]

    return gather


def encode_by_processes(comparisons: Sequence[Comparison], encode: Encode) -> list[Tree]:
    """Like ``encode``, with the same errors, but each of several processes tokenises a part. A collective."""
    if process_count() == 1:
        return encode(comparisons)
    starts = range(0, len(comparisons), _AT_A_TIME)
    return [
        tree for start in starts for tree in encode_part(comparisons[start : start + _AT_A_TIME], encode)()
    ]


def packed_trees(trees: Sequence[Tree]) -> np.ndarray:
    """Return an int32 vector: for each tree its sizes, truncation, response lengths, read places and tokens."""
    parts: list[np.ndarray] = []
    for tree in trees:
        sizes = [len(tree.prefix), len(tree.responses), *astuple(tree.truncation)]
        parts.append(np.asarray([*sizes, *map(len, tree.responses), *tree.read], np.int32))
        parts += [tree.prefix, *tree.responses]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def unpacked_trees(vector: np.ndarray) -> list[Tree]:
    trees: list[Tree] = []
    while len(vector):
        (prefix, count, *cut), rest = vector[:5].tolist(), vector[5:]
        lengths, read, tokens = np.split(rest, [count, 2 * count])
        *parts, vector = np.split(tokens, np.cumsum([prefix, *lengths]))
        trees.append(Tree(parts[0], tuple(parts[1:]), tuple(read.tolist()), Truncation(*cut)))
    return trees
