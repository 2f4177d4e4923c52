"""Pages of `prb VERB --help`: what the verb does, examples, and its options in groups.

A long page only lists the flags of rare groups; `prb VERB --help-all` explains them too.
"""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_LINES, _MOST = (
    60,
    95,
)  # lines up to which a page explains the rare groups; lines up to which it explains devices
_EXAMPLES = 3  # examples of a page
_OWN = "options"
JUDGES, ENDPOINT = "judges as rewards", "endpoint"

GROUPS = {
    "input and output": "data columns rendered subset limit history samples inputs outputs out",
    _OWN: "",
    "what the model sees": "profile_posts protocol max_length too_long",
    ENDPOINT: "",
    JUDGES: "",
    "devices": "mesh dtype quantize attention batch_tokens",
    "model files": "revision base tokenizer chat_template readout",
    "rewards of a policy": "reference beta reference_free logprobs",
    "run": "config show_config wandb part no_progress distributed imports",
}
"""Groups of options, in the order of a page, with their destinations in every verb. Other options are `options`."""

RARE = (ENDPOINT, JUDGES, "model files", "rewards of a policy", "run")
"""Groups of which a long page only lists the flags; a still longer one also of "devices"."""

EXAMPLES = {
    "quickstart": """
        prb quickstart
        prb quickstart --out runs/first
        prb quickstart --no-progress
    """,
    "evaluate": """
        prb evaluate MODEL --data pairs.jsonl --out runs/first
        prb evaluate MODEL --data rewardbench2 --dtype bfloat16 --out runs/rewardbench2
        prb evaluate baseline:length --data pairs.jsonl --out runs/length
    """,
    "merge": """
        prb merge runs/part1 runs/part2 --out runs/whole
        prb merge runs/part* --out runs/whole
        prb merge gs://bucket/part1 gs://bucket/part2 --out runs/whole
    """,
    "judge": """
        prb judge MODEL --data pairs.jsonl --out runs/judged
        prb judge MODEL --data pairs.jsonl --protocol score --reason --out runs/rated
        prb judge --endpoint URL --model NAME --data pairs.jsonl --out runs/judged
    """,
    "aspects": """
        prb aspects MODEL --data pairs.jsonl --out runs/aspects
        prb aspects MODEL --data pairs.jsonl --profile-posts 5 --out runs/aspects
        prb aspects --endpoint URL --model NAME --data pairs.jsonl --out runs/aspects
    """,
    "train": """
        prb train bt_profile_context model=MODEL data=pairs.jsonl --out runs/mine
        prb train bt_user_blind model=MODEL data=pairs.jsonl tuning=lora --out runs/blind
        prb train --show-config > my.py
    """,
    "convert": """
        prb convert runs/mine exported
        prb convert runs/mine exported --adapter
        prb convert --data pairs.jsonl --to trl --out trl.jsonl
    """,
    "push": """
        prb push runs/mine ORG/NAME --dry-run
        prb push runs/mine ORG/NAME --private
        prb push runs/mine ORG/NAME --evaluations runs/first
    """,
    "features": """
        prb features MODEL --data pairs.jsonl --out features
        prb features MODEL --data pairs.jsonl --dtype bfloat16 --out features
        prb features MODEL --data pairs.jsonl --profile-posts 10 --out features
    """,
    "personalise": """
        prb personalise --data pairs.jsonl --backbone MODEL --out runs/study
        prb personalise --data pairs.jsonl --backbone features --methods bayes,lore --out runs/study
        prb personalise --data pairs.jsonl --backbone features --dry-run --out runs/study
    """,
    "methods": """
        prb methods
        prb evaluate runs/study/fitted/bayes --data pairs.jsonl --out runs/bayes
        prb personalise --data pairs.jsonl --backbone MODEL --methods bayes,lore --out runs/study
    """,
    "ask": """
        prb ask runs/study/fitted/bayes --candidates questions.jsonl
        prb ask runs/study/fitted/bayes --candidates questions.jsonl --user ana.jsonl
        prb ask runs/study/fitted/bayes --candidates questions.jsonl --top 3 --out ranked.json
    """,
    "rank-profiles": """
        prb rank-profiles --encoder bm25 --data pairs.jsonl --out ranked.jsonl
        prb rank-profiles --encoder recency --data pairs.jsonl --out ranked.jsonl
        prb rank-profiles --encoder MODEL --data pairs.jsonl --out ranked.jsonl.gz
    """,
    "sample": """
        prb sample MODEL --data pairs.jsonl --n 16 --out runs/samples
        prb sample MODEL --data pairs.jsonl --temperature 0.7 --max-new-tokens 128 --out runs/samples
        prb sample --endpoint URL --model NAME --data pairs.jsonl --out runs/samples
    """,
    "best-of-n": """
        prb best-of-n --samples runs/samples --rewards MODEL baseline:length --out runs/best
        prb best-of-n --samples runs/samples --rewards judge:MODEL --out runs/best
        prb best-of-n --samples texts.jsonl --data pairs.jsonl --rewards MODEL --out runs/best
    """,
    "distil": """
        prb distil runs/best --out runs/pairs
        prb distil runs/best --rejected random --out runs/pairs
        prb distil runs/best --reward MODEL --margin 0.5 --out runs/pairs
    """,
    "guide": """
        prb guide POLICY --reward MODEL --data pairs.jsonl --out runs/guided
        prb guide POLICY --reward MODEL --data pairs.jsonl --weight 2 --out runs/guided
        prb guide POLICY --reward MODEL --data pairs.jsonl --chunk 16 --temperature 1 --out runs/guided
    """,
    "policy-accuracy": """
        prb policy-accuracy POLICY --rewards MODEL --data pairs.jsonl --out runs/accuracy
        prb policy-accuracy POLICY --rewards MODEL baseline:length --data pairs.jsonl --out runs/accuracy
        prb policy-accuracy POLICY --rewards MODEL --data pairs.jsonl --lambdas 0,1,5 --out runs/accuracy
    """,
    "correlate": """
        prb correlate --scores runs/a runs/b runs/c --behaviour runs/best --out runs/correlated
        prb correlate --scores runs/a runs/b runs/c --behaviour runs/best --figures accuracy
        prb correlate --scores runs/a runs/b runs/c --behaviour runs/best --plan
    """,
    "ppo": """
        prb ppo profile_in_prompt model=MODEL data=FILE reward=REWARD_MODEL --out runs/policy
        prb ppo profile_in_prompt model=MODEL data=FILE reward=REWARD_MODEL algorithm=grpo --out runs/policy
        prb ppo --show-config > my.py
    """,
    "build": """
        prb build endpoint data=FILE generator.endpoint=URL generator.name=NAME --out runs/built
        prb build endpoint data=FILE generator.endpoint=URL generator.name=NAME --redact --out runs/built
        prb build --show-config > my.py
    """,
    "personas": """
        prb personas --out personas
        prb evaluate baseline:profile-overlap --data personas --out runs/overlap
        prb evaluate MODEL --data personas:test --out runs/personas
    """,
    "past-texts": """
        prb past-texts --inputs inputs.json --outputs outputs.json --out pairs.jsonl
        prb past-texts --inputs inputs.json --outputs outputs.json --samples runs/samples --out pairs.jsonl
        prb past-texts --inputs inputs.json --outputs outputs.json --samples runs/a runs/b --out pairs.jsonl
    """,
    "prepare": """
        prb prepare --data pairs.parquet --out prepared
        prb prepare --data pairs.parquet --out prepared --model MODEL
        prb prepare --data pairs.csv --columns user_id=voter --out prepared
    """,
    "split": """
        prb split --by user --data pairs.jsonl --out parts
        prb split --by question --data pairs.jsonl --parts train=0.9 test=0.1 --out parts
        prb split --by user --data pairs.csv --columns user_id=voter --out parts
    """,
    "audit": """
        prb audit audit --data pairs.jsonl --annotators ana ben
        prb audit audit --report --out page.html
        prb audit audit --export judgements.csv
    """,
    "serve": """
        prb serve MODEL
        prb serve MODEL --host 0.0.0.0 --port 8000
        prb serve judge:MODEL --reason
    """,
    "inspect": """
        prb inspect MODEL
        prb inspect MODEL --data pairs.jsonl
        prb inspect runs/mine
    """,
    "compare": """
        prb compare runs/first runs/second
        prb compare runs/first runs/second --out runs/compared
        prb compare runs/first runs/second --format json
    """,
    "leaderboard": """
        prb leaderboard runs
        prb leaderboard runs --format markdown
        prb leaderboard runs --out page.html
    """,
    "report": """
        prb report runs/first --out page.html
        prb report runs/first runs/second --out page.html
        prb report runs/study --title "Methods of personalisation" --out page.html
    """,
    "plan": """
        prb plan qwen3-8b --topology v5e:4x4
        prb plan qwen3-8b --topology v5e:4x4 --train --tuning lora
        prb plan qwen3-8b --topology v5p:2x2x4 --sweep
    """,
    "bench": """
        prb bench all --out runs/bench
        prb bench score qwen3-40m --dtype float32
        prb bench compare runs/bench runs/other
        prb bench score qwen3-40m --dtype float32 --responses 2 16
        prb bench train qwen3-40m --dtype float32 --tuning lora
        prb bench machine --json machine.json
        prb bench parity MODEL --against transformers
        prb bench sample qwen3-40m --dtype float32
        prb bench guide qwen3-40m --dtype float32
        prb bench ppo MODEL --dtype float32
        prb bench serve MODEL --clients 8
        prb bench load MODEL
        prb bench rank MODEL --data pairs.jsonl
    """,
    "completion": """
        eval "$(prb completion bash)"
        eval "$(prb completion zsh)"
        prb completion fish > ~/.config/fish/completions/prb.fish
    """,
}
"""Examples of each verb. `prb bench` shows the first ones, and each verb of `prb bench` its own."""


class Formatter(argparse.HelpFormatter):
    """Formatter that writes `--flag VALUE ...` for a flag of several values, and breaks no word at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs in ("+", "*"):
            metavar = self._metavar_formatter(action, default_metavar)(1)[0]
            return metavar if "," in metavar else f"{metavar} ..."
        return super()._format_args(action, default_metavar)


class HelpAll(argparse.Action):
    """Flag `--help-all`, for a parser with `page`: print the page with every group explained."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser._print_message(parser.page(everything=True), sys.stdout)
        parser.exit()


def examples(prog: str) -> list[str]:
    """Return the examples for the page of a parser, e.g. of the `prog` "prb evaluate" or "prb bench score"."""
    _, verb, *inner = prog.split()
    lines = textwrap.dedent(EXAMPLES.get(verb, "")).strip().splitlines()
    return [line for line in lines if not inner or line.startswith(f"{prog} ")][:_EXAMPLES]


def help_page(
    parser: argparse.ArgumentParser,
    usage: str,
    titles: Mapping[str, str],
    needed: Sequence[str],
    everything: bool,
) -> str:
    """Return the page of a parser.

    Args:
      parser: Parser of a verb.
      usage: Words after "usage:".
      titles: Groups of options that are in another group than in `GROUPS`, by destination.
      needed: Destinations of options that are required, though the parser does not require them.
      everything: If True, explain the rare groups of a long page too.
    """
    groups = {
        title: sorted(actions, key=lambda action: not (action.required or action.dest in needed))
        for title, actions in _groups(parser, titles).items()
    }
    listed: dict[str, Sequence[argparse.Action]] = {}
    page = _rendered(parser, usage, groups, listed)
    for titles_to_list, lines in ((RARE, _LINES), (("devices",), _MOST)):
        if everything or page.count("\n") <= lines:
            break
        listed |= {title: groups.pop(title) for title in titles_to_list if title in groups}
        page = _rendered(parser, usage, groups, listed)
    return page


def _groups(parser: argparse.ArgumentParser, titles: Mapping[str, str]) -> dict[str, list[argparse.Action]]:
    """Return the arguments of a page by the title of their group, in the order of the page."""
    known = {dest: title for title, dests in GROUPS.items() for dest in dests.split()} | dict(titles)
    groups: dict[str, list[argparse.Action]] = {title: [] for title in ("verbs", "arguments", *GROUPS)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            groups["verbs"] += action._choices_actions
        elif not action.option_strings:
            groups["arguments"].append(action)
        elif action.dest != "help":
            groups[known.get(action.dest, _OWN)].append(action)
    return {title: actions for title, actions in groups.items() if actions}


def _rendered(
    parser: argparse.ArgumentParser,
    usage: str,
    groups: Mapping[str, Sequence[argparse.Action]],
    listed: Mapping[str, Sequence[argparse.Action]],
) -> str:
    """Return the page that explains some groups and lists the flags of others."""
    formatter = parser._get_formatter()
    for title, actions in groups.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    about = parser.description or ""
    shown = "".join(f"\n  {line}" for line in examples(parser.prog))
    parts = [
        f"usage: {usage}",
        f"{about[:1].upper()}{about[1:]}.",
        f"examples:{shown}",
        formatter.format_help(),
    ]
    width, columns = max(map(len, listed), default=0), shutil.get_terminal_size().columns - 2
    lines = [f"more options, explained by `{parser.prog} --help-all`:"]
    for title, actions in listed.items():
        text = f"  {title:<{width}}  {' '.join(action.option_strings[-1] for action in actions)}"
        indent = " " * (width + 4)
        lines.append(textwrap.fill(text, columns, subsequent_indent=indent, break_on_hyphens=False))
    return "\n\n".join(parts) + ("\n" + "\n".join(lines) + "\n" if listed else "")
