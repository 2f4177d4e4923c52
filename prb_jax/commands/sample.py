"""Verbs of a policy: `prb sample` draws texts, `prb guide` guides them, `prb policy-accuracy` tests the guide.

Verbs of samples with rewards: `prb best-of-n`, and `prb distil`, which makes training data of them.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prb_jax.commands.arguments import OF_REWARDS, Parser, asked_judge, call, chosen
from prb_jax.commands.process import print_table, start
from prb_jax.commands.values import not_negative, number_type, positive
from prb_jax.errors import counted
from prb_jax.models.readouts.load_options import IMPLICIT, LoadOptions
from prb_jax.platform.processes.sharing import process_index
from prb_jax.records.options import Option
from prb_jax.text.view import ViewOptions


def add(sub: Parser) -> None:
    from prb_jax.behaviour.generation.rules import SampleOptions

    about = "Folder (also at gs:// or s3://) or hub id of a causal language model"
    sub.option("[MODEL]", about, dest="policy")
    sub.endpoint()
    sub.data()
    sub.option("--out DIR", "Run folder: run.json, samples.jsonl, summary.json", required=True)
    sub.fields(SampleOptions, make="options")
    sub.prompt(of="model", rows="sample")
    sub.fields(LoadOptions, without=OF_REWARDS, make="loading")
    sub.part("draw")
    sub.long_run("the samples so far are kept, and the same command continues the run")


def run(options: argparse.Namespace) -> None:
    """Sample, and print counts."""
    if options.endpoint is None:
        start(options)
    from prb_jax.behaviour.generation.sample import sample_data

    result = call(sample_data, options, model=options.policy)
    if process_index() > 0:
        return
    summary = result.summary
    if options.part is not None:
        print(f"part {options.part}: {counted(summary['n'], 'sample')}, written to {result.out}")
        return
    ends = ", ".join(f"{name} {count:,}" for name, count in sorted(summary["finish"].items()))
    tokens = "" if summary["mean_tokens"] is None else f", {summary['mean_tokens']:.1f} tokens a sample"
    print(f"{summary['n']:,} prompts, {summary['samples']} samples of each{tokens}; ended by: {ends}")
    dropped = summary["posts_dropped"]
    if dropped and dropped["prompts"]:
        lost = f"lost {counted(dropped['posts'], 'post')} that did not fit"
        print(f"{counted(dropped['prompts'], 'prompt')} {lost}")
    print(f"written to {result.out}")


def add_guide(sub: Parser) -> None:
    from prb_jax.behaviour.generation.rules import SampleOptions

    sub.option("POLICY", "Folder or hub id of a causal language model")
    sub.option("--reward MODEL", "Reward model with the policy's tokenizer (default: none, only the policy)")
    sub.data()
    sub.history()
    about = "Model whose score is a text's quality, e.g. baseline:persona-truth for generated persons"
    sub.option("--quality MODEL", about)
    sub.option("--out DIR", "Run folder: samples.jsonl, summary.json, behaviour.json", required=True)
    sub.option("--weight W", "Weight of the reward; 0 uses only the policy", float, default=1.0)
    sub.option("--candidates C", "Likely tokens tried per step, or chunks drawn", positive, default=10)
    sub.option(
        "--chunk L",
        "Guide chunks of L tokens, drawn at --temperature above 0, instead of tokens; works with any reward model",
        positive,
    )
    sub.fields(
        SampleOptions,
        "temperature n max_new_tokens stop stop_ids seed",
        make="options",
        temperature={"default": 0.0, "meaning": "Sampling temperature; 0 takes the best candidate (default)"},
        max_new_tokens={"default": 128},
    )
    sub.prompt(of="policy", rows="text")
    sub.fields(LoadOptions, without="readout", reference=_reference("--reward"))
    sub.long_run("the texts so far are kept, and the same command continues the run")


def _reference(policy: str) -> dict[str, str]:
    about = f"Model that {policy}, a policy trained by DPO, started from: rewards are beta (log p - log p_reference)"
    return {"meaning": about}


def _loadings(options: argparse.Namespace) -> dict[str, LoadOptions]:
    """Return options for opening the policy, and for opening rewards beside it."""
    asked, plain = chosen(options, LoadOptions), LoadOptions()
    of_policy = replace(asked, **{name: getattr(plain, name) for name in IMPLICIT})
    return {"policy_loading": of_policy, "loading": asked.of_reward}


def run_guide(options: argparse.Namespace) -> None:
    """Draw guided texts, and print the figures."""
    start(options)
    from prb_jax.behaviour.generation.guide import guide
    from prb_jax.metrics.texts import TEXT_LABELS
    from prb_jax.reports.table import facts_table, interval

    result = call(guide, options, **_loadings(options))
    if process_index() > 0:
        return
    summary = result.summary
    facts = [
        (TEXT_LABELS[name], interval(one["value"], one["ci95"])) for name, one in summary["text"].items()
    ]
    facts.append((TEXT_LABELS["corpus_bleu"], f"{summary['corpus_bleu']:.2f}"))
    if one := summary.get("quality"):
        facts.append((f"quality: {one['model']}", interval(one["value"], one["ci95"])))
    guided = f"weight {summary['weight']:g}" if "weight" in summary else "the policy alone"
    title = f"{summary['n']:,} prompts, {guided}, beside the preferred responses"
    print_table(facts_table(facts, title=title))
    print(f"written to {result.out}")


def add_policy_accuracy(sub: Parser) -> None:
    sub.option("POLICY", "Folder or hub id of a causal language model")
    about = "Models or baselines, see `prb evaluate`"
    sub.option("--rewards MODEL ...", about, required=True, commas=True)
    sub.data()
    sub.history()
    sub.option("--out DIR", "Run folder: rows.jsonl, summary.json, behaviour.json", required=True)
    sub.option(
        "--lambdas L,L",
        "Strengths of the reward; validation users choose the best",
        number_type(Option(), float),
        default=(0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0),
    )
    about = "Likely tokens per step to compute rewards for; 0 leaves out seq_logprob"
    sub.option("--candidates C", about, not_negative, default=10)
    sub.option(
        "--score S",
        "Score for the headline: seq_logprob (default), seq_logprob_topk, token_score_sum, seq_score; each also with "
        "the suffix _lennorm",
        default="seq_logprob",
    )
    sub.option("--validation SHARE", "Share of validation users", float, default=0.3)
    sub.prompt(of="policy")
    sub.option("--seed N", "Seed of the split", not_negative, default=0)
    sub.fields(LoadOptions, without="readout", reference=_reference("each of --rewards"))
    sub.long_run("all scores are kept: the same command continues the run")


def run_policy_accuracy(options: argparse.Namespace) -> None:
    """Score, and print the figures and the curves."""
    start(options)
    from prb_jax.behaviour.generation.policy_accuracy import policy_accuracy

    result = call(policy_accuracy, options, strengths=options.lambdas, **_loadings(options))
    if process_index() > 0:
        return
    _print_accuracy(result.summary)
    print(f"written to {result.out}")


def _print_accuracy(summary: Mapping[str, Any]) -> None:
    from prb_jax.reports.table import Table, bounded, field, interval, number

    alone = {
        "policy alone (lambda 0)": summary["lambda_0"]["sum"],
        "policy alone, by length": summary["lambda_0"]["lennorm"],
        "longer response": summary["length"],
    }
    for name, of_reward in summary["rewards"].items():
        alone[f"reward alone: {name}"] = of_reward["reward_alone"]["half_credit"]
    rows = [
        (name, interval(of_reward["policy_accuracy"], of_reward["ci95"])) for name, of_reward in alone.items()
    ]
    title = f"{summary['n_test']:,} comparisons of test users"
    print_table(Table(title, ("control", "policy accuracy"), rows))
    columns = {
        "score": field("score"),
        "lambda": field("lambda", "{:g}"),
        "policy accuracy": bounded("policy_accuracy", "ci95"),
        "ties": field("ties", "{:.3f}"),
        "another user": field("another_user", "{:.3f}"),
        "with length": field("length_correlation", "{:.3f}"),
    }
    points = {
        "lambda": columns["lambda"],
        "validation": field("validation", "{:.3f}"),
        "test": field("test", "{:.3f}"),
    }
    for name, of_reward in summary["rewards"].items():
        note = "lambda: chosen on validation users; with length: correlation of score and tokens"
        if any(figures["lambda"] == max(summary["strengths"]) for figures in of_reward["scores"].values()):
            note += "\nthe largest lambda was chosen: larger ones may do better (--lambdas)"
        if of_reward["token_level"]:
            note += f"\nno rewards of tokens: {of_reward['token_level']}"
        scores = [{"score": score, **figures} for score, figures in of_reward["scores"].items()]
        print_table(Table.of(name, scores, columns, note=note))
        headline = of_reward["scores"][of_reward["headline"]]
        shares = ", ".join(
            f"{float(part):.0%} {number(value)}" for part, value in headline["prefixes"].items()
        )
        note = f"first part of the response: {shares}"
        print_table(Table.of(f"{of_reward['headline']} by lambda", headline["curve"], points, note=note))


def add_best_of_n(sub: Parser) -> None:
    sub.option(
        "--samples DIR|FILE",
        "Finished run of `prb sample`; or a .jsonl file of {id, sample, text} with texts from any source, with --data",
        required=True,
    )
    sub.option(
        "--rewards MODEL ...",
        "Models or baselines, see `prb evaluate`; or judge:MODEL, a language model that rates (judge:URL#NAME "
        "at an endpoint), or pairs:MODEL, which compares the samples of a prompt",
        required=True,
        commas=True,
    )
    sub.option(
        "--quality Q",
        "Quality: ROUGE-L against the best labelled response (default: reference); a .jsonl of {id, sample, quality}; "
        "a model whose score is the quality, e.g. baseline:persona-truth for generated persons; or rubric:MODEL "
        "(rubric:URL#NAME), a judge of the true rubric's aspects",
        default="reference",
    )
    sub.option("--out DIR", "Run folder: rewards.jsonl, summary.json, curves.png", required=True)
    about = "Data of the samples, if it has moved or the samples are a file"
    sub.option("--data NAME_OR_PATH ...", about, extend=False)
    sub.history()
    sub.fields(ViewOptions)
    sub.option("--prompts DIR", "Prompt folder of the original scripts, for judges that ask like them")
    sub.judge()
    sub.fields(LoadOptions, make="loading")
    sub.long_run("all scores are kept: the same command continues the run")


def run_best_of_n(options: argparse.Namespace) -> None:
    """Score, and print the curves."""
    start(options)
    from prb_jax.behaviour.judges.best_of_n import best_of_n
    from prb_jax.reports.best_of_n import render_best_of_n

    result = call(best_of_n, options, judge=asked_judge(options, prompts=options.prompts))
    if process_index() > 0:
        return
    summary, curves = result.summary, result.summary["curves"]
    print_table(render_best_of_n(summary))
    if summary["empty"]:
        print(f"{summary['empty']:,} empty samples cannot be scored and are left out")
    if summary["unread"]:
        print(f"{summary['unread']:,} samples have no number of a judge and are left out")
    if left := len(summary["left_out"]):
        print(f"{left:,} of {left + summary['n']:,} prompts have no sample that was scored and are left out")
    if fewer := summary.get("fewer"):  # runs of earlier versions do not count them
        print(f"prompts with fewer samples than others: {fewer:,} (their best of k is that of all they have)")
    if reason := next(iter(curves.values()))[0]["ci95_reason"]:
        print(f"no intervals: {reason}")
    print(f"written to {result.out}")


def add_distil(sub: Parser) -> None:
    sub.option("RUN", "Finished run of `prb best-of-n`", dest="run_folder")
    about = "Reward that decides, named as in --rewards of the run; required if there are several"
    sub.option("--reward NAME", about)
    about = "Rejected sample: the worst, or a random one, worse by the margin (default: worst)"
    sub.option("--rejected KIND", about, default="worst", choices=("worst", "random"))
    sub.option("--margin M", "Smallest difference of the two rewards of a pair", float, default=0.0)
    sub.option("--seed N", "Seed of --rejected random", not_negative, default=0)
    sub.option("--samples DIR", "Run of `prb sample`, if it has moved")
    sub.option("--data NAME_OR_PATH ...", "Data of the samples, if it has moved", extend=False)
    sub.option("--out DIR", "Folder for pairs.jsonl and distil.json", required=True)


def run_distil(options: argparse.Namespace) -> None:
    """Write the best samples against worse ones, and print the number of pairs."""
    from prb_jax.behaviour.judges.distil import distil

    result = call(distil, options, run=options.run_folder)
    summary = result.summary
    print(
        f"{summary['pairs']:,} pairs of {summary['prompts']:,} prompts; mean reward "
        f"{summary['chosen_reward']:.3f} chosen, {summary['rejected_reward']:.3f} rejected, "
        f"{summary['mean_reward']:.3f} of all samples"
    )
    reasons = {
        "unsampled": "no sample that can be scored",
        "single": "one scored sample",
        "too_close": "rewards too close",
        "same_text": "twice the same text",
    }
    if left_out := [f"{summary[key]:,} with {why}" for key, why in reasons.items() if summary[key]]:
        print(f"left out: {', '.join(left_out)}")
    print(f"written to {result.path}")
