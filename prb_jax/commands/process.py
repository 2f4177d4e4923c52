"""The process of a verb: its streams, SIGTERM, and preparations before the first use of JAX.

One of these is the persistent compilation cache: a second run with the same shapes starts without compiling. The cache
is on the local disk; once a day, if its folder is too large, the programs unused for longest are deleted. (JAX can
limit the size itself, but then it reads every file of the folder for every program that it adds, under a lock
that all processes wait for.) A shared or remote folder (``gs://``) is slow and can hang, so it is used only if the
user sets ``JAX_COMPILATION_CACHE_DIR``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from prb_jax.errors import PrbWarning, printable
from prb_jax.platform.processes.job import INTERRUPTED, start_job
from prb_jax.platform.processes.sharing import process_index
from prb_jax.platform.storage.urls import with_styles

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

_LOG_WIDTH = 120

HUGE_PAGES = "glibc.malloc.hugetlb=1"
_TUNABLES = "GLIBC_TUNABLES"
_KERNEL_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""The kernel's mode; "[madvise]" means that programs may ask for huge pages."""


class Terminated(BaseException):
    """The process received SIGTERM."""


@contextlib.contextmanager
def until_terminated(options: argparse.Namespace) -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, so it is handled like Ctrl-C; only if the process is ours."""

    def terminate(number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_name == "_xla_gc_callback":
            # In JAX's part of garbage collection Python drops exceptions: send the signal again a little later.
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        raise Terminated

    if not options.own_process:
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def status_of_stop(stopped_by: str | None) -> int | None:
    """Return the exit status of a run that SIGTERM stopped and that reported it; raise KeyboardInterrupt for Ctrl-C."""
    if stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return None if stopped_by is None else INTERRUPTED


def start_with_huge_pages() -> None:
    """Start this process again, once, with huge pages for large arrays, if the C library and the kernel support them.

    On a CPU every program writes its activations into new memory, gigabytes in a training step, and the first touch of
    each small page takes time. glibc reads its settings only when a process starts. The user's own settings are kept.
    """
    if _TUNABLES in os.environ or not _have_huge_pages():
        return
    os.environ[_TUNABLES] = HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _have_huge_pages() -> bool:
    try:
        library, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        mode = _KERNEL_MODE.read_text()
    except (AttributeError, OSError, ValueError):  # another system or C library
        return False
    since = tuple(int(part) for part in number.split(".")[:2])
    return library == "glibc" and since >= (2, 35) and "[madvise]" in mode


def start(options: argparse.Namespace) -> None:
    """Prepare the process for a model."""
    hide_torch(options)
    prepare_jax(distributed=options.distributed, after_interrupt=options.after_interrupt)


def prepare_jax(*, distributed: bool = False, after_interrupt: str = "") -> None:
    """Enable the compilation cache, join the other processes, and check that a device exists."""
    enable_compilation_cache()
    if distributed:
        start_job(after_interrupt=after_interrupt)
    from prb_jax.platform.meshes import all_devices

    all_devices()  # on a machine without devices, fail before anything is read


def hide_torch(options: argparse.Namespace) -> None:
    """Hide torch from transformers and datasets, which would import it for two seconds.

    transformers looks for torch only once, at its import, so a later ``import torch`` elsewhere, e.g. in the file of a
    reward, works. Only if the process is ours.
    """
    if not options.own_process or "torch" in sys.modules:
        return
    os.environ.setdefault("USE_TORCH", "0")  # for datasets
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        from transformers.utils.import_utils import is_torch_available

        is_torch_available()
    finally:
        del sys.modules["torch"]


def open_streams() -> None:
    """Open closed standard streams: otherwise a file gets their number, and with it all printed text."""
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def replace_unknown_letters() -> None:
    """Print "?" for letters that the terminal lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Discard the rest of standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print our own warnings as one line each, with several processes only on the first; others are unchanged."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if not issubclass(category, PrbWarning):
            shown(message, category, *place)
        elif process_index() == 0:
            print(f"prb: warning: {printable(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PrbWarning)
        warnings.showwarning = show
        yield


def print_table(table: object) -> None:
    """Print an object that rich can render, with control characters in names made visible."""
    from rich.console import Console

    class Printable:  # cells hold names from data and configs
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for segment in console.render(table, options):  # pyright: ignore[reportArgumentType]
                yield segment._replace(text=printable(segment.text))

    # A log file has no width, and the default of 80 columns would fold the tables.
    in_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(file=with_styles(sys.stdout), width=_LOG_WIDTH if in_file else None).print(Printable())


MAX_BYTES = 4 * 1024**3

_DAY = 24 * 3600
_CHECKED = ".checked"  # file in the folder with the time of the last size check


def cache_folder() -> Path | str:
    """Return the folder of compiled programs: the first of

    1. ``$JAX_COMPILATION_CACHE_DIR``, taken as it is;
    2. ``$PRB_JAX_CACHE/programs/HOST``;
    3. ``$XDG_CACHE_HOME/prb_jax/programs/HOST``, that is ``~/.cache/prb_jax/programs/HOST``.

    HOST is the jax version and the processor: programs compiled for one CPU may contain instructions that another
    CPU lacks, and machines often share a home directory.
    """
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return chosen
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("PRB_JAX_CACHE") or caches / "prb_jax")
    return root / "programs" / f"jax-{version('jax')}-{_processor()}"


def enable_compilation_cache() -> Path | str | None:
    """Enable the cache before the first use of a device; return its folder.

    Returns None, without changes to jax, if the folder cannot be written: a missing cache costs time but never
    changes a result. ``JAX_ENABLE_COMPILATION_CACHE=false`` disables the cache as usual.
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
    """Delete the programs unused for longest until `most` bytes are left; check once a day.

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
    """Return a short name of this machine's instruction set."""
    features = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux: use the processor's name
        features += platform.processor()
    return f"{platform.machine() or 'cpu'}-{sha256(features.encode()).hexdigest()[:8]}"
