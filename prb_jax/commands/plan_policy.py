"""`prb plan --ppo`: do policy, reference, value function and reward model fit a slice?"""

import argparse
import json

from prb_jax.commands.arguments import Parser, picked
from prb_jax.commands.terminal import print_table
from prb_jax.errors import RunError
from prb_jax.models import REMAT


def add_policy_arguments(sub: Parser) -> None:
    """Add the arguments of `prb plan --ppo`."""
    sub.option("--ppo", "a step of `prb ppo`: policy, reference, value function, reward")
    sub.option("--reward MODEL", "with --ppo: a reward model on the same chips (default: it is elsewhere)")
    sub.option(
        "--value-trunk",
        "with --ppo: whether the value function shares the trunk of the policy (default: own)",
        choices=("own", "shared"),
    )


def wants_policy(options: argparse.Namespace) -> bool:
    """Tell whether a policy is to be planned.

    Raises:
      RunError: options that go with --ppo alone, or not with it.
    """
    if not options.ppo:
        for name in ("reward", "value_trunk"):
            if getattr(options, name) is not None:
                raise RunError(f"--{name.replace('_', '-')} is for policies: it needs --ppo")
        return False
    given = {
        "train": options.train,
        "sample": options.sample,
        "quantize": options.quantize,
        "sweep": options.sweep,
        "attention": options.attention != "auto",
        "questions-per-user": options.questions_per_user > 1,
    }
    refused = [name for name, there in given.items() if there]
    if refused:
        raise RunError(f"--{refused[0]} does not go with --ppo: leave it out")
    if options.tuning == "head":
        raise RunError("--tuning: expected lora or full with --ppo, found head")
    return True


def run_policy(options: argparse.Namespace) -> int:
    """Plan, and print a table or JSON."""
    from prb_jax.plan.policy import plan_policy
    from prb_jax.plan.tables import policy_table

    found = plan_policy(
        options.model,
        **picked(options, "topology slices mesh reward prefix responses response_length batch dtype"),
        tuning=options.tuning or "lora",
        trunk=options.value_trunk or "own",
        remat=options.remat or REMAT,
    )
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    place = options.topology if options.slices == 1 else f"{options.slices} slices of {options.topology}"
    title = (
        f"ppo ({options.tuning or 'lora'}) of {options.model} on {place}: prompts of {options.prefix:,}, "
        f"{options.responses} rollouts of {options.response_length:,}, {options.dtype}"
    )
    print_table(policy_table(found, title=title))
    return 0
