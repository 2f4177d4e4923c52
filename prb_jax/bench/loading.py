"""`prb bench load`: how fast a checkpoint is loaded, beside plain reading of its files, and what memory it takes."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.bench.table import shown
from prb_jax.checkpoints.load import LoadedParams, abstract_params, load_params
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.sharding import parameter_shardings

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LoadingResult:
    """Loading in one dtype, with the files in one state. Times are medians over rounds."""

    dtype: str = field(metadata=shown("dtype", meaning="of the arrays"))
    files_are: str = field(
        metadata=shown(
            "files are", meaning="cached in the machine's memory, or dropped from it before a reading"
        )
    )
    file_bytes: int
    bytes_read: int = field(metadata=shown("read", "{r.read_of}", "of the weight files, by this process"))
    shard_bytes: int
    seconds: float = field(metadata=shown("seconds", "{v:.2f}", "until the arrays are on the devices"))
    gb_per_second: float = field(metadata=shown("GB/s", "{v:.2f}", "of the bytes read"))
    plain_seconds: float
    plain_gb_per_second: float = field(
        metadata=shown(
            "plain GB/s", "{v:.2f}", "one thread that reads all files from start to end, as cat does"
        )
    )
    ratio: float = field(metadata=shown("of plain", "{v:.2f}", "median over rounds of the two rates' ratios"))
    peak_bytes_above_shards: int | None = field(
        metadata=shown(
            "host memory above",
            "{r.peak_megabytes:,.0f} MB",
            "the most beyond before, without the arrays where they are host memory; none where nobody tells",
        )
    )

    @property
    def read_of(self) -> str:
        """What was read, of all, and what the arrays take."""
        read, whole, arrays = (size / 1e9 for size in (self.bytes_read, self.file_bytes, self.shard_bytes))
        return f"{read:.2f} of {whole:.2f} GB, arrays {arrays:.2f} GB"

    @property
    def peak_megabytes(self) -> float:
        """The most host memory above the arrays."""
        return (self.peak_bytes_above_shards or 0) / 1e6


class _Pass(NamedTuple):
    seconds: float
    plain_seconds: float
    bytes_read: int
    shard_bytes: int
    above: int | None


def bench_loading(
    model: str | Path, *, mesh: str | None, dtype: str | None, rounds: int
) -> list[LoadingResult]:
    """Times loading of a folder or hub id onto a mesh: with its files cached, and where it can be, from the disk.

    Raises:
      CheckpointError, MeshError: as :func:`prb_jax.load`.
    """
    opened = open_model(model, LoadOptions(mesh=mesh, dtype=dtype))
    folder, config, devices, chosen = opened.folder, opened.decoder.config, opened.mesh, opened.dtype
    # The first load also starts threads and the device.
    report = _load(folder.path, config, devices, chosen).report
    files = [folder.path / name for name in report.files]
    states: list[tuple[str, Callable[[Sequence[Path]], Any]]] = [("cached", _read_all)]
    if hasattr(os, "posix_fadvise"):
        states.append(("on disk", _drop))
    results = []
    for state, prepare in states:
        passes = [_round(folder.path, files, config, devices, chosen, prepare) for _ in range(rounds)]
        results.append(_result(passes, files, dtype=chosen, state=state))
    return results


def _round(
    folder: Path,
    files: Sequence[Path],
    config: DecoderConfig,
    mesh: Mesh,
    dtype: str,
    prepare: Callable[[Sequence[Path]], Any],
) -> _Pass:
    prepare(files)
    plain = _read_all(files)
    prepare(files)
    gc.collect()  # the arrays of the pass before
    before = _restart_peak()
    start = time.perf_counter()
    loaded = _load(folder, config, mesh, dtype)
    seconds = time.perf_counter() - start
    peak = _status_bytes("VmHWM")
    shards = sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(loaded.params)
    )
    in_host_memory = shards if mesh.devices.flat[0].platform == "cpu" else 0
    above = None if before is None or peak is None else max(0, peak - before - in_host_memory)
    return _Pass(seconds, plain, loaded.report.bytes_read, shards, above)


def _load(folder: Path, config: DecoderConfig, mesh: Mesh, dtype: str) -> LoadedParams:
    shardings = parameter_shardings(abstract_params(config), mesh)
    loaded = load_params(folder, config, dtype=jnp.dtype(dtype), head_dtype=jnp.float32, shardings=shardings)
    jax.block_until_ready(loaded.params)
    return loaded


def _result(passes: Sequence[_Pass], files: Sequence[Path], *, dtype: str, state: str) -> LoadingResult:
    size = sum(path.stat().st_size for path in files)
    seconds = statistics.median(timed.seconds for timed in passes)
    plain = statistics.median(timed.plain_seconds for timed in passes)
    read = passes[0].bytes_read
    peaks = [timed.above for timed in passes if timed.above is not None]
    return LoadingResult(
        dtype=dtype,
        files_are=state,
        file_bytes=size,
        bytes_read=read,
        shard_bytes=passes[0].shard_bytes,
        seconds=seconds,
        gb_per_second=read / seconds / 1e9,
        plain_seconds=plain,
        plain_gb_per_second=size / plain / 1e9,
        ratio=statistics.median((read / timed.seconds) / (size / timed.plain_seconds) for timed in passes),
        peak_bytes_above_shards=max(peaks) if peaks else None,
    )


def _read_all(files: Sequence[Path]) -> float:
    """Seconds of reading them from start to end."""
    buffer = bytearray(_BLOCK)
    start = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def _drop(files: Sequence[Path]) -> None:
    """Asks the system to forget what it has cached of them."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # pages that are still to be written would stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _restart_peak() -> int | None:
    """Memory of this process now, from where its peak counts from here on; None where that cannot be."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    return None


def _status_bytes(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
