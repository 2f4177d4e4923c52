"""A process that loads a checkpoint, once for each mesh, and prints what it saw; started by ``test_load_processes.py``.

Number of devices and of processes are fixed when JAX starts, and peak memory belongs to a whole process,
so none of this can run inside the test's own one. Of several meshes only the first has a meaningful peak.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mesh", required=True, nargs="+", help="data,fsdp,tensor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize")
    parser.add_argument(
        "--memory-only", action="store_true", help="without the sums, which take longer than loading"
    )
    parser.add_argument("--devices", type=int, required=True, help="of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()

    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.distributed.initialize(f"localhost:{args.port}", args.processes, args.process)
    for mesh in args.mesh:
        print(json.dumps(loaded(mesh, args)))


def loaded(sizes: str, args: argparse.Namespace) -> dict[str, Any]:
    """What is seen of the checkpoint on one mesh."""
    import jax
    import numpy as np

    from prb_jax.models.checkpoints.load import abstract_params, load_params
    from prb_jax.models.config.decoder import load_config

    config = load_config(args.folder)
    mesh = jax.make_mesh(
        tuple(int(size) for size in sizes.split(",")),
        ("data", "fsdp", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
        # matrices over both axes, vectors over one; the head's few outputs stay together
        spec: list[str | None] = [None] * len(leaf.shape)
        if len(leaf.shape) >= 2 and leaf.shape[-1] > 8:
            spec[-2:] = ["fsdp", "tensor"] if leaf.shape[-2] > 8 else [None, "tensor"]
        return jax.NamedSharding(mesh, jax.P(*spec))

    shardings = jax.tree.map(sharding, abstract_params(config, quantize=args.quantize))
    # the back end's own start-up cost is not the loader's
    jax.block_until_ready(jax.device_put(np.zeros(8), jax.local_devices()[0]))
    before = _status_bytes("VmRSS")
    params, report = load_params(
        args.folder, config, dtype=args.dtype, shardings=shardings, quantize=args.quantize
    )
    peak = _status_bytes("VmHWM") - before

    leaves = jax.tree.leaves(params)
    # distinct shards: devices that hold copies of one share its memory here
    local = sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in leaves
    )
    # position-weighted sums of local shards, so that a misplaced slice shows
    sums = {}
    for path, leaf in [] if args.memory_only else jax.tree_util.tree_flatten_with_path(params)[0]:
        total = 0.0
        for shard in {str(shard.index): shard for shard in leaf.addressable_shards}.values():
            values = np.asarray(shard.data, np.float64)
            grids = np.ogrid[
                tuple(slice(*part.indices(size)[:2]) for part, size in zip(shard.index, leaf.shape))
            ]
            weight = sum((axis + 1) * np.cos(grid) for axis, grid in enumerate(grids))
            total += float((values * weight).sum())
        sums[jax.tree_util.keystr(path)] = total
    return {
        "peak": peak,
        "local": local,
        "bytes_read": report.bytes_read,
        "sharded": all(leaf.sharding == want for leaf, want in zip(leaves, jax.tree.leaves(shardings))),
        "sums": sums,
        "torch": "torch" in sys.modules,
        "transformers": "transformers" in sys.modules,
    }


if __name__ == "__main__":
    main()
