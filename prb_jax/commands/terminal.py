"""Standard output and standard error: tables, warnings, and streams that are closed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prb_jax.errors import PrbWarning, printable
from prb_jax.processes.sharing import process_index

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

_LOG_WIDTH = 120


def open_streams() -> None:
    """Open the standard streams that are closed: a file would get their number, and what is printed."""
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def replace_unknown_letters() -> None:
    """Print "?" for a letter that the terminal lacks: it is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def drop_output() -> None:
    """Send the rest of standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print our own warnings as one line each, of several processes from the first; others as they are."""
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
    """Print what rich can render, with the control characters of names in it made visible."""
    from rich.console import Console

    class Printable:  # cells hold names from data and configs
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for segment in console.render(table, options):  # pyright: ignore[reportArgumentType]
                yield segment._replace(text=printable(segment.text))

    # A log file has no width of its own, and 80 columns would fold the tables.
    in_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=_LOG_WIDTH if in_file else None).print(Printable())
