"""A step over packed streams on meshes of several devices: its gradients, and how many programs it has.

python -m tests.training.mesh_steps OUT DEVICES MESH...

With "/kernel" behind a mesh, attention is that of the kernel for TPUs, with "/cudnn" that of cuDNN, run by XLA.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any


def one_step(mesh: Any, *, by: str = "") -> dict[str, Any]:
    """The loss of a step, sums that tell its gradients apart, and what it was computed in."""
    import jax
    import numpy as np

    from prb_jax.models.attention.choice import StreamAttention
    from prb_jax.training.config import BatchSettings
    from prb_jax.training.data import Examples
    from prb_jax.training.microbatches import labelled, plan_layout
    from prb_jax.training.step import add_gradients
    from prb_jax.training.trainer import WEIGHTS
    from tests.training.small_batches import build, initial_params, small_config
    from tests.training.test_streams import of_users

    config = small_config()
    step, state, frozen = build(config, params=initial_params(config), mesh=mesh, remat="dots")
    comparisons, trees = of_users(12, profile=70)
    count = len(trees)
    tables: Any = {"": "blocks", "kernel": "steps", "cudnn": "keys"}
    attention = StreamAttention(by, tables[by], mesh.shape["sequence"])
    batch = BatchSettings(comparisons=count, tokens=256 * mesh.shape["sequence"])
    options = {"config": config, "mesh": mesh, "attention": attention, "batch": batch}
    layout = plan_layout(trees, [np.arange(count)], per_step=count, steps=10, **options)
    examples = Examples(comparisons, comparisons, trees=trees)
    batches = labelled(layout, examples, np.arange(count), np.zeros(count, np.int32))
    added = add_gradients(step, state, frozen, batches)
    rng = np.random.default_rng(0)
    sums = [
        float((np.asarray(leaf) * rng.normal(size=leaf.shape)).sum() / np.linalg.norm(leaf))
        for leaf in jax.tree.leaves(added.gradient[WEIGHTS])
    ]
    metrics = step.update(state, added)[1]
    programs: Any = step.gradients
    return {
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "gradients": sums,
        "streams": [list(part.batch.tokens.shape) for part in batches],
        "programs": programs._cache_size(),
    }


def main(out: str, devices: int, meshes: list[str]) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_disable_most_optimizations", True)

    from prb_jax.models.attention import cudnn, stream_kernel
    from prb_jax.platform.meshes import make_mesh

    alone = make_mesh(devices=jax.devices()[:1])
    steps = {"alone": one_step(alone)}
    by_xla = functools.partial(stream_kernel.kernel_attention, interpret=True)
    stream_kernel.kernel_attention = by_xla
    cudnn.cudnn_stream_attention = functools.partial(cudnn.cudnn_stream_attention, implementation="xla")
    for spec in meshes:
        mesh, _, by = spec.partition("/")
        steps[spec] = one_step(make_mesh(mesh), by=by)
    Path(out).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
