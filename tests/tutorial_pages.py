"""Runs the commands of tutorials, as a reader would who works through the pages in one folder.

    python -m tests.tutorial_pages FOLDER docs/tutorials/first_hour.md ...     # records the outputs again

A page has fenced blocks: of a language with a title (a file that the reader writes), `bash` (commands), and `text` (the
standard output of the commands before it, where a line `...` stands for any lines).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
ELLIPSIS = "..."
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None  # name of the file to write
    text: str
    start: int  # where the text starts in the page
    shown: str | None = None  # what the commands before a block of output printed


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match[1], match[2], match[3], match.start(3)) for match in found]


def follow(page: Path, folder: Path) -> Iterator[Block]:
    """Write the files and run the commands of a page in this folder; yield its outputs with what was printed."""
    for name in ("configs", "docs", "launch"):  # a reader works in a checkout
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    printed = ""
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            printed = _run(block.text, folder)
        elif block.language == "text":
            yield Block(block.language, None, block.text, block.start, shown=printed)


def _run(commands: str, folder: Path) -> str:
    """Run commands in bash, with `prb` and `python` of this environment; an error shows what they wrote."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    for name, words in {"prb": "-m prb_jax", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {"PATH": f"{programs.resolve()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"COLUMNS": "80", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-euc", f"trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n{commands}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        timeout=1500,
    )
    if done.returncode:
        raise AssertionError(
            f"{commands}\nstatus {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def shape(text: str) -> list[str]:
    """Return the lines of an output without numbers, rules and spaces, which differ between machines."""
    lines = (re.sub(r"[\s─━│┃╇┼]+", " ", _NUMBER.sub("#", line)).strip() for line in text.splitlines())
    # NumPy writes the numbers of an array with the same width.
    return [re.sub(r"(?<=\[) | (?=\])", "", line) for line in lines if line]


def has_shape(printed: str, shown: str) -> bool:
    """Whether the page shows these lines, in this order and without a gap but for `...`."""
    lines = shape(printed)
    for part in re.split(rf"^\s*{re.escape(ELLIPSIS)}\s*$", shown, flags=re.MULTILINE):
        wanted = shape(part)
        places = [k for k in range(len(lines) - len(wanted) + 1) if lines[k : k + len(wanted)] == wanted]
        if not places:
            return False
        lines = lines[places[0] + len(wanted) :]
    return ELLIPSIS in shown or not lines


def main(folder: Path, pages: list[Path]) -> None:
    """Record the outputs of these pages again, except those that a line `...` shortens."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in pages:
        printed: list[str] = []
        try:
            printed += (block.shown or "" for block in follow(page, folder))
        finally:  # keeps the outputs before a command that fails
            text = page.read_text(encoding="utf-8")
            outputs = [block for block in blocks(page) if block.language == "text"]
            for block, shown in reversed(list(zip(outputs, printed))):
                if block.text.strip() == ELLIPSIS or f"\n{ELLIPSIS}\n" not in f"\n{block.text}":
                    lines = "".join(f"{line.rstrip()}\n" for line in shown.strip("\n").splitlines())
                    text = text[: block.start] + lines + text[block.start + len(block.text) :]
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(page) for page in sys.argv[2:]])
