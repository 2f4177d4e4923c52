"""Attention kernels on eight devices against one: ``python -m tests.models.attention.kernel_on_mesh``.

Prints for each kernel the largest differences of the output and of the three gradients (not of cuDNN's, which only
scores), how the output is split, and how many calls of cuDNN the program for CUDA has.
"""

import functools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np

BY_ROWS = "data=2,fsdp=2,tensor=2"


def devices(platform: str, sequence: int = 1) -> Any:
    """A mesh of one device that is not here."""
    device = SimpleNamespace(platform=platform)
    shape = {"data": 1, "fsdp": 1, "sequence": sequence, "tensor": 1}
    return SimpleNamespace(devices=np.asarray([device], object), shape=shape, size=1)


def inputs(rows: int, tokens: int, head_dim: int) -> list[Any]:
    """q of four heads, k and v of two."""
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(rows, tokens, n, head_dim)), jnp.float32) / 4 for n in (4, 2, 2)]


def compared(
    attend: Any, mesh: Any, arrays: list[Any], facts: Any, *, tokens: str | None = None
) -> dict[str, Any]:
    """What ``attend(mesh, facts, *arrays)`` gives on the mesh against one device: the output first.

    Args:
      facts: arrays whose rows are dealt over the mesh.
      tokens: the logical axis of the arrays' tokens.
    """
    import jax

    from prb_jax.sharding import batch_sharding, partition_spec

    run = jax.jit(attend, static_argnums=0)
    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", tokens, "heads", None)))
    split = run(mesh, jax.device_put(facts, batch_sharding(mesh, 1)), *jax.device_put(arrays, place))
    pairs = zip(split, run(None, facts, *arrays), strict=True)
    return {
        "differences": [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs],
        "shard": split[0].addressable_shards[0].data.shape,
    }


def splash() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from prb_jax.models.attention.splash import splash_attention
    from prb_jax.sharding import make_mesh
    from prb_jax.trees.batches import Bucket

    options: dict[str, Any] = {"bucket": Bucket(192, 2, 96), "window": 120, "block": 128, "interpret": True}
    arrays = inputs(2, 384, 32)
    towards = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)

    def attend(mesh: Any, lengths: Any, *arrays: Any) -> Any:
        of_mesh = functools.partial(splash_attention, prefix_lengths=lengths, mesh=mesh, **options)
        out, pull = jax.vjp(of_mesh, *arrays)
        return out, *pull(towards)

    mesh = make_mesh("data=2,sequence=2,tensor=2")
    return compared(attend, mesh, arrays, jnp.asarray([192, 60]), tokens="tokens")


def cudnn(arrays: list[Any], facts: Any, function: Any) -> dict[str, Any]:
    """Of ``function(*arrays, facts, mesh=..., implementation=...)``."""
    import jax
    import jax.numpy as jnp

    from prb_jax.sharding import make_mesh, partition_spec
    from tests.models.compiled import text_for_cuda

    mesh = make_mesh(BY_ROWS)

    def attend(mesh: Any, facts: Any, *arrays: Any) -> Any:
        return (function(*arrays, facts, mesh=mesh, implementation="xla"),)

    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", None, "heads", None)))
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place) for x in arrays]
    text = text_for_cuda(functools.partial(function, mesh=mesh), *shapes, facts)
    return compared(attend, mesh, arrays, facts) | {"calls": text.count("custom_call @__cudnn")}


def cudnn_of_trees() -> dict[str, Any]:
    import jax.numpy as jnp

    from prb_jax.models.attention.cudnn import cudnn_attention
    from prb_jax.trees.batches import Bucket

    def attend(q: Any, k: Any, v: Any, lengths: Any, **options: Any) -> Any:
        return cudnn_attention(
            q, k, v, bucket=Bucket(64, 2, 24), prefix_lengths=lengths, window=40, **options
        )

    return cudnn(inputs(4, 112, 16), jnp.asarray([64, 20, 0, 33]), attend)


def cudnn_of_streams() -> dict[str, Any]:
    from prb_jax.models.attention.cudnn import cudnn_stream_attention
    from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams, with_key_layout
    from prb_jax.trees.stream_tables import KeyLayout
    from prb_jax.trees.streams import make_stream_batch
    from tests.trees.test_streams import people

    options = StreamOptions(tokens=512, streams=4, window=40)
    options = with_key_layout(options, KeyLayout(longest=300, response=60, queries=128))
    trees = people(5, 1)
    (packed,) = pack_streams(trees, StreamShape(512, 32), options)

    def attend(q: Any, k: Any, v: Any, batch: Any, **options: Any) -> Any:
        return cudnn_stream_attention(q, k, v, batch=batch, window=40, **options)

    return cudnn(inputs(4, 512, 16), make_stream_batch(trees, packed, options), attend)


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from prb_jax.commands.process import enable_compilation_cache

    enable_compilation_cache()
    kernels = (splash, cudnn_of_trees, cudnn_of_streams)
    print(json.dumps({kernel.__name__: kernel() for kernel in kernels}))
