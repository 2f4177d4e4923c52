"""Every command of every worked example runs, in the order of the pages, and prints what the page shows."""

import difflib
import itertools
import re

import pytest

from tests.test_docs_site import NAV, pages
from tests.tutorial_pages import ROOT, blocks, follow, has_shape, shape

TUTORIALS = [ROOT / "docs" / name for name in pages(NAV["Tutorials"]) if not name.endswith("index.md")]
EXAMPLES = [
    page for page in sorted((ROOT / "docs").glob("*.md")) if "bash" in {one.language for one in blocks(page)}
]
NEEDS = {"trl": ("torch", "trl"), "tpu_pod": ("libtpu",), "ppo": ("torch",)}
PICTURES = {
    "audit": ("audit.html", "audit.svg"),
    "best_of_n": ("correlation.html", "correlation.svg"),
    "compare": ("leaderboard.html", "leaderboard.svg"),
    "benchmarks": ("sums.html", "benchmarks.svg"),
    "people": ("people.html", "people.svg"),
}
"""By page: a page of results that its commands write, and the picture of the results in docs/."""
each_page = pytest.mark.parametrize("page", TUTORIALS + EXAMPLES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a reader who works through all pages."""
    return tmp_path_factory.mktemp("tutorials")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_page
def test_commands_run_and_print_what_the_page_shows(page, folder, monkeypatch):
    for module in NEEDS.get(page.stem, ()):
        pytest.importorskip(module)
    uses_quickstart = page != TUTORIALS[0] and "runs/quickstart" in page.read_text(encoding="utf-8")
    if uses_quickstart and not (folder / "runs" / "quickstart").is_dir():
        list(follow(TUTORIALS[0], folder))
    for block in follow(page, folder):
        assert has_shape(block.shown, block.text), "\n".join(
            difflib.unified_diff(shape(block.text), shape(block.shown), "the page", "printed", lineterm="")
        )
    if page.stem in PICTURES:
        monkeypatch.syspath_prepend(ROOT / "docs")
        from report_picture import picture  # pyright: ignore[reportMissingImports]

        results, drawn = PICTURES[page.stem]
        now, before = (
            picture((folder / results).read_text("utf-8")),
            (ROOT / "docs" / drawn).read_text("utf-8"),
        )
        assert labels(now) == labels(before)


def labels(svg: str) -> set[str]:
    """Return the texts of a picture without their numbers, and without the sentence, whose lines break elsewhere."""
    texts = re.findall(r"<text (?!class=\"answer\")[^>]*>(.*?)</text>", svg)
    return {" ".join(shape(text)) for text in texts}


@each_page
def test_a_page_shows_outputs_and_its_programs_compile(page):
    found = blocks(page)
    assert {"bash", "text"} <= {block.language for block in found}
    for before, block in itertools.pairwise(found):
        if block.language == "text":
            assert before.language == "bash"
            assert block.text.strip(), f"{page.name}: no output after {before.text}"
    for block in found:
        if block.language == "python":
            compile(block.text, str(block.title), "exec")
            assert (
                "".join(other.text for other in found if other.language == "bash").count(
                    f"python {block.title}"
                )
                == 1
            )


def test_every_tutorial_has_its_place():
    there = {*(ROOT / "docs" / "tutorials").glob("*.md")}
    assert {*TUTORIALS} == there - {ROOT / "docs" / "tutorials" / "index.md"}


def test_the_first_page_shows_the_table_of_the_first_hour():
    printed = next(block.text for block in blocks(TUTORIALS[0]) if block.language == "text")
    table = next(block.text for block in blocks(ROOT / "README.md") if block.language == "text")
    assert printed.startswith(table)
    assert len(printed.removeprefix(table).splitlines()) == 3  # the places of the results


def test_outputs_are_compared_without_numbers_but_with_words():
    printed = "model  accuracy\n─────────\nblind  0.513 [0.48..0.54]\nseen   1,200\n"
    assert has_shape(printed, "model accuracy\nblind 0.4 [0.3..0.5]\nseen 7\n")
    assert has_shape(printed, "model accuracy\n...\nseen 7\n")
    assert not has_shape(printed, "model accuracy\nblind 0.4 [0.3..0.5]\n")
    assert not has_shape(printed, "model accuracy\nseen 7\n...\n")
    assert not has_shape(printed, "model margin\nblind 0.4 [0.3..0.5]\nseen 7\n")
    assert has_shape("scores [-0.49252546 -2.4594975 ]\n", "scores [-0.4918862 -2.4609394]\n")
