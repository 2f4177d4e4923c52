"""Pages of `prb --help` and `prb VERB --help`: one line, three examples that parse, options in groups, two screens."""

import argparse
import re
import shlex

import pytest

from prb_jax import cli
from prb_jax.commands.help_pages import EXAMPLES, GROUPS, RARE, examples

VERBS = [verb for verbs in cli.VERBS.values() for verb in verbs]


def page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {action.option_strings[-1] for action in parser._actions if action.option_strings} - {
        "--help",
        "--help-all",
    }


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Parsers by the words that start them, e.g. "evaluate" and "bench score"."""
    found: dict[str, argparse.ArgumentParser] = {}

    def add(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    found[inner.prog.removeprefix("prb ")] = inner
                    add(inner)

    add(cli.parser())
    return found


def test_help_shows_the_first_steps_and_groups_every_verb(capsys):
    shown = page(capsys, "--help")
    first = re.findall(r"^  prb (\S+)", shown, re.MULTILINE)
    assert first == ["quickstart", "evaluate", "report", "compare", "train"]
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == list(cli.VERBS)
    for verb in VERBS:
        assert len(re.findall(rf"^  {verb}(?: |$)", shown, re.MULTILINE)) == 1, verb


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("train", "prb train CONFIG [KEY=VALUE ...] --out DIR [options]"),
        ("evaluate", "prb evaluate MODEL --data NAME_OR_PATH ... --out DIR [options]"),
        ("merge", "prb merge PART ... --out DIR [options]"),
        ("judge", "prb judge [MODEL] --data NAME_OR_PATH ... --out DIR [options]"),
    ],
)
def test_the_usage_says_what_is_needed(verb, usage, capsys):
    assert page(capsys, verb, "--help").startswith(f"usage: {usage}\n")


def test_every_verb_has_three_examples_that_parse(parsers):
    assert list(EXAMPLES) == VERBS
    whole = cli.parser()
    for name in parsers:
        lines = examples(f"prb {name}")
        assert len(lines) == 3 or (name.startswith("bench ") and lines), name
        assert any(f"prb {name} " in f"{line} " for line in lines)
        for line in lines:
            inner = re.sub(r'^eval "\$\((.*)\)"$', r"\1", line).partition(" > ")[0]
            words = shlex.split(inner)
            assert words[0] == "prb"
            assert whole.parse_args(words[1:]).run


def test_every_page_is_a_line_examples_and_groups(parsers):
    for name, parser in parsers.items():
        shown = parser.format_help()
        usage, about, shown_examples, *_ = shown.split("\n\n")
        assert usage.startswith(f"usage: prb {name}"), name
        assert re.fullmatch(r"[A-Z][^\n]{10,110}\.", about), about
        assert shown_examples.startswith("examples:\n  prb") or name == "completion"
        titles = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
        assert titles[0] == "examples"
        assert [title for title in titles if title in GROUPS] == [
            title for title in GROUPS if title in titles
        ]
        assert len(titles) == len(set(titles)) >= (1 if name == "methods" else 2), name


@pytest.mark.parametrize("columns", [80, 100])
def test_a_page_fits_two_screens_and_names_every_flag(columns, parsers, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, parser in parsers.items():
        shown = parser.format_help()
        assert shown.count("\n") <= 100, name
        for flag in flags(parser):
            assert re.search(rf"{flag}(?![\w-])", shown), f"{name}: {flag}"


def test_rare_options_are_listed_in_a_long_page_and_explained_by_help_all(parsers, capsys):
    short, whole = page(capsys, "evaluate", "--help"), page(capsys, "evaluate", "--help-all")
    assert "more options, explained by `prb evaluate --help-all`:" in short
    assert "model files          --revision --base --tokenizer --chat-template --readout\n" in short
    for title in set(RARE) - {"endpoint", "judges as rewards"}:
        assert f"\n{title}:\n" in whole
        assert f"\n{title}:\n" not in short
    explained = set(re.findall(r"^  (--[\w-]+)", whole, re.MULTILINE))
    assert explained == flags(parsers["evaluate"])
    assert "more options" not in page(capsys, "distil", "--help")


def test_required_options_come_first_in_their_group(capsys):
    shown = page(capsys, "evaluate", "--help")
    assert shown.index("  --data ") < shown.index("  --out ") < shown.index("  --columns ")
