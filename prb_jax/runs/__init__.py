"""Run folders: identity, append-only rows, atomic writes, progress.

This module keeps the command line of this process for the records of its runs: empty in a program that calls the
library.
"""

from collections.abc import Sequence

_words: list[str] = []


def command_line() -> list[str]:
    """Return the words of the command, `prb` first; empty if Python code made the call."""
    return list(_words)


def set_command_line(words: Sequence[str]) -> None:
    """Record these words in the runs that start from now on."""
    _words[:] = words
