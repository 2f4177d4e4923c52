"""The site of `make docs`: every page has its place, and the strict build finds no broken link or name."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import prb_jax as prb

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ["evaluate", "personalise", "train", "import", "scale", "formats", "statistics"]


def pages(nav) -> list[str]:
    """The files that a part of the navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def test_every_page_has_one_place():
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])
    assert {f"{name}.md" for name in GUIDE} <= set(named)


def test_every_public_name_is_described():
    described = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "import.md").read_text(), re.MULTILINE)
    assert set(described) == {f"{home}.{name}" for name, home in prb._HOMES.items()}


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: make install-docs")
def test_the_strict_build_finds_nothing_broken(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in ["index.html", *(f"{name}/index.html" for name in GUIDE)]:
        assert (tmp_path / page).is_file()
