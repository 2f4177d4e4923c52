"""`prb plan`: what a model takes on a slice of TPUs."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from prb_jax.commands.arguments import Parser, picked, positive
from prb_jax.commands.plan_policy import add_policy_arguments, run_policy, wants_policy
from prb_jax.commands.terminal import print_table
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
    add_policy_arguments(sub)
    sub.option("--train", "a training step's forward and backward pass")
    sub.option(
        "--sample",
        "the sampler: K samples of R tokens of each of B prompts of P tokens, a token of each in a step",
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
    if wants_policy(options):
        # No device is used: a program for TPUs is compiled on the CPU.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        return run_policy(options)
    if not options.train and (options.tuning or options.remat):
        raise RunError(f"--{'tuning' if options.tuning else 'remat'} is for training only: it needs --train")
    if options.train and options.quantize:
        raise RunError("--quantize is for scoring only: leave it out with --train")
    if options.sample:
        _check_sample(options)
    if options.train and options.questions_per_user > 1:
        raise RunError("--questions-per-user is for scoring only: leave it out with --train")
    if options.spread and not options.train:
        raise RunError("--spread is for training only: it needs --train")
    if options.sweep and options.mesh:
        raise RunError("--sweep tries meshes itself: leave out --mesh")
    if options.questions_per_user > 1 and options.attention != "paged":
        raise RunError("--questions-per-user is for packed streams: it needs --attention paged")
    # No device is used: a program for TPUs is compiled on the CPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from prb_jax.plan.planner import plan
    from prb_jax.plan.sweeping import sweep
    from prb_jax.plan.tables import plan_table, sweep_table, verdict

    def report(each: "Plan") -> None:
        print(f"prb: {each.mesh} batch {each.batch}: {verdict(each)}", file=sys.stderr, flush=True)

    common: dict[str, Any] = {
        "topology": options.topology,
        "slices": options.slices,
        "train": options.train,
        "tuning": options.tuning or "full",
        "prefix": options.prefix,
        "responses": options.responses,
        "response_length": options.response_length,
        "questions_per_user": options.questions_per_user,
        "spread": options.spread,
        "dtype": options.dtype,
        "remat": options.remat or REMAT,
        "quantize": options.quantize,
        "attention": options.attention,
    }
    if options.sample:
        return _sample(options)
    if options.sweep:
        batches = () if options.batch is None else (options.batch,)
        result = sweep(options.model, batches=batches, report=report, **common)
        found = result.best or result.plans[0]
        shown, figures = (
            sweep_table(result.plans, title=_title(options)),
            {"mesh": found.mesh, "batch": found.batch},
        )
    else:
        found = plan(options.model, mesh=options.mesh, batch=options.batch, **common)
        shown, figures = plan_table(found, title=_title(options)), {}
        if options.json and found.note:
            print(f"prb: {found.note}", file=sys.stderr)
    if options.json:
        print(json.dumps({**found.to_json(), **figures}))
    else:
        print_table(shown)
    return 0


def _check_sample(options: argparse.Namespace) -> None:
    """Raise RunError for options that do not go with --sample."""
    given = {
        "train": options.train,
        "sweep": options.sweep,
        "attention": options.attention != "auto",
        "questions-per-user": options.questions_per_user > 1,
    }
    for name, there in given.items():
        if there:
            raise RunError(f"--sample: is a plan of its own: leave out --{name}")


def _sample(options: argparse.Namespace) -> int:
    """Plan the sampler, and print a table or JSON."""
    from prb_jax.plan.sampling import plan_sampling
    from prb_jax.plan.tables import sampling_table

    found = plan_sampling(
        options.model,
        **picked(options, "topology slices mesh batch dtype quantize"),
        prompt=options.prefix,
        samples=options.responses,
        new_tokens=options.response_length,
    )
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        print_table(sampling_table(found, title=_title(options)))
    return 0


def _title(options: argparse.Namespace) -> str:
    if options.sample:
        return (
            f"sampling of {options.model} on {options.topology}: {options.responses} samples of "
            f"{options.response_length:,} tokens a prompt of {options.prefix:,}, {options.dtype}"
        )
    work = f"training ({options.tuning or 'full'})" if options.train else "scoring"
    place = options.topology if options.slices == 1 else f"{options.slices} slices of {options.topology}"
    people = f", {questions} questions a user" if (questions := options.questions_per_user) > 1 else ""
    return (
        f"{work} of {options.model} on {place}: prefix {options.prefix:,}, "
        f"{options.responses} responses of {options.response_length:,}{people}, {options.dtype}"
    )
