"""`prb bench load`: how fast a checkpoint loads, compared with plain reading of its files, and its memory use."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from prb_jax.measure.bench.figures import Figures, median_ratio, timed
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.models.checkpoints.load import LoadedParams, abstract_params, load_params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model

_BLOCK = 1 << 20


@dataclass(frozen=True)
class _Pass:
    seconds: float
    plain_seconds: float
    bytes_read: int
    shard_bytes: int
    above: int | None


def bench_loading(options: BenchOptions) -> list[Figures]:
    """Time loading of a folder or hub id onto a mesh: with cached files and, if possible, from the disk.

    Raises:
      CheckpointError, MeshError: see :func:`prb_jax.load`.
    """
    opened = open_model(options.model, LoadOptions(mesh=options.mesh, dtype=options.dtype))
    folder, config, dtype = opened.folder.path, opened.decoder.config, opened.dtype

    def load() -> LoadedParams:
        shardings = parameter_shardings(abstract_params(config), opened.mesh, config=config)
        kinds: Any = {"dtype": jnp.dtype(dtype), "head_dtype": jnp.float32}
        loaded = load_params(folder, config, shardings=shardings, **kinds)
        jax.block_until_ready(loaded.params)
        return loaded

    report = load().report  # the first load also starts threads and the device
    files = [folder / name for name in report.files]
    on_host = opened.mesh.devices.flat[0].platform == "cpu"
    states: list[tuple[str, Callable[[Sequence[Path]], Any]]] = [("cached", _read_all)]
    if hasattr(os, "posix_fadvise"):
        states.append(("on disk", _drop))
    results = []
    for state, prepare in states:
        passes = [_round(files, load, prepare, on_host=on_host) for _ in range(options.rounds)]
        results.append(_figures(passes, files, dtype=dtype, state=state))
    return results


def _round(
    files: Sequence[Path],
    load: Callable[[], LoadedParams],
    prepare: Callable[[Sequence[Path]], Any],
    *,
    on_host: bool,
) -> _Pass:
    prepare(files)
    plain = timed(lambda: _read_all(files))[0]
    prepare(files)
    gc.collect()  # free the arrays of the previous pass
    before = _restart_peak()
    seconds, loaded = timed(load)
    peak = _status_bytes("VmHWM")
    shards = sum(
        sum({str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}.values())
        for leaf in jax.tree.leaves(loaded.params)
    )
    above = None if before is None or peak is None else max(0, peak - before - (shards if on_host else 0))
    return _Pass(seconds, plain, loaded.report.bytes_read, shards, above)


def _figures(passes: Sequence[_Pass], files: Sequence[Path], *, dtype: str, state: str) -> Figures:
    size = sum(path.stat().st_size for path in files)
    seconds = statistics.median(one.seconds for one in passes)
    plain = statistics.median(one.plain_seconds for one in passes)
    read, shards = passes[0].bytes_read, passes[0].shard_bytes
    ratio = median_ratio([read / one.seconds for one in passes], [size / one.plain_seconds for one in passes])
    above = max((one.above for one in passes if one.above is not None), default=None)
    figures = Figures()
    add = figures.add
    add("dtype", dtype, "dtype")
    add("files_are", state, "files are")
    add("file_bytes", size)
    of_all = f"{read / 1e9:.2f} of {size / 1e9:.2f} GB, arrays {shards / 1e9:.2f} GB"
    add("bytes_read", read, "read", of_all)
    add("shard_bytes", shards)
    add("seconds", seconds, "seconds", "{:.2f}")
    add("gb_per_second", read / seconds / 1e9, "GB/s", "{:.2f}")
    add("plain_seconds", plain)
    add("plain_gb_per_second", size / plain / 1e9, "plain GB/s", "{:.2f}")  # one thread, from start to end
    add("ratio", ratio, "of plain", "{:.2f}")
    # peak above the start, without the arrays if they are in host memory
    add("peak_bytes_above_shards", above, "host memory above", f"{(above or 0) / 1e6:,.0f} MB")
    return figures


def _read_all(files: Sequence[Path]) -> None:
    """Read files from start to end."""
    buffer = bytearray(_BLOCK)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _drop(files: Sequence[Path]) -> None:
    """Ask the system to drop these files from its cache."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())  # unwritten pages would stay in the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _restart_peak() -> int | None:
    """Reset the peak of this process's memory, and return its current memory; None if that is not possible."""
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
