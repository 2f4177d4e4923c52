"""Pages of the site that are files of the checkout: the README is the first page, `launch/README.md` a guide, and each
complete program of `docs/engines` has a page with its text. Links between them lead to pages."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "launch/README.md": "launch.md"}
"""Pages by their file in the checkout."""
SEARCHED_FIRST = {"tutorials": 4, "glossary.md": 2, "benchmarks.md": 3, "engines": 0.5, "reference": 0.5}
"""Weights in the search, by folder or page."""
LINK = re.compile(r"\]\((?!\w+:)([\w./-]+\.(?:md|py|png|svg|html))")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for program in sorted((ROOT / "docs" / "engines").glob("*.py")):
        code = program.read_text(encoding="utf-8")
        text = f"# `{program.name}`, the whole file\n\n[Engines](../engines.md) explains it.\n\n```python\n{code}```\n"
        files.append(File.generated(config, f"engines/{program.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links to files of the checkout to their pages; a search finds some pages first."""
    place = page.file.src_uri
    page.meta.setdefault("search", {"boost": SEARCHED_FIRST.get(posixpath.dirname(place) or place, 1)})
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(place, f"docs/{place}")

    def to_page(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        target = PAGES.get(target, target.removeprefix("docs/"))
        target = re.sub(r"^(engines/\w+)\.py$", r"\1.md", target)
        return f"]({posixpath.relpath(target, posixpath.dirname(place) or '.')}"

    return LINK.sub(to_page, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of Sphinx in docstrings, e.g. of a function."""
    return re.sub(r":(?:func|class|mod|data|meth|attr|exc):(?=<)", "", html)
