"""`prb bench`: time scoring, training, sampling, guiding, PPO, serving, loading or ranking on this machine."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prb_jax.commands.arguments import Parser, picked, positive, several
from prb_jax.commands.process import prepare_jax
from prb_jax.commands.terminal import print_table
from prb_jax.errors import RunError
from prb_jax.models import DTYPES, REMAT, REMAT_POLICIES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.training import TUNINGS

Measure = Callable[[argparse.Namespace], list[Any]]


def add(sub: Parser) -> None:
    """Add the sub-verbs and their arguments."""
    sub_verbs = sub.add_subparsers(required=True, parser_class=Parser)

    score = _add(
        sub_verbs, "score", _score, about="time scoring random tokens of the lengths of personalised data"
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

    train = _add(sub_verbs, "train", _train, about="time steps of training on random tokens of such lengths")
    _add_workload(train, pairs="pairs of a step (default: 8, and all users whole)")
    train.option("--against", "also time TRL's RewardTrainer, and compare", choices=("trl",))
    train.option("--tuning", "what is trained", default="full", choices=TUNINGS)
    train.option("--remat", "what our backward pass computes again", default=REMAT, choices=REMAT_POLICIES)
    train.option(
        "--against-pairs N", "pairs of a microbatch of TRL's (default: 2 on CPUs, 8 on GPUs)", positive
    )

    sample = _add(sub_verbs, "sample", _sample, about="time drawing texts from a causal language model")
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
        _guide,
        about="time a guided token, beside one of the policy and of the reward model",
    )
    _add_texts(guide, prompts=4, new_tokens=32)
    guide.option("--candidates C", "tried for each token", positive, default=10)
    guide.fields(LoadOptions, "attention")

    policy = _add(sub_verbs, "ppo", _ppo, about="time training a policy, rollouts and updates")
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
        _serve,
        about="time `prb serve` under many clients, beside the scorer of `prb evaluate`",
    )
    serve.option("--clients N", "at a time", positive, default=500)
    serve.option("--seconds S", "that they ask", positive, default=30)
    _add_lengths(serve)

    _add(sub_verbs, "load", _load, about="time loading a folder's weights, beside plain reading of its files")

    rank = _add(
        sub_verbs, "rank", _rank, about="time ranking profiles by a model that is an encoder of texts"
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


def _add(verbs: Any, name: str, measure: Measure, *, about: str) -> Parser:
    sub = verbs.add_parser(name, help=about, description=about)
    sub.set_defaults(measure=measure, parser=sub)
    sub.option(
        "MODEL",
        "a Hugging Face folder; to score and train also a config.json or a shape such as qwen3-8b, with random "
        "weights",
    )
    sub.option("--dtype DTYPE ...", "default: the checkpoint's", default=[None], choices=DTYPES, extend=False)
    sub.option("--mesh AXES", "as in fsdp=4,tensor=2")
    if measure is not _serve:
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


def _add_texts(parser: Parser, *, prompts: int, new_tokens: int) -> None:
    """Prompts, and the lengths of the texts that continue them; the numbers are defaults."""
    numbers = (
        ("--prompts", prompts, "at a time"),
        ("--prompt-tokens", 2000, "length of a prompt, about"),
        ("--new-tokens", new_tokens, "of each text, at most"),
    )
    for flag, default, meaning in numbers:
        parser.add_argument(
            flag, type=positive, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )


def _add_samples(parser: Parser, default: int) -> None:
    parser.option(
        "--samples N ...",
        f"texts of each prompt, one number or several (default: {default})",
        positive,
        default=[default],
        extend=False,
    )


def _add_lengths(sub: Parser) -> None:
    sub.option("--prefix-tokens N", "mean length of the prefix", positive, default=2000)
    sub.option("--response-tokens N", "mean length of a response", positive, default=130)
    sub.option("--batch-tokens N", "padded tokens computed at a time", positive)


def run(options: argparse.Namespace) -> int:
    """Measure, and write the numbers."""
    prepare_jax()
    results = options.measure(options)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


def _score(options: argparse.Namespace) -> list[Any]:
    if options.against_responses is not None and options.against != "transformers-cached":
        raise RunError("--against-responses needs --against transformers-cached")
    from prb_jax.bench.scoring import bench_scoring, line
    from prb_jax.bench.table import bench_table

    results = []
    for dtype in options.dtype:
        for form in dict.fromkeys((None, options.quantize)):
            for result in bench_scoring(
                options.model,
                **picked(options, "responses against_sequences against_responses"),
                quantize=form,
                **_workload(options, dtype),
            ):
                results.append(result)
                print(line(result), flush=True)
    print_table(bench_table("scoring", results, rival=options.against))
    return results


def _train(options: argparse.Namespace) -> list[Any]:
    if options.against and options.tuning != "full":
        raise RunError(f"--against trl trains all weights: leave out --tuning {options.tuning}")
    from prb_jax.bench.table import bench_table
    from prb_jax.bench.training import bench_training, line

    results = []
    for dtype in options.dtype:
        for result in bench_training(
            options.model, **picked(options, "tuning remat against_pairs"), **_workload(options, dtype)
        ):
            results.append(result)
            print(line(result), flush=True)
    print_table(bench_table("training", results, rival=options.against))
    return results


def _sample(options: argparse.Namespace) -> list[Any]:
    if options.against_prompts is not None and options.against is None:
        raise RunError("--against-prompts needs --against transformers")
    from prb_jax.bench.sampling import bench_sampling
    from prb_jax.bench.table import bench_table

    chosen = picked(
        options, "prompts prompt_tokens new_tokens temperature rounds against against_prompts mesh attention"
    )
    results = [
        bench_sampling(options.model, dtype=dtype, samples=samples, **chosen)
        for dtype in options.dtype
        for samples in options.samples
    ]
    print_table(bench_table("sampling", results))
    return results


def _guide(options: argparse.Namespace) -> list[Any]:
    from prb_jax.bench.guidance import bench_guidance
    from prb_jax.bench.table import bench_table

    chosen = picked(options, "prompts prompt_tokens new_tokens candidates rounds mesh attention")
    results = [bench_guidance(options.model, dtype=dtype, **chosen) for dtype in options.dtype]
    print_table(bench_table("guidance", results))
    return results


def _ppo(options: argparse.Namespace) -> list[Any]:
    if options.against_rows is not None and options.against is None:
        raise RunError("--against-rows needs --against trl")
    from prb_jax.bench.policy import bench_policy
    from prb_jax.bench.table import bench_table

    _check_weights(options)
    chosen = picked(options, "prompts prompt_tokens new_tokens rounds against against_rows mesh attention")
    results = [
        bench_policy(options.model, dtype=dtype, samples=samples, **chosen)
        for dtype in options.dtype
        for samples in options.samples
    ]
    print_table(bench_table("training a policy", results))
    return results


def _workload(options: argparse.Namespace, dtype: str | None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        **picked(
            options,
            "pairs prefix_tokens response_tokens questions_per_user batch_tokens attention against mesh rounds",
        ),
    }


def _serve(options: argparse.Namespace) -> list[Any]:
    from prb_jax.bench.serving import bench_serving
    from prb_jax.bench.table import bench_table

    _check_weights(options)
    chosen = picked(options, "clients seconds prefix_tokens response_tokens batch_tokens mesh")
    results = [bench_serving(options.model, dtype=dtype, **chosen) for dtype in options.dtype]
    print_table(bench_table("serving", results))
    return results


def _load(options: argparse.Namespace) -> list[Any]:
    from prb_jax.bench.loading import bench_loading
    from prb_jax.bench.table import bench_table

    _check_weights(options)
    results = []
    for dtype in options.dtype:
        results += bench_loading(options.model, mesh=options.mesh, dtype=dtype, rounds=options.rounds)
    print_table(bench_table("loading", results))
    return results


def _rank(options: argparse.Namespace) -> list[Any]:
    if options.against_users is not None and options.against is None:
        raise RunError("--against-users needs --against transformers")
    from prb_jax.bench.ranking import bench_ranking
    from prb_jax.bench.table import bench_table

    _check_weights(options)
    results = [
        bench_ranking(
            options.model, **picked(options, "data users rounds against against_users mesh"), dtype=dtype
        )
        for dtype in options.dtype
    ]
    print_table(bench_table("ranking", results))
    return results


def _check_weights(options: argparse.Namespace) -> None:
    from prb_jax.models.named_shapes import has_no_weights

    if has_no_weights(options.model):
        raise RunError(f"MODEL: expected a model with weights, found {options.model}")
