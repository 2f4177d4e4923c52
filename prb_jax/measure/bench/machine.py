"""`prb bench machine`: the devices that JAX finds, and the peak speed of one device in matrix products."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from prb_jax.errors import RunError
from prb_jax.measure.bench.figures import Figures
from prb_jax.measure.bench.rivals.transformers import import_torch
from prb_jax.models.flops import measured_peak
from prb_jax.models.layers import multiplies_bfloat16
from prb_jax.version import versions

PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "trl", "vllm")


@dataclass(frozen=True)
class Machine:
    """Devices of this process, all of one kind."""

    platform: str
    kind: str
    count: int
    memory_bytes: int  # of one device; of the whole machine for CPUs
    cores: int
    peak_gflops: dict[str, float]  # of one device, by dtype, accumulated in float32
    versions: dict[str, str | None]
    torch_device: str | None = None  # torch's device, if JAX has a GPU and torch is installed

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Machine:
        """Return the machine that JSON describes; other fields are ignored."""
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})

    @property
    def words(self) -> dict[str, str]:
        """Memory of a device, peaks and versions as text."""
        peaks = (f"{dtype} {peak:,.0f} GFLOP/s" for dtype, peak in self.peak_gflops.items())
        installed = (f"{name} {version}" for name, version in self.versions.items() if version)
        return {
            "memory": f"{self.memory_bytes / 2**30:,.1f} GiB",
            "matrix products": ", ".join(peaks),
            "versions": ", ".join(installed),
        }


def bench_machine() -> Figures:
    """Return the facts of :func:`this_machine` as figures."""
    machine, figures = this_machine(), Figures()
    words = machine.words
    shown = {
        "platform": ("platform", "{}"), "kind": ("device", "{}"), "count": ("devices", "{}"),
        "memory_bytes": ("memory", words["memory"]), "cores": ("CPU cores", "{}"),
        "peak_gflops": ("matrix products", words["matrix products"]), "versions": ("versions", words["versions"]),
    }  # fmt: skip
    for name, value in asdict(machine).items():
        figures.add(name, value, *shown.get(name, ()))
    return figures


def this_machine() -> Machine:
    """Return the devices and their peaks: in float32, and in bfloat16 if they have instructions for it."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    dtypes = ("float32",) if on_cpu and not multiplies_bfloat16() else ("bfloat16", "float32")
    return Machine(
        platform=device.platform,
        kind=_processor() if on_cpu else device.device_kind,
        count=jax.device_count(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if on_cpu else limit,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        peak_gflops={dtype: measured_peak(dtype) / 1e9 for dtype in dtypes},
        versions={"python": platform.python_version(), **versions(PACKAGES)},
        torch_device=_torch_device() if device.platform == "gpu" else None,
    )


def peak_memory() -> dict[str, Any]:
    """Return the peak bytes in use so far: on one device if devices report it, else in this process."""
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if any(used):
        return {"peak_memory_bytes": max(filter(None, used)), "peak_memory_of": "device"}
    unit = 1 if sys.platform == "darwin" else 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory_bytes": size, "peak_memory_of": "process"}


def _torch_device() -> str | None:
    try:
        return "cuda" if import_torch().cuda.is_available() else "cpu"
    except RunError:
        return None


def _processor() -> str:
    """Return the name of the processor if the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
