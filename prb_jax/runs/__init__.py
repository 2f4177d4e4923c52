"""Run folders: identity, append-only rows, atomic writes, progress.

Here stands the command line of this process, as the records of its runs tell it: empty in a program that calls the
library.
"""

from collections.abc import Sequence

_words: list[str] = []


def command_line() -> list[str]:
    """Return the words of the command, `prb` first; none where Python called."""
    return list(_words)


def set_command_line(words: Sequence[str]) -> None:
    """Record these words from now on."""
    _words[:] = words
