"""`prb policy-accuracy`: does a policy that is guided by a reward give the preferred response the higher score?"""

import argparse
from collections.abc import Mapping
from typing import Any

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_history,
    add_no_progress,
    add_prompt,
    call,
    chosen,
    not_negative,
    number_type,
    several,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.data.options import Option
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="what was scored is kept: the same command continues the run")
    sub.option("POLICY", "folder or hub id of a causal language model")
    sub.option(
        "--rewards MODEL ...", "models or baselines, as of `prb evaluate`", required=True, extend=False
    )
    add_data(sub)
    add_history(sub)
    sub.option("--out DIR", "run folder: rows.jsonl, summary.json, behaviour.json", required=True)
    sub.option(
        "--lambdas L,L",
        "strengths of the reward, chosen among on validation users",
        several(number_type(Option(), float)),
        default=(0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0),
    )
    sub.option(
        "--candidates C",
        "likely tokens of each step whose rewards are computed; 0 leaves out seq_logprob",
        not_negative,
        default=10,
    )
    sub.option(
        "--score S",
        "the headline: seq_logprob (default), seq_logprob_topk, token_score_sum, seq_score; each also with "
        "_lennorm behind it",
        default="seq_logprob",
    )
    sub.option("--validation SHARE", "of the users", float, default=0.3)
    add_prompt(sub, of="policy")
    sub.option("--seed N", "of the split", not_negative, default=0)
    sub.fields(LoadOptions, without="readout")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Score, and print the figures and the curves."""
    with until_terminated(options):
        start(options)
        from prb_jax.generation.policy_accuracy import policy_accuracy

        loading = chosen(options, LoadOptions)
        result = call(
            policy_accuracy,
            options,
            strengths=options.lambdas,
            policy_loading=loading,
            loading=loading.devices,
        )
    _print(result.summary)
    print(f"written to {result.out}")
    return 0


def _print(summary: Mapping[str, Any]) -> None:
    from rich.markup import escape

    from prb_jax.reports.style import NONE, new_table
    from prb_jax.reports.tables import interval

    def number(value: float | None) -> str:
        return NONE if value is None else f"{value:.3f}"

    alone = {
        "policy alone (lambda 0)": summary["lambda_0"]["sum"],
        "policy alone, by length": summary["lambda_0"]["lennorm"],
        "longer response": summary["length"],
    }
    controls = new_table(f"{summary['n_test']:,} comparisons of test users", ("control", "policy accuracy"))
    for name, found in alone.items():
        controls.add_row(name, escape(interval(found["policy_accuracy"], found["ci95"])))
    for name, found in summary["rewards"].items():
        half = found["reward_alone"]["half_credit"]
        controls.add_row(
            escape(f"reward alone: {name}"), escape(interval(half["policy_accuracy"], half["ci95"]))
        )
    print_table(controls)
    for name, found in summary["rewards"].items():
        table = new_table(name, ("score", "lambda", "policy accuracy", "ties", "another user", "with length"))
        for score, figures in found["scores"].items():
            cells = [score, f"{figures['lambda']:g}", interval(figures["policy_accuracy"], figures["ci95"])]
            cells += [number(figures[key]) for key in ("ties", "another_user", "length_correlation")]
            table.add_row(*map(escape, cells))
        table.caption = "lambda: chosen on validation users; with length: correlation of score and tokens"
        if any(figures["lambda"] == max(summary["strengths"]) for figures in found["scores"].values()):
            table.caption += "\nthe largest lambda was chosen: larger ones may do better (--lambdas)"
        if found["token_level"]:
            table.caption += escape(f"\nno rewards of tokens: {found['token_level']}")
        print_table(table)
        own = found["scores"][found["headline"]]
        curve = new_table(f"{found['headline']} by lambda", ("lambda", "validation", "test"))
        for point in own["curve"]:
            curve.add_row(f"{point['lambda']:g}", number(point["validation"]), number(point["test"]))
        shares = ", ".join(f"{float(part):.0%} {number(value)}" for part, value in own["prefixes"].items())
        curve.caption = escape(f"first part of the response: {shares}")
        print_table(curve)
