"""Whose names a decoder's tensors have; the names themselves stand in :mod:`prb_jax.checkpoints.layout`."""

from dataclasses import dataclass
from typing import Literal

EMBEDDING_KEY = "model.embed_tokens.weight"
HEAD_KEY = "score.weight"
OUTPUT_EMBEDDING_KEY = "lm_head.weight"

Style = Literal["transformers", "internlm2"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a checkpoint's tensors.

    Attributes:
      style: the code base whose names the body has.
      prefix: what the body's names start with.
      side_files: files beside the weights that hold further tensors, each with what is put before the names
        in it. Any of those that exist are read.
      ignored: regular expressions of names that are left aside, each with the reason.
    """

    style: Style = "transformers"
    prefix: str = "model."
    side_files: tuple[tuple[str, str], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()


STANDARD = Layout()
"""What transformers writes for a ``*ForSequenceClassification``."""
