"""The README is the first page of the site, and links between it and the other pages lead to pages."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the README as the first page."""
    from mkdocs.structure.files import File

    text = re.sub(r"\]\(docs/", "](", README.read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to the README to the first page."""
    return markdown.replace("](../README.md", "](index.md")


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of Sphinx in docstrings, as of a function."""
    return re.sub(r":(?:func|class|mod|data|meth|attr|exc):(?=<)", "", html)
