"""`prb plan`: what a model takes on a slice of TPUs."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from prb_jax.commands.arguments import Parser, call, given_flags, keywords, positive
from prb_jax.commands.process import print_table
from prb_jax.errors import RunError
from prb_jax.models import DTYPES, REMAT, REMAT_POLICIES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.training import TUNINGS

if TYPE_CHECKING:
    from prb_jax.plan.planner import Plan


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.option("MODEL_OR_CONFIG", "config.json, model folder, or a shape such as qwen3-8b", dest="model")
    sub.option("--topology T", "as v5e:4x4 or v5p:2x2x4", required=True)
    sub.option("--slices N", "such slices, each with a copy", positive, default=1)
    sub.option("--mesh M", "as fsdp=4,tensor=4 (default: fsdp over all chips of a slice)")
    sub.option("--train", "a training step's forward and backward pass")
    sub.option(
        "--sample",
        "the sampler: K samples of R tokens of each of B prompts of P tokens, a token of each in a step",
    )
    sub.option("--ppo", "a step of `prb ppo`: policy, reference, value function, reward")
    sub.option("--reward MODEL", "with --ppo: a reward model on the same chips (default: it is elsewhere)")
    sub.option(
        "--value-trunk",
        "with --ppo: whether the value function shares the trunk of the policy (default: own)",
        choices=("own", "shared"),
    )
    sub.option("--tuning", "with --train (default: full), or --ppo (default: lora)", choices=TUNINGS)
    sub.option("--remat", f"with --train or --ppo (default: {REMAT})", choices=REMAT_POLICIES)
    sub.option("--prefix P", "tokens", positive, default=3840)
    sub.option("--responses K", "of a tree", positive, default=2)
    sub.option("--response-length R", "tokens", positive, default=128)
    sub.option(
        "--questions-per-user Q",
        "trees in a row with the same profile: the prefix but for a question of 40 tokens; with --attention "
        "paged",
        positive,
        default=1,
    )
    sub.option(
        "--spread S",
        "with --train: lengths are log-normal with the medians P and R; S is the standard deviation of the "
        "logarithm of prefixes, and half of it that of responses; people's profiles have 0.45 (default: 0, all alike)",
        float,
        default=0.0,
    )
    sub.option("--batch B", "trees (default: 2, or Q where that is more, for each batch shard)", positive)
    sub.fields(LoadOptions, "quantize attention")
    sub.option("--dtype", "", default="bfloat16", choices=DTYPES)
    sub.option("--sweep", "try meshes and batch sizes: the best that fit come first")
    sub.option("--json", "print one JSON object (of a sweep, the best)")


def run(options: argparse.Namespace) -> int:
    """Plan, and print a table or JSON."""
    _check(options)
    # No device is used: a program for TPUs is compiled on the CPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from prb_jax.plan import tables
    from prb_jax.plan.planner import plan
    from prb_jax.plan.policy import plan_policy
    from prb_jax.plan.sampling import plan_sampling
    from prb_jax.plan.sweeping import sweep

    def report(planned: "Plan") -> None:
        print(
            f"prb: {planned.mesh} batch {planned.batch}: {tables.verdict(planned)}",
            file=sys.stderr,
            flush=True,
        )

    tuning = options.tuning or ("lora" if options.ppo else "full")
    title, remat, figures = _title(options, tuning), options.remat or REMAT, {}
    shared = keywords(plan, options, tuning=tuning, remat=remat)
    if options.ppo:
        trunk = options.value_trunk or "own"
        planned = call(plan_policy, options, tuning=tuning, trunk=trunk, remat=remat)
        table = tables.policy_table(planned, title=title)
    elif options.sample:
        sizes = {
            "prompt": options.prefix,
            "samples": options.responses,
            "new_tokens": options.response_length,
        }
        planned = call(plan_sampling, options, **sizes)
        table = tables.sampling_table(planned, title=title)
    elif options.sweep:
        batches = () if options.batch is None else (options.batch,)
        del shared["mesh"], shared["batch"]
        result = sweep(**shared, batches=batches, report=report)
        planned = result.best or result.plans[0]
        table = tables.sweep_table(result.plans, title=title)
        figures = {"mesh": planned.mesh, "batch": planned.batch}
    else:
        planned = plan(**shared)
        table = tables.plan_table(planned, title=title)
        if options.json and planned.note:
            print(f"prb: {planned.note}", file=sys.stderr)
    if options.json:
        print(json.dumps({**planned.to_json(), **figures}))
    else:
        print_table(table)
    return 0


_ALONE = "--train --sweep --attention --questions-per-user"
_CLASHES = (
    ("--ppo", f"--sample {_ALONE} --quantize", "does not go with --ppo: leave it out"),
    ("--sample", f"{_ALONE} --tuning --remat", "does not go with --sample, a plan of its own: leave it out"),
    ("--train", "--quantize --questions-per-user", "is for scoring only: leave it out with --train"),
    ("--sweep", "--mesh", "does not go with --sweep, which tries meshes itself: leave it out"),
)
_NEEDS = (
    (("--ppo",), "--reward --value-trunk", "is for policies: it needs --ppo"),
    (("--train", "--ppo"), "--tuning --remat", "is for training only: it needs --train"),
    (("--train",), "--spread", "is for training only: it needs --train"),
)


def _check(options: argparse.Namespace) -> None:
    """Raise RunError for options that do not go together."""
    given = given_flags(options)
    faults = [(others, words) for flag, others, words in _CLASHES if flag in given]
    faults += [(others, words) for needed, others, words in _NEEDS if not given & set(needed)]
    for others, words in faults:
        for other in others.split():
            if other in given:
                raise RunError(f"{other} {words}")
    if options.ppo and options.tuning == "head":
        raise RunError("--tuning: expected lora or full with --ppo, found head")
    if options.questions_per_user > 1 and options.attention != "paged":
        raise RunError("--questions-per-user is for packed streams: it needs --attention paged")


def _title(options: argparse.Namespace, tuning: str) -> str:
    place = options.topology if options.slices == 1 else f"{options.slices} slices of {options.topology}"
    prefix, responses, length = f"{options.prefix:,}", options.responses, f"{options.response_length:,}"
    if options.ppo:
        work, sizes = f"ppo ({tuning})", f"prompts of {prefix}, {responses} rollouts of {length}"
    elif options.sample:
        work, sizes = "sampling", f"{responses} samples of {length} tokens a prompt of {prefix}"
    else:
        work = f"training ({tuning})" if options.train else "scoring"
        sizes = f"prefix {prefix}, {responses} responses of {length}"
        if options.questions_per_user > 1:
            sizes += f", {options.questions_per_user} questions a user"
    return f"{work} of {options.model} on {place}: {sizes}, {options.dtype}"
