"""An attention kernel on eight devices against one: ``python -m tests.models.attention.kernel_on_mesh KERNEL``.

Prints the largest differences of the output and of the three gradients (not of cuDNN's, which only scores), how the
output is split, and how many calls of cuDNN the program for CUDA has.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.plain_process import plain_environment

ROOT = Path(__file__).resolve().parents[3]


def on_mesh(kernel: str) -> dict[str, Any]:
    """What this module prints, run in a process with devices of its own."""
    environment = plain_environment()
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.attention.kernel_on_mesh", kernel],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def devices(platform: str, sequence: int = 1) -> Any:
    """A mesh of one device that is not here."""
    device = SimpleNamespace(platform=platform)
    shape = {"data": 1, "fsdp": 1, "sequence": sequence, "tensor": 1}
    return SimpleNamespace(devices=np.asarray([device], object), shape=shape, size=1)


def main(kernel: str) -> None:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from prb_jax.commands.process import enable_compilation_cache
    from prb_jax.models.attention.cudnn import cudnn_attention
    from prb_jax.models.attention.splash import splash_attention
    from prb_jax.sharding import make_mesh, partition_spec
    from prb_jax.trees.batches import Bucket

    enable_compilation_cache()
    if kernel == "cudnn-streams":
        print(json.dumps(_streams()))
        return
    rng = np.random.default_rng(0)
    options: dict[str, Any]
    if kernel == "splash":
        bucket, lengths, window, head_dim = Bucket(192, 2, 96), [192, 60], 120, 32
        function, options = splash_attention, {"block": 128}
        mesh, axes = make_mesh("data=2,sequence=2,tensor=2"), ("batch", "tokens", "heads", None)
    else:
        bucket, lengths, window, head_dim = Bucket(64, 2, 24), [64, 20, 0, 33], 40, 16
        mesh, axes = make_mesh("data=2,fsdp=2,tensor=2"), ("batch", None, "heads", None)
        function, options = _by_xla(cudnn_attention), {}
    q, k, v = (
        jnp.asarray(rng.normal(size=(len(lengths), bucket.tokens, heads, head_dim)), jnp.float32) / 4
        for heads in (4, 2, 2)
    )
    towards = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    attend = functools.partial(
        function, bucket=bucket, prefix_lengths=jnp.asarray(lengths), window=window, **options
    )

    def both(q, k, v, mesh, interpret):
        def loss(q, k, v):
            out = attend(q, k, v, mesh=mesh, interpret=interpret)
            return jnp.sum(out * towards), out

        if kernel == "cudnn":  # for scoring
            return loss(q, k, v), ()
        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    run = jax.jit(both, static_argnames=("mesh", "interpret"))
    (_, alone), alone_gradients = run(q, k, v, mesh=None, interpret=True)
    place = jax.sharding.NamedSharding(mesh, partition_spec(axes))
    placed = [jax.device_put(x, place) for x in (q, k, v)]
    (_, out), gradients = run(*placed, mesh=mesh, interpret=True)
    pairs = zip((out, *gradients), (alone, *alone_gradients), strict=True)
    found: dict[str, Any] = {
        "differences": [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs],
        "shard": out.addressable_shards[0].data.shape,
    }
    if kernel == "cudnn":

        def program(q, k, v, lengths):
            given = {"prefix_lengths": lengths, "window": window, "mesh": mesh}
            return cudnn_attention(q, k, v, bucket=bucket, **given)

        of_trees = jax.ShapeDtypeStruct(placed[0].shape[:1], jnp.int32)
        found["calls"] = _calls_of_cudnn(program, placed, of_trees)
    print(json.dumps(found))


def _streams() -> dict[str, Any]:
    """Of cuDNN over packed streams."""
    import jax
    import jax.numpy as jnp

    from prb_jax.models.attention.cudnn import cudnn_stream_attention
    from prb_jax.sharding import batch_sharding, make_mesh, partition_spec
    from prb_jax.trees.key_tables import KeyLayout
    from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams, with_key_layout
    from prb_jax.trees.streams import make_stream_batch
    from tests.trees.test_streams import people

    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    options = StreamOptions(tokens=512, streams=4, window=40)
    options = with_key_layout(options, KeyLayout(longest=300, response=60, queries=128))
    trees = people(5, 1)
    (packed,) = pack_streams(trees, StreamShape(512, 32), options)
    batch = make_stream_batch(trees, packed, options)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(4, 512, heads, 16)), jnp.float32) / 4 for heads in (4, 2, 2))
    run = jax.jit(
        functools.partial(cudnn_stream_attention, window=40), static_argnames=("mesh", "implementation")
    )
    alone = run(q, k, v, batch=batch, implementation="xla")
    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", None, "heads", None)))
    placed = [jax.device_put(x, place) for x in (q, k, v)]
    batch = jax.device_put(batch, batch_sharding(mesh, 1))
    out = run(*placed, batch=batch, mesh=mesh, implementation="xla")

    def program(q, k, v, batch):
        return cudnn_stream_attention(q, k, v, batch=batch, window=40, mesh=mesh)

    return {
        "differences": [float(np.abs(np.asarray(out) - np.asarray(alone)).max())],
        "shard": out.addressable_shards[0].data.shape,
        "calls": _calls_of_cudnn(program, placed, batch),
    }


def _by_xla(function: Any) -> Any:
    """cuDNN's function with the arguments of a kernel: interpreted, it runs by XLA."""

    def attend(*arrays: Any, interpret: bool, **options: Any) -> Any:
        return function(*arrays, implementation="xla" if interpret else "cudnn", **options)

    return attend


def _calls_of_cudnn(program: Any, placed: Any, *facts: Any) -> int:
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_cudnn_version = lambda: 91_000
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding) for x in placed]
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    export = jax.export.export(jax.jit(program), platforms=("cuda",), disabled_checks=checks)
    return len(re.findall(r"custom_call @__cudnn", export(*shapes, *facts).mlir_module()))


if __name__ == "__main__":
    main(sys.argv[1])
