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

from prb_jax.bench.options import parse_options
from prb_jax.bench.workload import synthetic_workload
from prb_jax.data.reading import read_object
from prb_jax.errors import CheckpointError
from prb_jax.models.named_shapes import SHAPES, shape_config

if TYPE_CHECKING:
    from prb_jax.bench.rivals.transformers_scoring import TransformersScorer
    from prb_jax.bench.rivals.vllm_scoring import VllmScorer
    from prb_jax.models.config.decoder import DecoderConfig
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


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and prints a table."""
    options = parse_options(arguments)
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
        rival = _rival(options, source, model.decoder, model.dtype)
        for responses in options.responses:
            results.append(_bench(model, rival, responses, options))
            print(_line(results[-1]), flush=True)
    _print_table(results, rival_name=options.against)
    _write(results, options.json)
    return 0


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
            attention=options.attention,
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
    from prb_jax.models.config.decoder import parse_config

    if name in SHAPES:
        return parse_config(shape_config(name), where=name)
    path = Path(name)
    if path.suffix != ".json":
        return path
    return parse_config(read_object(path, error=CheckpointError), where=name)


def _rival(
    options: argparse.Namespace, source: Path | DecoderConfig, config: DecoderConfig, dtype: str
) -> TransformersScorer | VllmScorer | None:
    given = source if isinstance(source, Path) else source.original
    if options.against == "vllm":
        from prb_jax.bench.rivals.vllm_scoring import VllmScorer

        return VllmScorer(given, dtype=dtype, longest=config.max_position_embeddings)
    if options.against == "transformers":
        from prb_jax.bench.rivals.transformers_scoring import TransformersScorer

        return TransformersScorer(given, dtype=dtype)
    return None


def _bench(
    model: RewardModel,
    rival: TransformersScorer | VllmScorer | None,
    responses: int,
    options: argparse.Namespace,
) -> BenchResult:
    import numpy as np

    from prb_jax.bench.rivals.transformers_scoring import BATCH, padded_batches
    from prb_jax.bench.scorer import TreePass, score_pass
    from prb_jax.models.flops import measured_peak, tree_flops

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
    )
