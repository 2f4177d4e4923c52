"""The options of `prb bench`, and which of them go together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from prb_jax.commands.model_options import add_attention, add_quantize
from prb_jax.models.named_shapes import SHAPES


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; ends the process with one line where they cannot be, as argparse does."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    _check(parser, options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prb bench",
        allow_abbrev=False,
        description="Times scoring, training, loading or ranking on this machine. Tokens of scoring and training are "
        "random, of the lengths of personalised data.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Hugging Face folder, or a config.json (random weights)"
    )
    parser.add_argument("--train", action="store_true", help="time steps that train all weights, of pairs")
    parser.add_argument(
        "--load",
        action="store_true",
        help="time loading the folder's weights, beside plain reading of its files",
    )
    parser.add_argument(
        "--rank",
        action="store_true",
        help="time ranking the profiles of --data, MODEL being an encoder of texts",
    )
    parser.add_argument("--data", metavar="FILE", help="--rank: comparisons with profiles")
    parser.add_argument(
        "--users", type=int, metavar="N", help="--rank: the first N users with a profile (default: all)"
    )
    parser.add_argument(
        "--against-users",
        type=int,
        metavar="N",
        help="--rank: users that the usual way ranks a round (default: 2); its rate is carried over to the rest",
    )
    parser.add_argument(
        "--against",
        choices=["transformers", "vllm", "trl"],
        help="also time padded batches of transformers (scoring, --rank), vLLM's classification path (scoring) or "
        "TRL's RewardTrainer (--train), and compare",
    )
    parser.add_argument(
        "--responses", type=int, nargs="+", default=[2], metavar="K", help="responses of a comparison"
    )
    parser.add_argument(
        "--prefix-tokens", type=int, default=2000, metavar="N", help="mean length of the prefix"
    )
    parser.add_argument(
        "--response-tokens", type=int, default=130, metavar="N", help="mean length of a response"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="comparisons of a pass (default: 64 / K, at least 2) or of a step of training (default: 8)",
    )
    parser.add_argument(
        "--against-sequences",
        type=int,
        default=16,
        metavar="N",
        help="conversations that the padded way scores a round; its rate is carried over to the rest",
    )
    parser.add_argument(
        "--against-pairs",
        type=int,
        metavar="N",
        help="pairs of a microbatch of TRL's (default: 2 on CPUs, 8 on GPUs)",
    )
    parser.add_argument(
        "--tuning",
        choices=["full", "lora", "head"],
        default="full",
        help="what training trains (default: full)",
    )
    parser.add_argument(
        "--remat",
        choices=["none", "dots", "full"],
        default="none",
        help="what our backward pass computes again",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], help="default: the checkpoint's"
    )
    add_quantize(parser, about="scoring only: a second row with the layers' matrices in eight bits")
    add_attention(parser)
    parser.add_argument("--mesh", metavar="AXES", help="as in fsdp=4,tensor=2")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="padded tokens computed at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="side-by-side repetitions")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    return parser


_POSITIVE = (
    "prefix_tokens", "response_tokens", "against_sequences", "against_pairs", "rounds", "pairs", "batch_tokens",
    "users", "against_users",
)  # fmt: skip


# What goes with the flag beside it.
_KEPT = {
    "load": ("model", "mesh", "dtype", "rounds", "json"),
    "rank": (
        "model", "mesh", "dtype", "rounds", "json", "data", "users", "against", "against_users",
    ),
}  # fmt: skip


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses numbers that cannot be, and flags of the other half."""
    for name in _POSITIVE:
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, found {value}")
    if min(options.responses) < 1:
        parser.error(f"--responses: expected at least 1, found {min(options.responses)}")
    for half, kept in _KEPT.items():
        if not getattr(options, half):
            continue
        for name, value in vars(options).items():
            if name not in (half, *kept) and value != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} does not go with --{half}")
        if options.model in SHAPES or options.model.endswith(".json"):
            parser.error(f"--{half}: expected a model with weights, found {options.model}")
        if options.rank:
            _check_rank(parser, options)
        return
    for name in ("data", "users", "against_users"):
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for ranking only: it needs --rank")
    fits = ("trl",) if options.train else ("transformers", "vllm")
    if options.against == "trl" and options.tuning != "full":
        parser.error(f"--against trl trains all weights: leave out --tuning {options.tuning}")
    if options.against not in (None, *fits):
        parser.error(
            f"--against {options.against}: {'with' if options.train else 'without'} --train, only {' or '.join(fits)}"
        )
    foreign = (
        ("responses", "against_sequences", "quantize")
        if options.train
        else ("against_pairs", "remat", "tuning")
    )
    for name in foreign:
        if getattr(options, name) != parser.get_default(name):
            word = "scoring only, not with" if options.train else "training only: it needs"
            parser.error(f"--{name.replace('_', '-')} is for {word} --train")


def _check_rank(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.data is None:
        parser.error("--rank needs --data FILE, whose profiles are ranked")
    if options.against not in (None, "transformers"):
        parser.error(f"--against {options.against}: with --rank, only transformers")
    if options.against_users is not None and options.against is None:
        parser.error("--against-users needs --against transformers")
