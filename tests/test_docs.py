"""The README and docs/ name only files, functions, flags and commands that there are, and the walk is walked."""

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import threading
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import prb_jax as prb
from prb_jax import cli
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.building.settings import BuildSettings
from prb_jax.records.files import read_rows
from prb_jax.records.options import flat_settings
from prb_jax.runs.rows import RowFile
from prb_jax.scoring.open_scorer import open_scorer
from prb_jax.training.config import TrainSettings
from tests.test_rooms import ORDER
from tests.tiny_models import write_model_without_torch
from tests.tiny_tokenizer import write_tokenizer
from tests.tutorial_pages import FENCE, blocks

ROOT = Path(__file__).resolve().parents[1]
WALK = ROOT / "docs" / "walk.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"`(prb_jax/\S+\.py)`")
# their results are kept in a process
ONCE_A_PROCESS = {f"prb_jax/models/{name}.py" for name in ("model", "parameter", "config/families")}
FUNCTIONS = re.compile(r"`(prb_jax/\S+\.py)` \(((?:`[\w.]+`(?:, )?)+)\)")  # in brackets behind their file
STEP = re.compile(r"^ *(?:\d+\.|-) `(prb_jax/\S+\.py)`: `([\w.]+)`\.", re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def spans(page: Path) -> list[str]:
    """The pieces of code within the sentences and tables of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = "\n".join(line for line in text.splitlines() if line[:4] != "    ")
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def code_lines(page: Path) -> list[str]:
    """The lines of its indented code, and of fenced commands and programs; a continued command is one line."""
    text = page.read_text(encoding="utf-8")
    fenced = [block.text.replace("\\\n", " ") for block in blocks(page) if block.language != "text"]
    indented = [line for line in FENCE.sub("", text).splitlines() if line[:4] == "    "]
    return [line.strip() for line in (*indented, *"".join(fenced).splitlines())]


def command_of(text: str) -> list[str] | None:
    """The words after `prb` of a command line, without comment, redirection and variables before it."""
    command = re.match(r"(?:[A-Z_]+=\S+ )*prb (.*)", text)
    return None if command is None else shlex.split(re.split(r" > ", command[1])[0], comments=True)


@cache
def parsers() -> dict[str, ArgumentParser]:
    """The parser of each verb, those of sub-verbs as "bench score"."""

    def below(parser: ArgumentParser, name: str) -> Iterator[tuple[str, ArgumentParser]]:
        groups = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
        yield from [] if groups else [(name, parser)]
        for group in groups:
            for verb, sub in group.choices.items():
                yield from below(sub, f"{name} {verb}".strip())

    return dict(below(cli.parser(), ""))


SETTINGS = {
    "train": flat_settings(TrainSettings()),
    "ppo": flat_settings(PpoSettings()),
    "build": flat_settings(BuildSettings()),
}
"""The keys of the verbs that take a config."""


def check_settings(verb: str, words: list[str]) -> None:
    for key in (word.partition("=")[0] for word in words if re.match(r"[a-z_.]+=", word)):
        assert key in SETTINGS[verb], f"{key}: no setting of prb {verb}"


@each_page
def test_command_lines_are_parsed(page):
    for line in code_lines(page):
        words = command_of(line)
        if words is None:
            continue
        try:
            options = cli.parser().parse_args(words)
        except SystemExit as end:
            if end.code:  # 0 after --help
                pytest.fail(f"not a command line: {line}")
            continue
        if words[0] in SETTINGS:
            check_settings(words[0], options.overrides)


@each_page
def test_commands_within_sentences_have_a_verb_and_flags_that_there_are(page):
    for words in filter(None, map(command_of, spans(page))):
        if words[0] in ("VERB", "--help", "--version"):
            continue
        verbs = [name for name in parsers() if f"{' '.join(words)} ".startswith(f"{name} ")]
        group = [parser for name, parser in parsers().items() if name.startswith(f"{words[0]} ")]
        chosen = [parsers()[verbs[0]]] if verbs else group
        assert chosen, f"prb {' '.join(words)}: no such verb"
        for word in words:
            if word.startswith("--"):
                assert any(word in parser._option_string_actions for parser in chosen), f"{words}: no {word}"
        if words[0] in SETTINGS:
            check_settings(words[0], words[1:])


@each_page
def test_flags_and_settings_alone_belong_to_a_command(page):
    flags = {flag for parser in parsers().values() for flag in parser._option_string_actions}
    known = {name for settings in SETTINGS.values() for name in settings}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for span in spans(page):
        if span.startswith("--"):
            assert span.split()[0] in flags, f"{span}: no command has this flag"
        if (setting := re.fullmatch(r"([a-z_]+)\.(\w+|\*)(=.*)?", span)) and setting[1] in sections:
            assert setting[2] == "*" or f"{setting[1]}.{setting[2]}" in known, span


@each_page
def test_files_are_there(page):
    folders = "prb_jax|tests|configs|launch|docs|notebooks"
    for name in spans(page) + code_lines(page):
        for path in re.findall(rf"(?<![\w/.])(?<!inspect eval )((?:{folders})/[\w./*-]*)", name):
            if "NAME" not in path:
                assert list(ROOT.glob(path.rstrip("."))), f"{path}: no such file"


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.is_file(), target
        if not heading:  # a picture has no headings
            continue
        headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}, target


@each_page
def test_names_of_python_are_there(page):
    for text in spans(page) + code_lines(page):
        for name in re.findall(r"(?<![\w./])(?:prb|prb_jax|rm)(?:\.[A-Za-z_]\w*)+", text):
            if not name.endswith((".py", ".json")):
                assert find(name) is not None, f"{page.name}: {name}"
        for module, names in re.findall(r"^from (prb_jax[\w.]*) import (.*)$", text):
            for name in re.split(r", *", names):
                assert find(f"{module}.{name}") is not None, text


def find(name: str) -> object | None:
    """What a dotted name stands for, as `prb` and `rm` are called in the examples."""
    first, *rest = name.split(".")
    if first == "rm":
        return (
            find(".".join(["prb_jax.RewardModel", *rest[:1]]))
            or prb.RewardModel.__dataclass_fields__[rest[0]]
        )
    if rest and rest[0] in prb.__all__:
        return reduce(lambda value, part: getattr(value, part, None), rest, prb)
    parts = ["prb_jax", *rest]
    for end in range(len(parts), 0, -1):
        try:
            return reduce(getattr, parts[end:], importlib.import_module(".".join(parts[:end])))
        except ModuleNotFoundError:
            continue
        except AttributeError:
            return None
    return None


@cache
def defined(path: Path) -> frozenset[str]:
    """Names of functions, classes, variables and arguments of a file, methods and fields also as Class.name."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name, body=body):
                names |= {
                    name,
                    *(f"{name}.{part.name}" for part in body if isinstance(part, ast.FunctionDef)),
                }
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case _:
                pass
    return frozenset(names)


@each_page
def test_functions_are_in_the_files_that_are_named_with_them(page):
    prose = " ".join(page.read_text(encoding="utf-8").split())
    for path, name in re.findall(r"`(prb_jax/\S+\.py)`: `([\w.]+)`", prose):
        assert name in defined(ROOT / path), f"{path}: {name}"
    for names, path in re.findall(
        r"((?:`\w+`(?:, | and )?)+) (?:in|of) `((?:prb_jax|tests)/\S+\.py)`", prose
    ):
        for name in re.findall(r"`(\w+)`", names):
            assert name in defined(ROOT / path), f"{path}: {name}"


def test_the_walk_names_only_what_there_is():
    files = [*(ROOT / "prb_jax").rglob("*.py"), ROOT / "tests" / "parity" / "reward_models.py"]
    package = frozenset().union(*map(defined, files))
    fields = set(re.findall(r'"(\w+)":', WALK.read_text(encoding="utf-8")))
    for span in spans(WALK):
        if re.fullmatch(r"[A-Za-z_]\w*", span):
            assert span in package | fields, span


def test_the_picture_of_the_rooms_is_the_order_of_imports():
    named = []
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        room = re.match(r"    ((?:[\w/]+, )*[\w/]+)  +\S", line)
        if room and (named or room[1].startswith("errors")):
            named.append(tuple(name.rstrip("/") for name in room[1].split(", ")))
    rooms = [part for line in ORDER for part in line]
    assert [part for line in named for part in line][: len(rooms)] == rooms
    package = ROOT / "prb_jax"
    there = {
        path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there - {"__init__"} == set(rooms)


def test_one_line_goes_the_ten_steps_to_its_row(tmp_path, monkeypatch):
    text = WALK.read_text(encoding="utf-8")
    steps = STEP.findall(text[: text.index("## The same walk in training")])
    assert len(steps) == 10
    line, row = (line for line in code_lines(WALK) if line.startswith("{"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text(line + "\n")
    write_tokenizer(write_model_without_torch(tmp_path / "model", "qwen3", vocab_size=512))
    (command,) = [words for text in code_lines(WALK) if (words := command_of(text))]
    importlib.import_module("prb_jax.scoring.baselines")  # what a module calls when it is imported is no step
    called, opened = called_while(
        lambda: cli.main([word.replace("MODEL", "model") for word in command]), codes(steps)
    )
    (scored,) = (tmp_path / "runs" / "one" / "scores.jsonl").read_text().splitlines()
    assert json.loads(scored) == json.loads(row) | {
        "scores": pytest.approx(json.loads(row)["scores"], abs=1e-4)
    }
    left = iter(called)
    for step in steps:
        assert step in left, f"{step} is not called after the steps before it: {called}"
    section = text[text.index("## Every file on the way") :]
    listed = FILE.findall(section[: section.index("## The same walk in training")])
    assert len(listed) == len(set(listed))
    assert opened.keys() <= set(listed), f"not in the list: {sorted(opened.keys() - set(listed))}"
    unopened = set(listed) - opened.keys() - ONCE_A_PROCESS
    assert not unopened, f"in the list, and not on the way: {sorted(unopened)}"
    functions = [
        (path, name)
        for path, names in FUNCTIONS.findall(" ".join(section.split()))
        for name in re.findall(r"[\w.]+", names)
    ]
    assert 40 <= len(functions) <= 50
    uncalled = [(path, name) for path, name in functions if name not in opened[path]]
    assert not uncalled, f"in the list, and not called: {uncalled}"


def codes(steps: list[tuple[str, str]]) -> dict[CodeType, tuple[str, str]]:
    """The steps by the code of their functions."""
    step_of_code: dict[CodeType, tuple[str, str]] = {}
    for path, name in steps:
        function: Any = find(f"{path.removesuffix('.py').replace('/', '.')}.{name}")
        function = getattr(function, "__func__", function)  # of a class method
        step_of_code[getattr(function, "__wrapped__", function).__code__] = (path, name)
    return step_of_code


def called_while(
    run: Any, steps: dict[CodeType, tuple[str, str]]
) -> tuple[list[tuple[str, str]], dict[str, set[str]]]:
    """The steps in the order of their calls, of all threads; and by the file, the functions of the package that are
    called from the reading of the first record to the row's being written, but for those that load the model."""
    called: list[tuple[str, str]] = []
    functions: dict[str, set[str]] = {}
    loading, first, last = open_scorer.__code__, read_rows.__code__, RowFile.append.__code__
    is_on_the_way = False

    def notice(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_on_the_way
        code = frame.f_code
        if event == "call" and code in steps:
            called.append(steps[code])
        if code is first and event == "call":  # a generator, which returns with every row
            is_on_the_way = True
        elif code is loading or (code is last and event == "return"):
            is_on_the_way = code is loading and event == "return"
        is_called = event == "call" and code.co_flags & inspect.CO_OPTIMIZED  # no module, no class
        if is_on_the_way and is_called and code.co_filename.startswith(str(ROOT / "prb_jax")):
            path = Path(code.co_filename).relative_to(ROOT).as_posix()
            functions.setdefault(path, set()).add(code.co_qualname)

    threading.setprofile(notice)
    sys.setprofile(notice)
    try:
        assert run() == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return called, functions


def test_the_picture_of_speed_has_the_figures_of_its_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from speed_picture import picture  # pyright: ignore[reportMissingImports]

    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert picture(page) == (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")


def test_the_page_of_judges_shows_the_question_of_a_judge():
    from prb_jax.behaviour.judges.pairs import pair_messages

    hour = (ROOT / "docs" / "tutorials" / "first_hour.md").read_text(encoding="utf-8")
    pair = prb.Comparison(**json.loads(next(line for line in hour.splitlines() if line.startswith("{"))))
    asked = pair_messages(pair, 0, profile_posts=10, reason=False)[0].content
    assert f"```text\n{asked}\n```" in (ROOT / "docs" / "judging.md").read_text(encoding="utf-8")
