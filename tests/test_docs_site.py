"""The site of `make docs`: every page has its place, the strict build finds no broken link or name, and a search finds
answers."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import prb_jax as prb

ROOT = Path(__file__).resolve().parents[1]
GUIDE = [
    "evaluate",
    "personalise",
    "train",
    "import",
    "scale",
    "formats",
    "statistics",
    "launch",
    "engines/trl_grpo",
]
NAV = {
    title: part
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    for title, part in entry.items()
}
QUESTIONS = {
    "rewardbench 2": "benchmarks/",
    "rewardbench 2 hub model": "benchmarks/",
    "rewardbench2 hugging face": "benchmarks/",
    "lora own data": "tutorials/train_lora/",
    "train on my own data": "tutorials/train_lora/",
    "fine-tune": "tutorials/train_lora/",
    "personalised reward trl": "tutorials/trl/",
    "personalized reward in TRL": "tutorials/trl/",
    "grpo": "tutorials/trl/",
    "tpu pod": "tutorials/tpu_pod/",
    "launch tpu": "tutorials/tpu_pod/",
    "compare two models": "tutorials/compare_two_models/",
    "significant difference": "tutorials/compare_two_models/",
    "significance": "tutorials/compare_two_models/",
    "what does margin mean": "glossary/",
    "meaning of columns": "glossary/",
    "coverage": "glossary/",
    "served": "glossary/",
    "ties": "glossary/",
    "rank group": "glossary/",
    "popularity": "glossary/",
    "blind": "glossary/",
    "csv columns": "formats/",
    "best of n": "best_of_n/",
    "llm as a judge": "judging/",
    "serve over http": "serving/",
    "multiple gpus": "scale/",
    "ppo": "ppo/",
    "resume a killed run": "command_line/",
    "peft adapter": "adapters/",
    "few shot": "personalise/",
    "install on gpu": "install/",
    "prism": "people/",
}
"""What people type, and the page that answers: the first or second that the search of the site finds."""


def pages(nav) -> list[str]:
    """The files that a part of the navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]


def test_every_page_has_one_place_of_four_kinds():
    docs = ROOT / "docs"
    files = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    programs = [f"engines/{path.stem}.md" for path in (docs / "engines").glob("*.py")]
    assert sorted(pages(NAV)) == sorted(["index.md", "launch.md", *files, *programs])
    assert {f"{name}.md" for name in GUIDE} <= set(pages(NAV))
    assert list(NAV) == ["Start", "Tutorials", "Guides", "Reference", "Explanations"]


def test_every_public_name_is_described_on_the_page_of_its_module():
    for name, home in prb._HOMES.items():
        page = ROOT / "docs" / "reference" / f"{home.split('.')[1]}.md"
        assert f"\n::: {home}.{name}\n" in page.read_text(), name
        assert f"`prb.{name}`" in (ROOT / "docs" / "reference" / "index.md").read_text(), name
    described = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(described) == sorted(f"{home}.{name}" for name, home in prb._HOMES.items())


def test_links_to_files_of_the_checkout_lead_to_pages():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    def shown(place: str, link: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place), meta={})
        return hooks.on_page_markdown(f"[x]({link})", page=page)[4:-1]

    assert shown("index.md", "docs/train.md") == "train.md"
    assert shown("index.md", "docs/plan.md#a") == "plan.md#a"
    assert shown("quickstart.md", "../README.md#the-first-table") == "index.md#the-first-table"
    assert shown("tutorials/trl.md", "../engines/trl_grpo.py") == "../engines/trl_grpo.md"
    assert shown("tutorials/tpu_pod.md", "../../launch/README.md") == "../launch.md"
    assert shown("index.md", "https://a.org/b.md") == "https://a.org/b.md"
    assert shown("evaluate.md", "picture.png") == "picture.png"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: make install-docs")
def test_the_strict_build_finds_nothing_broken(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in ["index.html", *(f"{name}/index.html" for name in GUIDE)]:
        assert (tmp_path / page).is_file()
    if shutil.which("node") is None:
        pytest.skip("the site is built; node is not installed, which would run its search")
    script = [shutil.which("node"), str(ROOT / "tests" / "site_search.js"), str(tmp_path), *QUESTIONS]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (question, answer), places in zip(QUESTIONS.items(), json.loads(done.stdout), strict=True):
        assert any(place.startswith(answer) for place in places[:2]), f"{question}: {places[:5]}"
