"""`prb bench parity`: check that this device scores and trains as float32 does, before its speed is measured.

The reference is a float32 forward pass by XLA on the CPU, one conversation at a time, without sharing, packing or
kernels. On request, and if MODEL is a folder, transformers in float32 is compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import RunError
from prb_jax.measure.bench.figures import Figures
from prb_jax.measure.bench.models import bench_source, load_for_bench
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.rivals.transformers import TransformersScorer
from prb_jax.measure.bench.scoring import score_pass
from prb_jax.measure.bench.training import TreeTrainer
from prb_jax.measure.bench.workload import synthetic_workload
from prb_jax.models.attention.choice import choose_attention
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.platform.meshes import all_devices, make_mesh
from prb_jax.scoring.batching import stream_options
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.packing import READS_STEP, pack_streams
from prb_jax.trees.streams import StreamShape, make_stream_batch
from prb_jax.trees.tree import BLOCK, build_tree, round_up

_TREES = 4
_PREFIX, _RESPONSE = 300, 40
_LONGEST = 1024  # tokens of a conversation
_FLOAT32 = 1e-5
_OF_PLAIN = 2.0
"""Tolerance as a multiple of the dtype's own error, measured on this device by XLA, one conversation at a time."""


def bench_parity(options: BenchOptions) -> Figures:
    """Compare scores, and on request a loss, of this device with the reference.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded, or lacks this attention here.
      RunError: transformers is requested but MODEL has no weights, or torch is not installed.
    """
    source = bench_source(options.model)
    if options.against and not isinstance(source, Path):
        raise RunError(f"--against {options.against} needs a folder with weights, found {options.model}")
    model = load_for_bench(source, options)
    config = model.decoder
    workload = synthetic_workload(
        _TREES,
        responses=2,
        prefix_tokens=_PREFIX,
        response_tokens=_RESPONSE,
        vocab_size=config.vocab_size,
        longest=min(config.max_position_embeddings, _LONGEST),
    )
    ours = np.concatenate(score_pass(model, workload, batch_tokens=None).scores)
    conversations = [tree.sequence(k) for tree in workload.trees for k in range(len(tree.responses))]
    oracle = _oracle(model)
    expected = _alone(oracle, conversations)
    plain = expected
    if (model.dtype, model.mesh) != (oracle.dtype, oracle.mesh):
        plain = _alone(model, conversations)
    theirs = loss = None
    if isinstance(source, Path) and options.against:
        rival = TransformersScorer(source, dtype="float32")
        theirs = _rms(rival.run([[ids] for ids in conversations]).scores - ours)
    if options.training:
        step = TreeTrainer(model, workload, options).run()
        first, second = expected.reshape(-1, 2).T.astype(np.float64)
        loss = abs(step.loss - float(np.logaddexp(0.0, second - first).mean()))
    difference, of_plain = _rms(ours - expected), _rms(plain - expected)
    tolerance = max(_FLOAT32, _OF_PLAIN * of_plain)
    agrees = bool(max(difference, loss or 0.0, theirs or 0.0) <= tolerance)
    figures = Figures()
    add = figures.add
    add("dtype", model.dtype, "dtype")
    add("attention", model.attention, "attention")
    add("oracle", f"float32 on {oracle.mesh.devices.flat[0].platform}", "oracle")
    add("scores", len(ours), "scores")
    add("spread", float(expected.std()), "their spread", "{:.3f}")
    add("largest_difference", float(np.abs(ours - expected).max()), "largest difference", "{:.1e}")
    add("rms_difference", difference, "difference, root mean square", "{:.1e}")
    add("plain_difference", of_plain, "of the dtype itself", "{:.1e}")
    add("loss_difference", loss, "loss difference", "{:.1e}")
    add("against_difference", theirs, f"from {options.against}, root mean square", "{:.1e}")
    add("tolerance", tolerance, "tolerance", "{:.1e}")
    add("agrees", agrees, "agrees", "yes" if agrees else "NO")
    return figures


def _rms(differences: np.ndarray) -> float:
    """Return the root mean square; NaN if a difference is NaN, which exceeds every tolerance."""
    return float(np.sqrt(np.mean(np.square(differences, dtype=np.float64))))


def _oracle(model: RewardModel) -> RewardModel:
    """Return the model with the same weights in float32 on one CPU, or on one other device if JAX has no CPU."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        device = all_devices()[0]
    params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, np.float32), device), model.params)
    mesh = make_mesh(None, devices=[device])
    score_fn = make_score_fn(model.decoder, mesh=mesh, dtype=jnp.dtype("float32"), readout=model.readout)
    return replace(model, params=params, mesh=mesh, dtype="float32", score_fn=score_fn)


def _alone(model: RewardModel, conversations: Sequence[np.ndarray]) -> np.ndarray:
    """Return the score of each conversation by the XLA program, each in a separate stream and batch of one common
    length."""
    trees = [build_tree([ids]) for ids in conversations]
    longest = round_up(max(tree.tokens for tree in trees), BLOCK)
    by_xla = choose_attention(model.mesh, jnp.dtype(model.dtype), "xla", config=model.decoder)
    options = stream_options(model.decoder, model.mesh, by_xla, longest)
    shape, scores = StreamShape(options.tokens, READS_STEP), []
    for tree in trees:
        (packed,) = pack_streams([tree], shape, options)
        batch = make_stream_batch([tree], packed, options)
        scores.append(np.asarray(model.run(batch))[0, :1])
    return np.concatenate(scores)
