"""Conversations in token ids instead of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prb_jax.errors import DataError
from prb_jax.scoring.reader import Reader
from prb_jax.text.view import View
from prb_jax.trees.tree import TokenisedComparison, Tree, build_tree


class IdsTooLongError(DataError):
    """A conversation in token ids is longer than the limit."""


def encode_ids(
    reader: Reader, sequences: Sequence[np.ndarray], *, user_id: str | None = None, view: View, name: str
) -> Tree:
    """Return the tree of K whole conversations in int32 token ids, each read at its last token.

    Raises:
      DataError: Errors of :meth:`Reader.encode`, with `name` in the message; IdsTooLongError for too many ids.
      CheckpointError: Errors of :meth:`Reader.encode`.
    """
    reader.check_labels(view.protocol)
    limit = reader.limit(view)
    for ids in sequences:
        if len(ids) > limit:
            raise IdsTooLongError(f"{name}: {len(ids):,} tokens, more than the limit of {limit:,}")
        if len(ids) and int(ids.min()) < 0:
            raise DataError(f"{name}: token ids: expected 0 or more, found {int(ids.min())}")
    tree = build_tree(sequences)
    reader.check_readable(name, tree)
    if reader.prompts is None:
        return tree
    return reader.prompts.encode([tree], [TokenisedComparison(name, user_id, lambda: tree)])[0]
