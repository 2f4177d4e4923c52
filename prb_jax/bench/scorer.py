"""Our side of the benchmark: the scorer of `prb evaluate`, fed with token ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.bench.workload import Workload
from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.data.comparison import Comparison
from prb_jax.models.attention.choice import choose_attention, stream_attention_name
from prb_jax.models.config.decoder import DecoderConfig, load_config
from prb_jax.models.decoder import Params
from prb_jax.models.flops import stream_flops, tree_flops
from prb_jax.models.named_shapes import has_no_weights, read_model
from prb_jax.models.quantization import quantization_form, quantize_params
from prb_jax.models.random_params import init_params
from prb_jax.readouts.heads import choose_readout
from prb_jax.readouts.score_tree import make_score_fn, make_stream_fn
from prb_jax.scoring.batching import Batch, lanes
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.stream import stream_scores
from prb_jax.sharding import check_heads, make_mesh, parameter_shardings
from prb_jax.trees.batches import TreeBatch
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree


@dataclass(frozen=True)
class TreePass:
    """One timed pass over a workload.

    Attributes:
      seconds: wall time from the first tree to the last score.
      padded_tokens: tokens computed, padding too.
      needed_tokens: of them, without padding; a beginning that several trees share counts once where it is computed
        once.
      flops: of these tokens, on paper.
      compiles: programs the scorer holds after the pass, less those before it.
      scores: of each tree, in order.
    """

    seconds: float
    padded_tokens: int
    needed_tokens: int
    flops: float
    compiles: int
    scores: list[np.ndarray]


def bench_source(name: str) -> Path | DecoderConfig:
    """Return the folder of this name; or the configuration, of a ``config.json`` or a shape, for random weights.

    Raises:
      CheckpointError: the configuration cannot be used.
    """
    return read_model(name) if has_no_weights(name) else Path(name)


def load_for_bench(
    model: Path | DecoderConfig,
    *,
    mesh: str | None,
    dtype: str | None,
    quantize: str | None = None,
    attention: str = "auto",
) -> RewardModel:
    """A reward model without a tokenizer: token ids go in.

    Args:
      model: a folder with weights; or a configuration, for random weights made on the devices.
      mesh, dtype, quantize, attention: as in :func:`prb_jax.scoring.load.load`.
    """
    config = model if isinstance(model, DecoderConfig) else load_config(model)
    devices = make_mesh(mesh)
    check_heads(devices, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    chosen = dtype or config.default_dtype
    kind = jnp.dtype(chosen)
    form = None if quantize is None else quantization_form(quantize, mesh=devices)
    shardings = parameter_shardings(abstract_params(config, quantize=quantize), devices)
    name = config.model_type if isinstance(model, DecoderConfig) else str(model)
    readout = choose_readout(
        None if config.num_labels == 1 else "first-logit", num_labels=config.num_labels, where=name
    )
    options: dict[str, Any] = {
        "mesh": devices, "dtype": kind, "readout": readout, "shardings": shardings, "attention": attention
    }  # fmt: skip
    shown = stream_attention_name(devices, attention)
    if isinstance(model, DecoderConfig):

        def make() -> Params:
            made = init_params(config, dtype=kind)
            return made if form is None else quantize_params(made, form)

        params = jax.jit(make, out_shardings=shardings)()
        params["score"] = params["score"].astype(jnp.float32)
    else:
        params = load_params(
            model, config, dtype=kind, head_dtype=jnp.float32, shardings=shardings, quantize=quantize
        ).params
    return RewardModel(
        reader=Reader(name=name, config=config, tokenizer=cast(Any, None)),
        params=params,
        score_fn=make_score_fn(config, **options),
        stream_fn=None if shown is None else make_stream_fn(config, **options),
        mesh=devices,
        dtype=chosen,
        readout=readout,
        quantize=quantize,
        attention=shown or choose_attention(devices, kind, attention, scored=config).name,
    )


def score_pass(model: RewardModel, workload: Workload, *, batch_tokens: int | None) -> TreePass:
    """Scores all trees through the pipeline of :meth:`RewardModel.stream`."""
    padded = needed = 0
    flops = 0.0
    program = cast(Any, model.stream_fn or model.score_fn)
    before = program._cache_size()

    counting = threading.Lock()  # batches run side by side

    def dispatch(batch: Any) -> jax.Array:
        nonlocal padded, flops
        with counting:
            padded += padded_tokens(batch)
            if isinstance(batch, StreamBatch):
                flops += stream_flops(batch, model.decoder)
        return model.dispatch(batch)

    scores: list[np.ndarray] = [np.zeros(0)] * len(workload.trees)
    start = time.perf_counter()
    # The stream asks only for the comparisons' number and hands them to `encode`: trees will do.
    for scored in stream_scores(
        cast(Sequence[Comparison], workload.trees),
        encode=lambda trees: list(cast(Sequence[Tree], trees)),
        dispatch=dispatch,
        options=model.batch_options(batch_tokens),
        lanes=lanes(model.mesh),
    ):
        needed += scored.computed or 0
        for index, row in zip(scored.indices, scored.scores, strict=True):
            scores[index] = row
    seconds = time.perf_counter() - start
    if model.stream_fn is None:
        flops = tree_flops(workload.trees, model.decoder)
    return TreePass(seconds, padded, needed, flops, program._cache_size() - before, scores)


def padded_tokens(batch: Batch) -> int:
    """Return how many tokens of a batch are computed, padding too."""
    arrays = (batch.prefix, batch.responses) if isinstance(batch, TreeBatch) else (batch.tokens,)
    return sum(array.size for array in arrays)
