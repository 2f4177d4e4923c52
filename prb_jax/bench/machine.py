"""`prb bench machine`: which devices JAX finds, and the most that one of them reaches in matrix products."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

import jax

from prb_jax.bench.rivals.transformers import import_torch
from prb_jax.bench.table import shown
from prb_jax.errors import RunError
from prb_jax.models.flops import measured_peak
from prb_jax.version import versions

PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "trl", "vllm")


@dataclass(frozen=True)
class Machine:
    """The devices of this process, all of one kind.

    Attributes:
      memory_bytes: of one device; of the whole machine where the devices are CPUs.
      peak_gflops: of one device, by dtype.
      versions: of the packages that compute; None for one that is not installed.
      torch_device: that torch computes on, where JAX has a GPU and torch is installed.
    """

    platform: str = field(metadata=shown("platform"))
    kind: str = field(metadata=shown("device"))
    count: int = field(metadata=shown("devices"))
    memory_bytes: int = field(
        metadata=shown("memory", "{r.memory_gib:,.1f} GiB", "of a device, or of the machine of CPUs")
    )
    cores: int = field(metadata=shown("CPU cores", meaning="that this process may use"))
    peak_gflops: dict[str, float] = field(
        metadata=shown("matrix products", "{r.peaks}", "the best on one device, accumulated in float32")
    )
    versions: dict[str, str | None] = field(metadata=shown("versions", "{r.installed}"))
    torch_device: str | None = None

    @property
    def memory_gib(self) -> float:
        """Memory of a device in GiB."""
        return self.memory_bytes / 2**30

    @property
    def peaks(self) -> str:
        """The peak of each dtype in words."""
        return ", ".join(f"{dtype} {peak:,.0f} GFLOP/s" for dtype, peak in self.peak_gflops.items())

    @property
    def installed(self) -> str:
        """The packages that are installed, with their versions."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)


def bench_machine() -> Machine:
    """Return the devices and their peak: of CPUs in float32, elsewhere also in bfloat16."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    dtypes = ("float32",) if on_cpu else ("bfloat16", "float32")
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
    """Return the most bytes that were in use so far: on one device where devices tell, else in this process."""
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
    """The name of the processor where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
