"""`prb bench parity`: whether this device scores and trains as float32 does, before its speed is believed.

The oracle is a forward in float32 with block-wise attention on the CPU, a conversation at a time: nothing is shared,
packed or left to a kernel. Beside it stands transformers in float32, where it is asked for and MODEL is a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.bench.rivals.transformers import TransformersScorer
from prb_jax.bench.scorer import bench_source, load_for_bench, score_pass
from prb_jax.bench.table import shown
from prb_jax.bench.training import TreeTrainer
from prb_jax.bench.workload import Workload, synthetic_workload
from prb_jax.errors import RunError
from prb_jax.models import REMAT
from prb_jax.readouts.score_tree import make_score_fn
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import all_devices, make_mesh
from prb_jax.trees.tree import build_tree

_TREES = 4
_LONGEST = 1024  # tokens of a conversation, however long the prefixes that are asked for
_FLOAT32 = 1e-5
_OF_PLAIN = 2.0


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """Differences of scores and of the first loss from the oracle, in one dtype with one attention."""

    dtype: str = field(metadata=shown("dtype"))
    attention: str | None = field(metadata=shown("attention"))
    oracle: str = field(metadata=shown("oracle"))
    scores: int = field(metadata=shown("scores", meaning="compared"))
    spread: float = field(
        metadata=shown("their spread", "{v:.3f}", "standard deviation of the oracle's scores")
    )
    largest_difference: float = field(metadata=shown("largest difference", "{v:.1e}"))
    rms_difference: float = field(metadata=shown("difference, root mean square", "{v:.1e}"))
    plain_difference: float = field(
        metadata=shown(
            "of the dtype itself",
            "{v:.1e}",
            "a conversation at a time, block-wise, in the same dtype on this device",
        )
    )
    loss_difference: float | None = field(
        metadata=shown(
            "loss difference", "{v:.1e}", "of a step of training, from the loss of the oracle's scores"
        )
    )
    against_difference: float | None = field(
        default=None, metadata=shown("from {rival}, root mean square", "{v:.1e}", "in float32")
    )
    tolerance: float = field(
        metadata=shown(
            "tolerance", "{v:.1e}", f"{_FLOAT32:g}, or {_OF_PLAIN:g} times the dtype's own where that is more"
        )
    )
    agrees: bool = field(metadata=shown("agrees", "{r.verdict}"))

    @property
    def verdict(self) -> str:
        """Yes or no."""
        return "yes" if self.agrees else "NO"


def bench_parity(
    model: str,
    *,
    mesh: str | None,
    dtype: str | None,
    attention: str = "auto",
    prefix_tokens: int = 300,
    response_tokens: int = 40,
    training: bool = False,
    against: str | None = None,
) -> ParityResult:
    """Compare scores and a loss of this device with those of the oracle.

    The arguments are the options of `prb bench parity`, whose help explains them.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded, or has no such attention here.
      RunError: transformers is asked for and MODEL has no weights, or torch is not installed.
    """
    source = bench_source(model)
    if against and not isinstance(source, Path):
        raise RunError(f"--against {against} needs a folder with weights, found {model}")
    loaded = load_for_bench(source, mesh=mesh, dtype=dtype, attention=attention)
    config = loaded.decoder
    workload = synthetic_workload(
        _TREES,
        responses=2,
        prefix_tokens=prefix_tokens,
        response_tokens=response_tokens,
        vocab_size=config.vocab_size,
        longest=min(config.max_position_embeddings, _LONGEST),
    )
    ours = np.concatenate(score_pass(loaded, workload, batch_tokens=None).scores)
    conversations = [tree.sequence(k) for tree in workload.trees for k in range(len(tree.responses))]
    oracle = _oracle(loaded)
    expected = _alone(oracle, conversations)
    plain = expected
    if (loaded.dtype, loaded.mesh) != (oracle.dtype, oracle.mesh):
        block_wise = make_score_fn(
            config,
            mesh=loaded.mesh,
            dtype=jnp.dtype(loaded.dtype),
            readout=loaded.readout,
            attention="blockwise",
        )
        plain = _alone(replace(loaded, score_fn=block_wise), conversations)
    theirs = None
    if isinstance(source, Path) and against:
        rival = TransformersScorer(source, dtype="float32")
        theirs = rms(rival.run([[ids] for ids in conversations]).scores - ours)
    loss_difference = None
    if training:
        trained = "auto" if attention == "paged" else attention
        trainer = TreeTrainer(
            loaded, workload, tuning="full", batch_tokens=None, remat=REMAT, attention=trained
        )
        first, second = expected.reshape(-1, 2).T.astype(np.float64)
        loss_difference = abs(trainer.run().loss - float(np.logaddexp(0.0, second - first).mean()))
    difference, of_plain = rms(ours - expected), rms(plain - expected)
    tolerance = max(_FLOAT32, _OF_PLAIN * of_plain)
    return ParityResult(
        dtype=loaded.dtype,
        attention=loaded.attention,
        oracle=f"float32 on {oracle.mesh.devices.flat[0].platform}",
        scores=len(ours),
        spread=float(expected.std()),
        largest_difference=float(np.abs(ours - expected).max()),
        rms_difference=difference,
        plain_difference=of_plain,
        loss_difference=loss_difference,
        against_difference=theirs,
        tolerance=tolerance,
        agrees=bool(max(difference, loss_difference or 0.0, theirs or 0.0) <= tolerance),
    )


def rms(differences: np.ndarray) -> float:
    """Return the root of the mean square; not a number where one of them is none, which no tolerance allows."""
    return float(np.sqrt(np.mean(np.square(differences, dtype=np.float64))))


def _oracle(model: RewardModel) -> RewardModel:
    """The same weights in float32 on one CPU; on one device of its own where the process has no CPU of JAX."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:
        device = all_devices()[0]
    mesh = make_mesh(None, devices=[device])
    params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf, np.float32), device), model.params)
    options: dict[str, Any] = {
        "dtype": jnp.dtype("float32"),
        "attention": "blockwise",
        "readout": model.readout,
    }
    return replace(
        model,
        params=params,
        score_fn=make_score_fn(model.decoder, mesh=mesh, **options),
        mesh=mesh,
        dtype="float32",
    )


def _alone(model: RewardModel, conversations: Sequence[np.ndarray]) -> np.ndarray:
    """The score of each conversation, padded but not shared with another."""
    trees = tuple(build_tree([ids]) for ids in conversations)
    without_streams = replace(model, stream_fn=None)
    return np.concatenate(score_pass(without_streams, Workload("alone", trees), batch_tokens=None).scores)
