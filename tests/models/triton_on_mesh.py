"""The kernels for NVIDIA GPUs on a mesh of eight devices against one device: ``python -m tests.models.triton_on_mesh``.

Prints the largest differences of the output and of the three gradients, how the outputs are split, and how many
kernels the program for CUDA has.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from prb_jax.models.attention_triton import triton_attention
    from prb_jax.models.attention_triton_kernels import KernelBlocks
    from prb_jax.models.tree_mask import TreeLayout
    from prb_jax.sharding import make_mesh, partition_spec

    layout = TreeLayout(64, 2, 24)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(4, layout.tokens, heads, 16)), jnp.float32) / 4 for heads in (4, 2, 2)
    )
    towards = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    blocks = KernelBlocks(32, 16, warps=4, stages=1)
    attend = functools.partial(
        triton_attention, layout=layout, prefix_lengths=jnp.asarray([64, 20, 0, 33]), window=40,
        blocks=(blocks, blocks),
    )  # fmt: skip

    def both(q, k, v, mesh, interpret):
        def loss(q, k, v):
            out = attend(q, k, v, mesh=mesh, interpret=interpret)
            return jnp.sum(out * towards), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    run = jax.jit(both, static_argnames=("mesh", "interpret"))
    (_, alone), alone_gradients = run(q, k, v, mesh=None, interpret=True)
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", None, "heads", None)))
    placed = [jax.device_put(x, place) for x in (q, k, v)]
    (_, out), gradients = run(*placed, mesh=mesh, interpret=True)
    pairs = zip((out, *gradients), (alone, *alone_gradients), strict=True)
    differences = [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs]
    lowered = run.trace(*placed, mesh=mesh, interpret=False).lower(lowering_platforms=("cuda",)).as_text()
    kernels = len(re.findall(r"custom_call @\S*triton", lowered))
    shard = out.addressable_shards[0].data.shape
    print(json.dumps({"differences": differences, "shard": shard, "kernels": kernels}))


if __name__ == "__main__":
    main()
