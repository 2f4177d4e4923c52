"""One process of a job with a mesh of two axes, the second of which computes late: started by ``test_job.py``.

python -m tests.platform.processes.late_process SECONDS
"""

import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from prb_jax.platform.meshes import make_mesh
from prb_jax.platform.processes.job import start_job
from prb_jax.platform.processes.sharing import process_index


def main(seconds: float) -> None:
    start_job()
    mesh = make_mesh("fsdp=2,tensor=2")
    if process_index() == 1:
        time.sleep(seconds)
    for axis in ("fsdp", "tensor", ("fsdp", "tensor")):
        split = NamedSharding(mesh, PartitionSpec(axis))
        rows = jax.make_array_from_callback((4,), split, lambda index: np.arange(4, dtype=np.float32)[index])
        print(jax.jit(lambda rows: rows.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(rows))


if __name__ == "__main__":
    main(float(sys.argv[1]))
