"""Attention over streams on eight devices against one: ``python -m tests.models.attention.kernel_on_mesh MESH...``.

Prints for each implementation and mesh the largest differences of the output and of the three gradients, in units of
their largest number, and how the output is split; and how many calls of cuDNN the program for CUDA has.
"""

import functools
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

TOKENS, WINDOW = 1024, 150


def devices(platform: str, sequence: int = 1) -> Any:
    """A mesh of one device that is not here."""
    device = SimpleNamespace(platform=platform)
    shape = {"data": 1, "fsdp": 1, "sequence": sequence, "tensor": 1}
    return SimpleNamespace(devices=np.asarray([device], object), shape=shape, size=1)


def inputs(tokens: int, head_dim: int) -> list[Any]:
    """q of four heads, k and v of two, and the gradient that comes back, of four streams."""
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    sizes = [(4, tokens, heads, head_dim) for heads in (4, 2, 2, 4)]
    return [jnp.asarray(rng.normal(size=size), jnp.float32) / 4 for size in sizes]


def batch_for(kind: str, parts: int) -> Any:
    """Four streams of people and of long conversations, which some parts have nothing of."""
    from prb_jax.trees.kernel_tables import KeyLayout, with_key_layout
    from prb_jax.trees.packing import pack_streams
    from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch
    from tests.trees.test_streams import people

    options = StreamOptions(
        tokens=TOKENS, streams=4, window=WINDOW, parts=parts, block=128, kernel=kind == "kernel"
    )
    if kind == "cudnn":
        options = with_key_layout(options, KeyLayout(longest=300, response=60, queries=128))
    trees = [*people(3, 2), *people(1, 1, profile=900, seed=3), *people(1, 1, profile=600, seed=4)]
    (packed,) = pack_streams(trees, StreamShape(TOKENS, 64), options)
    return make_stream_batch(trees, packed, options)


def compared(attend: Any, mesh: Any, batch: Any, alone: Any) -> dict[str, Any]:
    """What ``attend(*arrays, batch, mesh)`` gives on the mesh, and its derivatives, against one device.

    Args:
      batch, alone: the same streams, with tables for the mesh and for one device.
    """
    import jax
    import jax.numpy as jnp

    from prb_jax.platform.sharding import batch_sharding, partition_spec

    *arrays, towards = inputs(TOKENS, 32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(mesh: Any, batch: Any, towards: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, batch, mesh), *arrays)
        real = (jnp.asarray(batch.tokens) > 0)[..., None, None]
        return jnp.where(real, out, 0.0), *pull(jnp.where(real, towards, 0.0))

    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", "tokens", "heads", None)))
    arrays = [towards, *arrays]
    split = run(mesh, jax.device_put(batch, batch_sharding(mesh, 1)), *jax.device_put(arrays, place))
    pairs = [[np.asarray(x) for x in pair] for pair in zip(split, run(None, alone, *arrays), strict=True)]
    return {
        "differences": [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs],
        "shard": split[0].addressable_shards[0].data.shape,
    }


def main(meshes: list[str]) -> None:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from prb_jax.commands.process import enable_compilation_cache
    from prb_jax.models.attention import streams
    from prb_jax.models.attention.cudnn import cudnn_stream_attention
    from prb_jax.models.attention.stream_kernel import kernel_attention
    from prb_jax.models.attention.streams import attend_from_stream_reads, stream_attention
    from prb_jax.platform.meshes import make_mesh
    from prb_jax.platform.sharding import batch_sharding, partition_spec
    from tests.models.compiled import text_for_cuda

    enable_compilation_cache()

    def by_xla(q: Any, k: Any, v: Any, batch: Any, mesh: Any) -> Any:
        """Of all tokens; and of the read places alone, which is added to the first of them."""
        out = stream_attention(q, k, v, batch=batch, window=WINDOW, softcap=3.0, mesh=mesh)
        rows = jnp.arange(len(q))[:, None]
        places = jnp.asarray(batch.reads)
        at_reads = attend_from_stream_reads(q[rows, places], k, v, batch=batch, window=WINDOW, mesh=mesh)
        return out.at[:, : places.shape[1]].add(at_reads)

    def kernel(q: Any, k: Any, v: Any, batch: Any, mesh: Any) -> Any:
        return kernel_attention(q, k, v, batch=batch, window=WINDOW, mesh=mesh, interpret=True)

    def cudnn(q: Any, k: Any, v: Any, batch: Any, mesh: Any, implementation: Any = "xla") -> Any:
        return cudnn_stream_attention(
            q, k, v, batch=batch, window=WINDOW, mesh=mesh, implementation=implementation
        )

    found: dict[str, Any] = {}
    for text in meshes:
        mesh = make_mesh(text)
        parts = mesh.shape["sequence"]
        for name, attend in {"walk": by_xla, "batched": by_xla, "kernel": kernel, "cudnn": cudnn}.items():
            streams.walks = lambda batch, mesh, name=name: name == "walk"
            found[f"{name} {text}"] = compared(attend, mesh, batch_for(name, parts), batch_for(name, 1))
        place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", "tokens", "heads", None)))
        shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place) for x in inputs(TOKENS, 32)[:3]]
        batch = jax.device_put(batch_for("cudnn", parts), batch_sharding(mesh, 1))
        program = functools.partial(cudnn, mesh=mesh, implementation="cudnn")
        found[f"cudnn {text}"]["calls"] = text_for_cuda(program, *shapes, batch).count("custom_call @__cudnn")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
