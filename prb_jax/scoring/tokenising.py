"""Tokenising by several processes: each does its part, and all get every tree.

Batches are dealt from the lengths of all trees, and by every process alike, so all need them; token ids are
small beside the work of making them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax import errors
from prb_jax.data.comparison import Comparison
from prb_jax.errors import PrbError
from prb_jax.processes.sharing import gather_int32, process_count, process_index
from prb_jax.sources.large import shares
from prb_jax.trees.tree import Tree, Truncation

Encode = Callable[[Sequence[Comparison]], list[Tree]]

_AT_A_TIME = 4096
_HELD = 256
_FACTS = 5
_ERROR = -1


@dataclass(frozen=True)
class Part:
    """What this process has tokenised of some comparisons.

    Attributes:
      trees: of all of them, where it did them alone.
      sent: of several processes, what it sends to the others.
      indices: which comparisons they are.
      shares: which of them each process did.
    """

    trees: list[Tree]
    sent: np.ndarray | None = None
    indices: Sequence[int] = ()
    shares: Sequence[Sequence[int]] = ()


def encode_pieces(comparisons: Sequence[Comparison], indices: Sequence[int], encode: Encode) -> list[Tree]:
    """Return the trees of the comparisons at ``indices``; of those that are read from a file few are held at a time."""
    size = max(1, len(indices)) if isinstance(comparisons, list) else _HELD
    trees: list[Tree] = []
    for start in range(0, len(indices), size):
        trees += encode([comparisons[index] for index in indices[start : start + size]])
    return trees


def encode_part(comparisons: Sequence[Comparison], indices: Sequence[int], encode: Encode) -> Part:
    """Tokenises this process's part of the comparisons at ``indices``; nothing is exchanged yet."""
    if process_count() == 1:
        return whole_part(comparisons, indices, encode)
    divided = shares(comparisons, indices)
    own = divided[process_index()]
    try:
        trees = encode_pieces(comparisons, own, encode)
    except PrbError as error:
        text = json.dumps([type(error).__name__, str(error)])
        sent = np.concatenate([[_ERROR], np.frombuffer(text.encode(), np.uint8)]).astype(np.int32)
    else:
        sent = _packed(trees)
    return Part([], sent, indices, divided)


def whole_part(comparisons: Sequence[Comparison], indices: Sequence[int], encode: Encode) -> Part:
    """Tokenises the comparisons at ``indices``, as every other process does, too."""
    return Part(encode_pieces(comparisons, indices, encode))


def gather_parts(part: Part) -> list[Tree]:
    """The trees of all processes, in the order of the indices; a collective.

    Raises:
      PrbError: what :func:`encode_part` met in one of the processes, in all of them.
    """
    if part.sent is None:
        return part.trees
    found: dict[int, Tree] = {}
    for process, vector in enumerate(gather_int32(part.sent)):
        if len(vector) and vector[0] == _ERROR:
            kind, text = json.loads(vector[1:].astype(np.uint8).tobytes())
            raise getattr(errors, kind)(text if process == process_index() else f"process {process}: {text}")
        found.update(zip(part.shares[process], _unpacked(vector), strict=True))
    return [found[index] for index in part.indices]


def encode_by_processes(comparisons: Sequence[Comparison], encode: Encode) -> list[Tree]:
    """As ``encode``; of several processes each tokenises its part. A collective.

    Raises:
      PrbError: as ``encode``, in all processes.
    """
    if process_count() == 1:
        return encode(comparisons)
    trees: list[Tree] = []
    for start in range(0, len(comparisons), _AT_A_TIME):
        indices = range(start, min(start + _AT_A_TIME, len(comparisons)))
        trees += gather_parts(encode_part(comparisons, indices, encode))
    return trees


def _packed(trees: Sequence[Tree]) -> np.ndarray:
    """int32: for each tree its sizes, what was cut, where it is read, and its tokens."""
    parts: list[np.ndarray] = []
    for tree in trees:
        cut = tree.truncation
        facts = [len(tree.prefix), len(tree.responses)]
        facts += [cut.posts_dropped, cut.prompt_tokens_dropped, cut.response_tokens_dropped]
        parts.append(np.asarray([*facts, *map(len, tree.responses), *tree.read], np.int32))
        parts += [tree.prefix, *tree.responses]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _unpacked(vector: np.ndarray) -> list[Tree]:
    trees: list[Tree] = []
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return vector[at - count : at]

    while at < len(vector):
        prefix, responses, *cut = take(_FACTS).tolist()
        lengths, read = take(responses).tolist(), take(responses).tolist()
        trees.append(
            Tree(
                prefix=take(prefix),
                responses=tuple(take(length) for length in lengths),
                read=tuple(read),
                truncation=Truncation(*cut),
            )
        )
    return trees
