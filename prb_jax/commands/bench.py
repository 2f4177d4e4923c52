"""`prb bench`: time scoring, training, sampling, guiding, PPO, serving, loading, ranking, or all on this machine."""

import argparse
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from prb_jax.commands.arguments import Parser, call, given_flags, number_type, positive, several
from prb_jax.commands.process import prepare_jax, print_table
from prb_jax.data.options import Option
from prb_jax.errors import RunError
from prb_jax.models import DTYPES, REMAT, REMAT_POLICIES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.training import TUNINGS

_OF_RIVALS = {
    "--against-responses": "transformers-cached",
    "--against-prompts": "transformers",
    "--against-users": "transformers",
    "--against-pairs": "trl",
    "--against-rows": "trl",
}
"""Flags of another way, which have no effect without it."""

_MINUTES = number_type(Option(above=0), float)


def add(sub: Parser) -> None:
    """Add the sub-verbs and their arguments."""
    sub_verbs = sub.add_subparsers(required=True, parser_class=Parser)

    whole = _add_verb(
        sub_verbs, "all", about="measure this machine: all that is below, with shapes that fill it"
    )
    whole.option(
        "--out DIR", "of bench.json, bench.md and bench.html; continued where it is there", required=True
    )
    whole.option("--minutes N", "rows are left out that would not end in time", _MINUTES, default=30.0)
    whole.option("--rows ID ...", "these rows alone, with what they need (default: all)", default=[])
    whole.option("--model MODEL", "a folder or shape in the place of those that the memory allows")
    _add_lengths(whole, batched=False)
    whole.set_defaults(after_interrupt="the rows that are measured are kept: the same command continues")
    two = _add_verb(sub_verbs, "compare", about="compare what two machines measured, row by row")
    two.option("FIRST", "bench.json of `prb bench all`, or its folder")
    two.option("SECOND", "that of the other machine")

    machine = _add_verb(
        sub_verbs, "machine", about="say which devices there are, and the peak of matrix products"
    )
    machine.option("--json FILE", "also write the numbers here")
    parity = _add(
        sub_verbs,
        "parity",
        "parity",
        about="check scores of this device against a plain float32 forward on the CPU",
        timed=False,
    )
    parity.option("--training", "also the loss of a step of training")
    parity.option("--against", "also check against it, in float32; of a folder", choices=("transformers",))
    parity.fields(LoadOptions, "attention")

    score = _add(
        sub_verbs, "score", "scoring", about="time scoring random tokens of the lengths of personalised data"
    )
    _add_workload(score, pairs="comparisons of a pass (default: 64 / K, at least 2, and all users whole)")
    score.option(
        "--against",
        "also time padded batches of transformers, a script on transformers that computes a common prefix "
        "once, or vLLM's classification path, and compare",
        choices=("transformers", "transformers-cached", "vllm"),
    )
    score.option("--responses K ...", "of a comparison", positive, default=[2], extend=False)
    score.option(
        "--against-sequences N",
        "conversations that the padded way scores a round; its rate is carried over to the rest",
        positive,
        default=16,
    )
    score.option(
        "--against-responses N",
        "the most responses of a padded batch of transformers-cached (default: all of a comparison); each has a "
        "copy of the prefix's keys and values",
        positive,
    )
    score.fields(
        LoadOptions, "quantize", quantize={"meaning": "a second row with the layers' matrices in eight bits"}
    )

    train = _add(
        sub_verbs, "train", "training", about="time steps of training on random tokens of such lengths"
    )
    _add_workload(train, pairs="pairs of a step (default: 8, and all users whole)")
    train.option("--against", "also time TRL's RewardTrainer, and compare", choices=("trl",))
    train.option("--tuning", "what is trained", default="full", choices=TUNINGS)
    train.option("--remat", "what our backward pass computes again", default=REMAT, choices=REMAT_POLICIES)
    train.option(
        "--against-pairs N", "pairs of a microbatch of TRL's (default: 2 on CPUs, 8 on GPUs)", positive
    )

    sample = _add(sub_verbs, "sample", "sampling", about="time drawing texts from a causal language model")
    _add_texts(sample, prompts=4, new_tokens=128)
    _add_samples(sample, 1)
    sample.option("--temperature T", "0 is greedy, for one sample", float, default=1.0)
    sample.option("--against", "also time its `generate`, and compare", choices=("transformers",))
    sample.option(
        "--against-prompts N",
        "prompts that the usual way continues in a round; its rate is compared (default: all)",
        positive,
    )
    sample.fields(LoadOptions, "attention")

    guide = _add(
        sub_verbs,
        "guide",
        "guidance",
        about="time a guided token, beside one of the policy and of the reward model",
    )
    _add_texts(guide, prompts=4, new_tokens=32)
    guide.option("--candidates C", "tried for each token", positive, default=10)
    guide.fields(LoadOptions, "attention")

    policy = _add(sub_verbs, "ppo", "policy", about="time training a policy, rollouts and updates")
    _add_texts(policy, prompts=2, new_tokens=128)
    _add_samples(policy, 8)
    policy.option("--against", "also time TRL's GRPOTrainer, and compare", choices=("trl",))
    policy.option(
        "--against-rows N", "rollouts of a microbatch of TRL's (default: 4 on CPUs, 16 on GPUs)", positive
    )
    policy.fields(LoadOptions, "attention")

    serve = _add(
        sub_verbs,
        "serve",
        "serving",
        about="time `prb serve` under many clients, beside the scorer of `prb evaluate`",
        timed=False,
    )
    serve.option("--clients N", "at a time", positive, default=500)
    serve.option("--seconds S", "that they ask", positive, default=30)
    _add_lengths(serve)

    _add(
        sub_verbs,
        "load",
        "loading",
        about="time loading a folder's weights, beside plain reading of its files",
    )

    rank = _add(
        sub_verbs, "rank", "ranking", about="time ranking profiles by a model that is an encoder of texts"
    )
    rank.option("--data FILE", "comparisons with profiles", required=True)
    rank.option("--users N", "the first N users with a profile (default: all)", positive)
    rank.option(
        "--against", "also time it with one question at a time, and compare", choices=("transformers",)
    )
    rank.option(
        "--against-users N",
        "users that the usual way ranks a round (default: 2); its rate is carried over to the rest",
        positive,
    )


def _add_verb(verbs: Any, name: str, measured: str = "", *, about: str) -> Parser:
    """Add a verb that calls `bench_MEASURED` of `prb_jax/bench/MEASURED.py`, with no option yet."""
    sub = verbs.add_parser(name, help=about, description=about)
    measured = measured or name
    title = "training a policy" if measured == "policy" else measured
    sub.set_defaults(measured=measured, title=title, parser=sub, dtype=[None], against=None)
    return sub


def _add(verbs: Any, name: str, measured: str, *, about: str, timed: bool = True) -> Parser:
    """Add a verb that measures a model; `timed` where it repeats its rounds."""
    sub = _add_verb(verbs, name, measured, about=about)
    sub.option(
        "MODEL",
        "a Hugging Face folder; to score and train also a config.json or a shape such as qwen3-8b, with random "
        "weights",
    )
    sub.option("--dtype DTYPE ...", "default: the checkpoint's", default=[None], choices=DTYPES, extend=False)
    sub.option("--mesh AXES", "as in fsdp=4,tensor=2")
    if timed:
        sub.option("--rounds N", "side-by-side repetitions", positive, default=3)
    sub.option("--json FILE", "also write the numbers here")
    return sub


def _add_workload(sub: Parser, *, pairs: str) -> None:
    sub.option("--pairs N", pairs, positive)
    _add_lengths(sub)
    sub.option(
        "--questions-per-user N,...",
        "comparisons with the same profile, as in 1,5,15",
        several(positive),
        default=(1,),
    )
    sub.fields(LoadOptions, "attention")


def _add_texts(sub: Parser, *, prompts: int, new_tokens: int) -> None:
    """Prompts, and the lengths of the texts that continue them; the numbers are defaults."""
    sub.option("--prompts N", "at a time", positive, default=prompts)
    sub.option("--prompt-tokens N", "length of a prompt, about", positive, default=2000)
    sub.option("--new-tokens N", "of each text, at most", positive, default=new_tokens)


def _add_samples(parser: Parser, default: int) -> None:
    parser.option(
        "--samples N ...",
        f"texts of each prompt, one number or several (default: {default})",
        positive,
        default=[default],
        extend=False,
    )


def _add_lengths(sub: Parser, *, batched: bool = True) -> None:
    sub.option("--prefix-tokens N", "mean length of the prefix", positive, default=2000)
    sub.option("--response-tokens N", "mean length of a response", positive, default=130)
    if batched:
        sub.option("--batch-tokens N", "padded tokens computed at a time", positive)


def run(options: argparse.Namespace) -> int:
    """Measure, and write the numbers."""
    if options.measured in ("all", "compare"):
        return (_run_all if options.measured == "all" else _run_compare)(options)
    _check(options)
    prepare_jax()
    from prb_jax.bench.machine import peak_memory
    from prb_jax.bench.table import bench_table

    module = import_module(f"prb_jax.bench.{options.measured}")
    varied: dict[str, Any] = {"dtype": options.dtype}
    if "samples" in options:
        varied["samples"] = options.samples
    if "quantize" in options:
        varied["quantize"] = dict.fromkeys((None, options.quantize))
    results = []
    for values in itertools.product(*varied.values()):
        measured = call(
            getattr(module, f"bench_{options.measured}"), options, **dict(zip(varied, values, strict=True))
        )
        for result in measured if isinstance(measured, Iterable) else [measured]:
            results.append(result)
            if hasattr(module, "line"):
                print(module.line(result), flush=True)
    rival = options.against if hasattr(module, "line") else None
    print_table(bench_table(options.title, results, rival=rival))
    if options.json:
        rows = [asdict(result) | peak_memory() for result in results]
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _run_all(options: argparse.Namespace) -> int:
    """Measure everything: each row in a process of its own, so that this one leaves the devices alone."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from prb_jax.bench.suite import bench_all, failures

    bench = call(bench_all, options)
    print(f"{options.out}: bench.json, bench.md, bench.html")
    left = [row["id"] for row in bench["rows"] if row["status"] == "not measured"]
    if left:
        print(f"not measured: {', '.join(left)}")
    broken = failures(bench)
    if broken:
        print(f"failed: {', '.join(broken)}")
    return 1 if broken else 0


def _run_compare(options: argparse.Namespace) -> int:
    """Show the ratios of two machines, and what could not be compared."""
    from prb_jax.bench.suite_tables import compare_benches

    comparison = compare_benches(options.first, options.second)
    print_table(comparison)
    for name, (before, after) in comparison.differing.items():
        print(f"differs: {name}: {before} -> {after}")
    for name, reason in comparison.refused.items():
        print(f"not compared: {name}: {reason}")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise RunError for options that do not go together, and for a model that must have weights and has none."""
    for flag, rival in _OF_RIVALS.items():
        if flag in given_flags(options) and options.against != rival:
            raise RunError(f"{flag} needs --against {rival}")
    if options.measured == "training" and options.against and options.tuning != "full":
        raise RunError(f"--against trl trains all weights: leave out --tuning {options.tuning}")
    if options.measured in ("policy", "serving", "loading", "ranking"):
        from prb_jax.models.named_shapes import has_no_weights

        if has_no_weights(options.model):
            raise RunError(f"MODEL: expected a model with weights, found {options.model}")
