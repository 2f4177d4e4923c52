"""Prints how often the program of a matrix's gradient exchanges sums, and gathers tokens, on a mesh of four devices.

python -m tests.models.gradients_on_mesh
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from prb_jax.models.layers import sum_over_tokens


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    shapes = [jax.ShapeDtypeStruct((4, 256, size), jnp.float32, sharding=rows) for size in (96, 32)]
    program = jax.jit(sum_over_tokens, out_shardings=whole).lower(*shapes).compile().as_text() or ""
    print(program.count(" all-reduce("), program.count(" all-gather("))


if __name__ == "__main__":
    main()
