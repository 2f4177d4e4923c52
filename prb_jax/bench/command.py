"""The command `prb bench`: workloads, rounds and the table."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.bench.shapes import SHAPES, shape_config
from prb_jax.bench.workload import synthetic_workload
from prb_jax.errors import CheckpointError

if TYPE_CHECKING:
    from prb_jax.bench.padded import TransformersScorer
    from prb_jax.models.config import DecoderConfig
    from prb_jax.scoring.reward_model import RewardModel


@dataclass(frozen=True)
class BenchResult:
    """One workload in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios.

    Attributes:
      workload, dtype: what was timed.
      quantize: how the matrices were quantised, if they were.
      attention: the implementation of attention.
      trees, responses: how many a pass scores.
      pairs_per_second: comparisons a second.
      tokens_per_second: real tokens a second (the prefix counted once).
      padding_waste: share of the computed tokens that is padding.
      compiles, compile_seconds: programs of this workload and the time until they were ready; with a
        warm compilation cache that is the time to load them.
      peak_share: FLOPs without padding, over time, over the measured matmul peak of ``dtype``, also where
        products are of eight-bit factors.
      peak_gflops: that peak.
      against_pairs_per_second, speedup: the padded way, and how many times faster trees are.
      against_padding_waste: its padding.
      largest_difference: between the two ways' scores, over the conversations both scored;
        None where each has random weights of its own.
    """

    workload: str
    dtype: str
    trees: int
    responses: int
    pairs_per_second: float
    tokens_per_second: float
    padding_waste: float
    compiles: int
    compile_seconds: float
    peak_share: float
    peak_gflops: float
    against_pairs_per_second: float | None = None
    speedup: float | None = None
    against_padding_waste: float | None = None
    largest_difference: float | None = None
    quantize: str | None = None
    attention: str | None = None

    @property
    def kind(self) -> str:
        """Dtype and form, for a table."""
        return self.dtype if self.quantize is None else f"{self.dtype}, {self.quantize}"


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
        choices=["transformers", "trl"],
        help="also time padded batches of transformers (scoring, --rank) or TRL's RewardTrainer (--train), and "
        "compare",
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
    parser.add_argument(
        "--quantize",
        choices=["int8", "int8-weights", "fp8"],
        help="scoring only: a second row with the layers' matrices in eight bits",
    )
    parser.add_argument(
        "--attention",
        choices=["auto", "blockwise", "kernel"],
        default="auto",
        help="the machine's own choice (default), the block-wise XLA program, or the machine's kernel",
    )
    parser.add_argument("--mesh", metavar="AXES", help="as in fsdp=4,tensor=2")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="padded tokens computed at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="side-by-side repetitions")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and prints a table."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    _check(parser, options)
    if options.load:
        return _load(options)
    if options.rank:
        return _rank(options)
    from prb_jax.bench.scorer import load_for_bench

    source = _source(options.model)
    if options.train:
        return _train(source, options)
    results: list[BenchResult] = []
    forms = [None] if options.quantize is None else [None, options.quantize]
    for dtype, form in itertools.product(options.dtype or [None], forms):
        model = load_for_bench(
            source, mesh=options.mesh, dtype=dtype, quantize=form, attention=options.attention
        )
        rival = _rival(options, source, model.dtype)
        for responses in options.responses:
            results.append(_bench(model, rival, responses, options))
            print(_line(results[-1]), flush=True)
    _print_table(results, rival_name=options.against)
    _write(results, options.json)
    return 0


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
    fits = "trl" if options.train else "transformers"
    if options.against == "trl" and options.tuning != "full":
        parser.error(f"--against trl trains all weights: leave out --tuning {options.tuning}")
    if options.against not in (None, fits):
        parser.error(
            f"--against {options.against}: {'with' if options.train else 'without'} --train, only {fits}"
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
    if options.against == "trl":
        parser.error("--against trl: with --rank, only transformers")
    if options.against_users is not None and options.against is None:
        parser.error("--against-users needs --against transformers")


def _load(options: argparse.Namespace) -> int:
    """The part with `--load`."""
    from prb_jax.bench.loading import LoadingResult, bench_loading, print_table

    results: list[LoadingResult] = []
    for dtype in options.dtype or [None]:
        results += bench_loading(options.model, mesh=options.mesh, dtype=dtype, rounds=options.rounds)
    print_table(results)
    _write(results, options.json)
    return 0


def _rank(options: argparse.Namespace) -> int:
    """The part with `--rank`."""
    from prb_jax.bench.ranking import bench_ranking, print_table

    results = [
        bench_ranking(
            options.model,
            data=options.data,
            users=options.users,
            rounds=options.rounds,
            against=options.against,
            against_users=options.against_users,
            mesh=options.mesh,
            dtype=dtype,
        )
        for dtype in options.dtype or [None]
    ]
    print_table(results)
    _write(results, options.json)
    return 0


def _train(source: Path | DecoderConfig, options: argparse.Namespace) -> int:
    """The half with `--train`."""
    from prb_jax.bench.scorer import load_for_bench
    from prb_jax.bench.training import bench_training, line, print_table

    results = []
    for dtype in options.dtype or [None]:
        model = load_for_bench(source, mesh=options.mesh, dtype=dtype, attention=options.attention)
        result = bench_training(
            model,
            pairs=options.pairs or 8,
            tuning=options.tuning,
            prefix_tokens=options.prefix_tokens,
            response_tokens=options.response_tokens,
            rounds=options.rounds,
            batch_tokens=options.batch_tokens,
            remat=options.remat,
            against=options.against,
            against_pairs=options.against_pairs,
        )
        results.append(result)
        print(line(result), flush=True)
    print_table(results, rival_name=options.against)
    _write(results, options.json)
    return 0


def _write(results: Sequence[Any], path: str | None) -> None:
    if path:
        Path(path).write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def _source(name: str) -> Path | DecoderConfig:
    """The folder, or the configuration of a model with random weights."""
    from prb_jax.models.config import parse_config

    if name in SHAPES:
        return parse_config(shape_config(name), where=name)
    path = Path(name)
    if path.suffix != ".json":
        return path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    return parse_config(raw, where=name)


def _rival(
    options: argparse.Namespace, source: Path | DecoderConfig, dtype: str
) -> TransformersScorer | None:
    if options.against is None:
        return None
    from prb_jax.bench.padded import TransformersScorer

    return TransformersScorer(source if isinstance(source, Path) else source.original, dtype=dtype)


def _bench(
    model: RewardModel, rival: TransformersScorer | None, responses: int, options: argparse.Namespace
) -> BenchResult:
    import numpy as np

    from prb_jax.bench.flops import measured_peak, tree_flops
    from prb_jax.bench.padded import BATCH, padded_batches
    from prb_jax.bench.scorer import TreePass, score_pass

    config = model.decoder
    count = options.pairs or max(2, 64 // responses)
    workload = synthetic_workload(
        count,
        responses=responses,
        prefix_tokens=options.prefix_tokens,
        response_tokens=options.response_tokens,
        vocab_size=config.vocab_size,
        longest=config.max_position_embeddings,
    )
    start = time.perf_counter()
    cold = score_pass(model, workload, batch_tokens=options.batch_tokens)
    compile_seconds = time.perf_counter() - start
    peak = measured_peak(model.dtype)

    batches = padded_batches(workload.trees)[: max(1, options.against_sequences // BATCH)] if rival else []
    if rival:
        rival.run([[ids[:64] for ids in batches[0]]])  # starts its threads
    passes: list[TreePass] = []
    ratios: list[float] = []
    rates: list[float] = []
    theirs = None
    for _ in range(options.rounds):
        passes.append(score_pass(model, workload, batch_tokens=options.batch_tokens))
        if rival:
            theirs = rival.run(batches)
            # Comparisons a second, had it scored every response of the workload at this rate.
            rates.append(theirs.sequences / theirs.seconds / (workload.responses / len(workload.trees)))
            ratios.append(len(workload.trees) / passes[-1].seconds / rates[-1])
    seconds = statistics.median(each.seconds for each in passes)
    result: dict[str, Any] = {
        "workload": workload.name,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "attention": model.attention,
        "trees": len(workload.trees),
        "responses": workload.responses,
        "pairs_per_second": len(workload.trees) / seconds,
        "tokens_per_second": workload.tokens / seconds,
        "padding_waste": 1 - workload.tokens / cold.padded_tokens,
        "compiles": cold.compiles,
        "compile_seconds": max(0.0, compile_seconds - seconds),
        "peak_share": tree_flops(workload.trees, config) / seconds / peak / model.mesh.size,
        "peak_gflops": peak / 1e9,
    }
    if rival is not None and theirs is not None:
        by_sequence = {
            ids.tobytes(): score
            for tree, scores in zip(workload.trees, cold.scores, strict=True)
            for ids, score in zip((tree.sequence(k) for k in range(len(tree.responses))), scores, strict=True)
        }
        flat = [ids for batch in batches for ids in batch]
        ours = np.array([by_sequence[np.asarray(ids, np.int32).tobytes()] for ids in flat])
        result |= {
            "against_pairs_per_second": statistics.median(rates),
            "speedup": statistics.median(ratios),
            "against_padding_waste": 1 - theirs.tokens / theirs.padded_tokens,
            "largest_difference": float(np.abs(ours - theirs.scores).max()) if rival.same_weights else None,
        }
    return BenchResult(**result)


def _line(result: BenchResult) -> str:
    text = f"{result.kind}, {result.workload}: {result.pairs_per_second:.2f} comparisons/s"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of padded batches"
    return text


def _print_table(results: Sequence[BenchResult], *, rival_name: str | None) -> None:
    from prb_jax.bench.table import Column, print_results

    def difference(r: BenchResult) -> str:
        return "-" if r.largest_difference is None else f"{r.largest_difference:.1e}"

    print_results(
        results,
        title="scoring",
        kind=lambda r: r.kind,
        workload=lambda r: r.workload,
        rate=Column("comparisons/s", lambda r: f"{r.pairs_per_second:.2f}"),
        rival_name=rival_name,
        difference=Column("score difference", difference),
        width=180,
    )
