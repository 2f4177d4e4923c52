"""`prb plan`: costs of a model on a TPU slice."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from prb_jax.commands.arguments import Parser, chosen, given_flags
from prb_jax.commands.process import print_table
from prb_jax.errors import RunError
from prb_jax.measure.plan.chips import PlanOptions

if TYPE_CHECKING:
    from prb_jax.measure.plan.planner import Plan


def add(sub: Parser) -> None:
    sub.option("MODEL_OR_CONFIG", "File config.json, model folder, or a shape such as qwen3-8b", dest="model")
    sub.option("--topology T", "TPU slice, e.g. v5e:4x4 or v5p:2x2x4", required=True)
    sub.fields(PlanOptions, "slices mesh train")
    sub.option(
        "--sample",
        "Plan the sampler: K samples of R tokens for each of B prompts of P tokens; a step draws a token of each",
    )
    sub.option("--ppo", "Plan a step of `prb ppo`: policy, reference, value function, reward")
    sub.option("--reward MODEL", "With --ppo: reward model on the same chips (default: it is elsewhere)")
    sizes = "prefix responses response_length questions_per_user spread batch"
    sub.fields(PlanOptions, f"value_trunk tuning remat {sizes} quantize attention dtype")
    sub.option("--sweep", "Try meshes and batch sizes: the best that fit come first")
    sub.option("--json", "Print one JSON object (of a sweep, the best plan)")


def run(options: argparse.Namespace) -> None:
    """Plan, and print a table or JSON."""
    _check(options)
    # No device is used: the CPU compiles programs for TPUs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from prb_jax.measure.plan import tables
    from prb_jax.measure.plan.planner import plan, sweep
    from prb_jax.measure.plan.policy import plan_policy
    from prb_jax.measure.plan.sampling import plan_sampling

    def report(planned: "Plan") -> None:
        said = f"prb: {planned.mesh} batch {planned.batch}: {tables.verdict(planned)}"
        print(said, file=sys.stderr, flush=True)

    asked = chosen(options, PlanOptions, topology=options.topology)
    title, figures = _title(options), {}
    if options.ppo:
        planned = plan_policy(options.model, asked, reward=options.reward)
        table = tables.policy_table(planned, title=title)
    elif options.sample:
        planned = plan_sampling(options.model, asked)
        table = tables.sampling_table(planned, title=title)
    elif options.sweep:
        batches = () if asked.batch is None else (asked.batch,)
        plans = sweep(options.model, asked, batches=batches, report=report)
        planned, table = plans[0], tables.sweep_table(plans, title=title)
        figures = {"mesh": planned.mesh, "batch": planned.batch}
    else:
        planned = plan(options.model, asked)
        table = tables.plan_table(planned, title=title)
        if options.json and planned.note:
            print(f"prb: {planned.note}", file=sys.stderr)
    if options.json:
        print(json.dumps({**planned.to_json(), **figures}))
    else:
        print_table(table)


_ALONE = "--train --sweep --attention --questions-per-user"
_CLASHES = (
    ("--ppo", f"--sample {_ALONE} --quantize", "does not work with --ppo: remove it"),
    ("--sample", f"{_ALONE} --tuning --remat", "does not work with --sample, a separate plan: remove it"),
    ("--train", "--quantize", "is only for scoring: remove it for --train"),
    ("--sweep", "--mesh", "does not work with --sweep, which tries meshes itself: remove it"),
)
_NEEDS = (
    (("--ppo",), "--reward --value-trunk", "is for policies: it requires --ppo"),
    (("--train", "--ppo"), "--tuning --remat", "is only for training: it requires --train"),
)


def _check(options: argparse.Namespace) -> None:
    """Raise RunError for incompatible options."""
    given = given_flags(options)
    faults = [(others, words) for flag, others, words in _CLASHES if flag in given]
    faults += [(others, words) for needed, others, words in _NEEDS if not given & set(needed)]
    for others, words in faults:
        for other in others.split():
            if other in given:
                raise RunError(f"{other} {words}")
    if options.ppo and options.tuning == "head":
        raise RunError("--tuning: expected lora or full with --ppo, found head")


def _title(options: argparse.Namespace) -> str:
    place = options.topology if options.slices == 1 else f"{options.slices} slices of {options.topology}"
    prefix, responses, length = f"{options.prefix:,}", options.responses, f"{options.response_length:,}"
    if options.ppo:
        work = f"ppo ({options.tuning or 'lora'})"
        sizes = f"prompts of {prefix}, {responses} rollouts of {length}"
    elif options.sample:
        work, sizes = "sampling", f"{responses} samples of {length} tokens a prompt of {prefix}"
    else:
        work = f"training ({options.tuning or 'full'})" if options.train else "scoring"
        sizes = f"prefix {prefix}, {responses} responses of {length}"
        if options.questions_per_user > 1:
            sizes += f", {options.questions_per_user} questions a user"
    return f"{work} of {options.model} on {place}: {sizes}, {options.dtype}"
