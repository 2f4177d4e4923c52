"""Mixtures of experts on eight devices against one: ``python -m tests.models.experts_on_mesh FOLDER MESH...``.

Prints for each mesh the largest differences of scores and of gradients (relative to the longest gradient), of loads,
and the shape of a device's part of the gate matrices.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any


def main(folder: str, *meshes: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    import numpy as np

    from prb_jax.models.checkpoints.load import abstract_params, load_params
    from prb_jax.models.config.decoder import load_config
    from prb_jax.models.model import parameter_shardings
    from prb_jax.models.readouts.score_tree import score_stream
    from prb_jax.platform.meshes import make_mesh
    from prb_jax.trees.packing import pack_streams
    from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch
    from tests.trees.test_streams import people

    config = load_config(Path(folder))
    trees = [
        replace(tree, prefix=tree.prefix % 250, responses=tuple(ids % 250 for ids in tree.responses))
        for tree in people(8, 2)
    ]

    def run(mesh: Any) -> tuple[Any, ...]:
        parts = 1 if mesh is None else mesh.shape["sequence"]
        rules = {"window": config.sliding_window, "taps": config.taps, "parts": parts}
        options = StreamOptions(tokens=512, streams=4, **rules)
        (packed,) = pack_streams(trees[:4], StreamShape(512, 16), options)
        batch = make_stream_batch(trees[:4], packed, options)
        shardings = (
            None if mesh is None else parameter_shardings(abstract_params(config), mesh, config=config)
        )
        params = load_params(folder, config, shardings=shardings).params
        score = partial(
            score_stream, config=config, dtype=jnp.dtype("float32"), mesh=mesh, differentiated=True
        )

        def total(params: Any) -> Any:
            loads: list[jax.Array] = []
            scores = score(params, batch, loads=loads)
            used = scores[..., 0] * (jnp.asarray(batch.reads) > 0)
            return (used * jnp.cos(jnp.arange(used.size).reshape(used.shape))).sum(), (used, loads[0])

        gradients, (scores, loads) = jax.jit(jax.grad(total, has_aux=True))(params)
        part = params["layers"]["gate"].addressable_shards[0].data.shape
        return *jax.device_get((scores, gradients, loads)), part

    expected = run(None)
    assert np.std(expected[0]) > 0.1
    longest = max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected[1]))
    found = {}
    for text in meshes:
        scores, gradients, loads, part = run(make_mesh(text))
        off = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / longest, gradients, expected[1])
        found[text] = {
            "scores": float(np.abs(scores - expected[0]).max()),
            "gradients": float(max(jax.tree.leaves(off))),
            "loads": float(np.abs(loads - expected[2]).max()),
            "part": list(part),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
