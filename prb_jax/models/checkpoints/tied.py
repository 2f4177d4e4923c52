"""Output embeddings that a configuration ties to the input embeddings and a checkpoint stores, too."""

from __future__ import annotations

import numpy as np

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.hf_map import module_name
from prb_jax.models.checkpoints.weight_file import FLOAT_DTYPES, TensorInfo
from prb_jax.models.checkpoints.weight_index import SliceReader, WeightIndex
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.head import OUTPUT_EMBEDDING_KEY

_ROWS_COMPARED = 1024


def check_tied_embeddings(index: WeightIndex, config: DecoderConfig, *, reader: SliceReader) -> None:
    """Check that a stored output embedding equals the input embedding, to which the configuration ties it.

    Raises:
      CheckpointError: The two tensors differ, so one of them, or the configuration, belongs to another model.
    """
    embedding = f"{module_name(config.layout, 'embed')}.weight"
    pair = [index.tensors[name] for name in (embedding, OUTPUT_EMBEDDING_KEY)]
    rows, columns = pair[0].shape

    def bits(tensor: TensorInfo, row: int) -> bytes:
        stop = min(row + _ROWS_COMPARED, rows)
        block = np.empty((stop - row, columns), FLOAT_DTYPES[tensor.dtype])
        reader.read_into(block, tensor.name, (slice(row, stop), slice(0, columns)))
        return block.tobytes()

    same_kind = pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    starts = range(0, rows, _ROWS_COMPARED)
    if not same_kind or any(bits(pair[0], row) != bits(pair[1], row) for row in starts):
        raise CheckpointError(
            f"{index.folder}: config.json says that '{OUTPUT_EMBEDDING_KEY}' is tied to '{embedding}', "
            "but the two stored tensors differ"
        )
