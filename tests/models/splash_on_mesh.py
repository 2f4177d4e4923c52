"""The splash kernel on a mesh of eight devices against one device: ``python -m tests.models.splash_on_mesh``.

Prints the largest differences of the output and of the three gradients, and how the outputs are split.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    from prb_jax.models.attention_splash import splash_attention
    from prb_jax.models.tree_mask import TreeLayout
    from prb_jax.sharding import make_mesh, partition_spec

    layout = TreeLayout(192, 2, 96)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, layout.tokens, heads, 32)), jnp.float32) / 4 for heads in (4, 2, 2)
    )
    towards = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    attend = functools.partial(
        splash_attention, layout=layout, prefix_lengths=jnp.asarray([192, 60]), window=120, block=128,
        interpret=True,
    )  # fmt: skip

    def both(q, k, v, mesh):
        def loss(q, k, v):
            out = attend(q, k, v, mesh=mesh)
            return jnp.sum(out * towards), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    run = jax.jit(both, static_argnames="mesh")
    (_, alone), alone_gradients = run(q, k, v, mesh=None)
    mesh = make_mesh("data=2,sequence=2,tensor=2")
    place = jax.sharding.NamedSharding(mesh, partition_spec(("batch", "tokens", "heads", None)))
    (_, out), gradients = run(*(jax.device_put(x, place) for x in (q, k, v)), mesh=mesh)
    pairs = zip((out, *gradients), (alone, *alone_gradients), strict=True)
    differences = [float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs]
    print(json.dumps({"differences": differences, "shard": out.addressable_shards[0].data.shape}))


if __name__ == "__main__":
    main()
