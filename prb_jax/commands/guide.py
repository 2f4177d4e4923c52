"""`prb guide`: texts of a policy that a reward model guides token by token or chunk by chunk."""

import argparse

from prb_jax.commands.arguments import (
    Parser,
    add_data,
    add_history,
    add_no_progress,
    add_prompt,
    call,
    chosen,
    positive,
)
from prb_jax.commands.process import start, until_terminated
from prb_jax.commands.terminal import print_table
from prb_jax.readouts.load_options import LoadOptions


def add(sub: Parser) -> None:
    """Add the arguments."""
    from prb_jax.generation.rules import SampleOptions

    sub.set_defaults(after_interrupt="the texts so far are kept, and the same command continues the run")
    sub.option("POLICY", "folder or hub id of a causal language model")
    sub.option("--reward MODEL", "a reward model with the policy's tokenizer (default: the policy alone)")
    add_data(sub)
    add_history(sub)
    sub.option(
        "--quality MODEL",
        "whose score says how good a text is, as baseline:persona-truth for generated persons",
    )
    sub.option("--out DIR", "run folder: samples.jsonl, summary.json, behaviour.json", required=True)
    sub.option("--weight W", "of the reward; 0 is the policy alone", float, default=1.0)
    sub.option("--candidates C", "likely tokens tried a step, or chunks drawn", positive, default=10)
    sub.option(
        "--chunk L",
        "guide chunks of L tokens, drawn at --temperature above 0, instead of single tokens; any reward model",
        positive,
    )
    sub.fields(
        SampleOptions,
        "temperature n max_new_tokens stop stop_ids seed",
        temperature={"default": 0.0, "meaning": "0 takes the best candidate (default)"},
        max_new_tokens={"default": 128},
    )
    add_prompt(sub, of="policy", rows="text")
    sub.fields(LoadOptions, without="readout")
    add_no_progress(sub)


def run(options: argparse.Namespace) -> int:
    """Draw, and print the figures."""
    with until_terminated(options):
        start(options)
        from prb_jax.generation.guide import guide
        from prb_jax.generation.rules import SampleOptions
        from prb_jax.metrics.texts import TEXT_LABELS
        from prb_jax.reports.style import facts_table
        from prb_jax.reports.tables import interval

        loading = chosen(options, LoadOptions)
        result = call(
            guide,
            options,
            options=chosen(options, SampleOptions),
            policy_loading=loading,
            loading=loading.devices,
        )
    found = result.summary
    facts = [(TEXT_LABELS[name], interval(one["value"], one["ci95"])) for name, one in found["text"].items()]
    facts.append((TEXT_LABELS["corpus_bleu"], f"{found['corpus_bleu']:.2f}"))
    if one := found.get("quality"):
        facts.append((f"quality: {one['model']}", interval(one["value"], one["ci95"])))
    guided = f"weight {found['weight']:g}" if "weight" in found else "the policy alone"
    title = f"{found['n']:,} prompts, {guided}, beside the preferred responses"
    print_table(facts_table(facts, title=title))
    print(f"written to {result.out}")
    return 0
