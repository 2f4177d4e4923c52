"""The persistent compilation cache: a second run of the same shapes starts without compiling.

The cache lies on the local disk; once a day the programs that were not used for longest are deleted from a folder
that is too large. (jax can keep a size itself, but then it reads every file of the folder for every program that it
adds, under a lock that all processes wait for.) A shared or remote folder (``gs://``) is slow
and can hang, so it is used only where the user asks for it by ``JAX_COMPILATION_CACHE_DIR``.
"""

import contextlib
import os
import platform
import time
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

MAX_BYTES = 4 * 1024**3

_DAY = 24 * 3600
_CHECKED = ".checked"
"""A file in the folder: when its size was looked at last."""


def cache_folder() -> Path | str:
    """Where compiled programs are kept: the first of

    1. ``$JAX_COMPILATION_CACHE_DIR``, taken as it is;
    2. ``$PRB_JAX_CACHE/programs/HOST``;
    3. ``$XDG_CACHE_HOME/prb_jax/programs/HOST``, that is ``~/.cache/prb_jax/programs/HOST``.

    HOST names the jax version and the processor: programs compiled for one CPU may hold instructions
    that another one lacks, and a home directory is often shared between machines.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if chosen:
        return chosen
    own = os.environ.get("PRB_JAX_CACHE")
    if own:
        root = Path(own)
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prb_jax"
    return root / "programs" / f"jax-{version('jax')}-{_processor()}"


def enable_compilation_cache() -> Path | str | None:
    """Switches the cache on, before the first use of a device; returns its folder.

    Returns None, and leaves jax as it is, where the folder cannot be written: a missing cache costs
    time and never a result. ``JAX_ENABLE_COMPILATION_CACHE=false`` switches it off as usual.
    """
    folder = cache_folder()
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        if not os.access(folder, os.W_OK):
            return None

    import jax

    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program counts towards the start-up time, small ones too.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if isinstance(folder, Path):
        with contextlib.suppress(OSError):  # another process deletes the same files
            delete_unused(folder)
    return folder


def delete_unused(folder: Path, *, most: int = MAX_BYTES) -> None:
    """Delete the programs that were not used for longest until `most` bytes are left; look once a day.

    Raises:
      OSError: the folder cannot be read or written.
    """
    checked = folder / _CHECKED
    if checked.exists() and time.time() - checked.stat().st_mtime < _DAY:
        return
    checked.touch()
    with os.scandir(folder) as files:
        facts = [(file.stat(), file.path) for file in files if file.name.endswith("-cache")]
    size = sum(fact.st_size for fact, _ in facts)
    for fact, path in sorted(facts, key=lambda one: max(one[0].st_atime, one[0].st_mtime)):
        if size <= most:
            return
        Path(path).unlink(missing_ok=True)
        size -= fact.st_size


def _processor() -> str:
    """A short name of this machine's instruction set."""
    features = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux: the machine's name has to do
        features += platform.processor()
    return f"{platform.machine() or 'cpu'}-{sha256(features.encode()).hexdigest()[:8]}"
