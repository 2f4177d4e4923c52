"""`prb bench`: time scoring, training, sampling, guiding, PPO, serving, loading, ranking, or all on this machine."""

import argparse
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prb_jax.commands.arguments import Parser, call, chosen, given_flags
from prb_jax.commands.process import prepare_jax, print_table
from prb_jax.commands.values import number_type
from prb_jax.errors import RunError
from prb_jax.measure.bench.options import RIVALS, BenchOptions
from prb_jax.records.options import Option
from prb_jax.records.writing import write_file
from prb_jax.seams import value_at


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """A measuring verb of `prb bench`."""

    about: str  # help text
    measure: str  # "file:function" of `prb_jax/measure/bench/`
    options: str = ""  # fields of `BenchOptions` that it uses besides model, dtype and mesh
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # changes of its options
    against: tuple[tuple[str, ...], str] = ((), "")  # rivals, and the help text about them
    timed: bool = True  # it repeats measurements in rounds
    weights: bool = False  # the model must have weights


_LENGTHS = "prefix_tokens response_tokens batch_tokens"
_TEXTS = "prompts prompt_tokens new_tokens"
_VERBS = {
    "parity": _Verb(
        about="check scores of this device against a plain float32 forward on the CPU",
        measure="parity:bench_parity",
        options="training against attention",
        against=(("transformers",), "Also compare with transformers in float32; MODEL must be a folder"),
        timed=False,
    ),
    "score": _Verb(
        about="time scoring random tokens of the lengths of personalised data",
        measure="scoring:bench_scoring",
        options=f"pairs {_LENGTHS} questions_per_user attention against responses against_sequences "
        "against_responses quantize",
        changes={"pairs": {"meaning": "Comparisons per pass (default: 64 / K, at least 2, in whole users)"}},
        against=(
            ("transformers", "transformers-cached", "vllm"),
            "Also time padded batches of transformers, a transformers script that computes a common prefix "
            "once, or vLLM's classification path, and compare",
        ),
    ),
    "train": _Verb(
        about="time training steps on random tokens of such lengths",
        measure="training:bench_training",
        options=f"pairs {_LENGTHS} questions_per_user attention against tuning remat against_pairs",
        changes={"pairs": {"meaning": "Pairs per step (default: 8, in whole users)"}},
        against=(("trl",), "Also time TRL's RewardTrainer, and compare"),
    ),
    "sample": _Verb(
        about="time drawing texts from a causal language model",
        measure="sampling:bench_sampling",
        options=f"{_TEXTS} samples temperature against against_prompts attention",
        against=(("transformers",), "Also time `generate` of transformers, and compare"),
    ),
    "guide": _Verb(
        about="time a guided token, compared with a token of the policy and of the reward model",
        measure="sampling:bench_guidance",
        options=f"{_TEXTS} candidates attention",
        changes={"new_tokens": {"default": 32}},
    ),
    "ppo": _Verb(
        about="time training a policy, rollouts and updates",
        measure="policy:bench_policy",
        options=f"{_TEXTS} samples against against_rows attention",
        changes={"prompts": {"default": 2}, "samples": {"default": 8}},
        against=(("trl",), "Also time TRL's GRPOTrainer, and compare"),
        weights=True,
    ),
    "serve": _Verb(
        about="time `prb serve` under many clients, compared with the scorer of `prb evaluate`",
        measure="serving:bench_serving",
        options=f"pairs clients seconds order {_LENGTHS} questions_per_user",
        changes={"pairs": {"meaning": "Comparisons, each requested once (default: one per client)"}},
        timed=False,
    ),
    "load": _Verb(
        about="time loading a folder's weights, compared with plain reading of its files",
        measure="loading:bench_loading",
        weights=True,
    ),
    "rank": _Verb(
        about="time ranking profiles by a text encoder",
        measure="ranking:bench_ranking",
        options="users against against_users",
        against=(("transformers",), "Also time transformers with one question at a time, and compare"),
        weights=True,
    ),
}
_SEVERAL = {"dtype": "DTYPE ...", "samples": "N ..."}
"""Options that accept several values; each value is timed."""


def add(sub: Parser) -> None:
    """Add the sub-verbs and their arguments."""
    verbs = sub.add_subparsers(required=True, parser_class=Parser)

    def verb(name: str, about: str) -> Parser:
        parser = verbs.add_parser(name, help=about, description=about)
        parser.set_defaults(verb=name, parser=parser)
        return parser

    whole = verb("all", "measure this machine with all verbs below, with model shapes that fill it")
    about = "Folder for bench.json, bench.md and bench.html; an existing one is continued"
    whole.option("--out DIR", about, required=True)
    minutes = number_type(Option(above=0), float)
    whole.option("--minutes N", "Time limit; rows that would end later are left out", minutes, default=30.0)
    whole.option(
        "--rows ID ...", "Only these rows and the rows that they need (default: all)", default=[], commas=True
    )
    whole.option("--model MODEL", "Folder or shape in place of the shapes that the memory allows")
    whole.fields(BenchOptions, "prefix_tokens response_tokens")
    whole.set_defaults(after_interrupt="measured rows are kept: the same command continues")
    two = verb("compare", "compare the measurements of two machines, row by row")
    two.option("FIRST", "File bench.json of `prb bench all`, or its folder")
    two.option("SECOND", "File or folder of the other machine")
    machine = verb("machine", "list the devices and their peak speed in matrix products")
    machine.option("--json FILE", "Also write the numbers to this file")
    for name, how in _VERBS.items():
        parser = verb(name, how.about)
        parser.option(
            "MODEL",
            "Hugging Face folder; for score, train and serve also a shape such as qwen3-8b, with random weights, and "
            "for score and train a config.json",
        )
        choices, about = how.against
        changes: dict[str, Any] = dict(how.changes) | {"against": {"choices": choices, "meaning": about}}
        for option, spec in _SEVERAL.items():
            changes[option] = {"shown": spec, **changes.get(option, {})}
        parser.fields(BenchOptions, "dtype mesh rounds" if how.timed else "dtype mesh", **changes)
        parser.option("--json FILE", "Also write the numbers to this file")
        if name == "rank":
            parser.option("--data FILE", "Comparisons with profiles", required=True)
        if how.options:
            parser.fields(BenchOptions, how.options, **changes)


def run(options: argparse.Namespace) -> int:
    """Measure, and write the numbers."""
    special = {"all": _run_all, "compare": _run_compare, "machine": _run_machine}.get(options.verb)
    if special is not None:
        return special(options)
    how = _VERBS[options.verb]
    _check(options, how)
    prepare_jax()
    measure = value_at(f"prb_jax.measure.bench.{how.measure}")
    asked = chosen(options, BenchOptions, model=options.model)
    given = {name: vars(options)[name] for name in _SEVERAL if name in options}
    if "quantize" in options:
        given["quantize"] = list(dict.fromkeys((None, options.quantize)))
    values = [value if isinstance(value, list) else [value] for value in given.values()]
    results = []
    for one in itertools.product(*values):
        measured = measure(replace(asked, **dict(zip(given, one, strict=True))))
        for result in measured if isinstance(measured, Iterable) else [measured]:
            results.append(result)
            if result.line:
                print(result.line, flush=True)
    title = measure.__name__.removeprefix("bench_")
    _show("training a policy" if title == "policy" else title, results, options)
    return 0


def _show(title: str, results: list[Any], options: argparse.Namespace) -> None:
    from prb_jax.measure.bench.figures import bench_table
    from prb_jax.measure.bench.machine import peak_memory

    print_table(bench_table(title, results))
    if options.json:
        rows = [result.to_json() | peak_memory() for result in results]
        write_file(Path(options.json), json.dumps(rows, indent=2).encode() + b"\n")


def _run_machine(options: argparse.Namespace) -> int:
    prepare_jax()
    from prb_jax.measure.bench.machine import bench_machine

    _show("machine", [bench_machine()], options)
    return 0


def _run_all(options: argparse.Namespace) -> int:
    """Measure everything; each row is a separate process, so this process does not use the devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from prb_jax.measure.bench.suite import bench_all, failures

    bench = call(bench_all, options)
    print(f"{options.out}: bench.json, bench.md, bench.html")
    if left := [row["id"] for row in bench["rows"] if row["status"] == "not measured"]:
        print(f"not measured: {', '.join(left)}")
    if broken := failures(bench):
        print(f"failed: {', '.join(broken)}")
    return 1 if broken else 0


def _run_compare(options: argparse.Namespace) -> int:
    """Print the ratios of two machines, and the rows that could not be compared."""
    from prb_jax.measure.bench.suite_tables import compare_benches

    comparison = compare_benches(options.first, options.second)
    print_table(comparison)
    for name, (before, after) in comparison.differing.items():
        print(f"differs: {name}: {before} -> {after}")
    for name, reason in comparison.refused.items():
        print(f"not compared: {name}: {reason}")
    return 0


def _check(options: argparse.Namespace, how: _Verb) -> None:
    """Raise RunError for incompatible options, and for a model without required weights."""
    for name, rival in RIVALS.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in given_flags(options) and options.against != rival:
            raise RunError(f"{flag} requires --against {rival}")
    if options.verb == "train" and options.against and options.tuning != "full":
        raise RunError(f"--against trl trains all weights: remove --tuning {options.tuning}")
    if how.weights:
        from prb_jax.models.named_shapes import has_no_weights

        if has_no_weights(options.model):
            raise RunError(f"MODEL: expected a model with weights, found {options.model}")
