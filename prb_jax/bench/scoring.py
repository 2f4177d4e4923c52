"""`prb bench score`: how fast a model scores on this machine, beside the usual way of padded batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group

from prb_jax.bench.rivals.transformers_scoring import BATCH, TransformersScorer, padded_batches
from prb_jax.bench.scorer import TreePass, bench_source, load_for_bench, score_pass
from prb_jax.bench.table import Column, rates_table
from prb_jax.bench.workload import Workload, synthetic_workload
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import measured_peak, tree_flops
from prb_jax.scoring.reward_model import RewardModel

if TYPE_CHECKING:
    from prb_jax.bench.rivals.vllm_scoring import VllmScorer


@dataclass(frozen=True)
class ScoringResult:
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


def bench_scoring(
    model: str,
    *,
    responses: Sequence[int],
    pairs: int | None,
    prefix_tokens: int,
    response_tokens: int,
    rounds: int,
    batch_tokens: int | None,
    against: str | None,
    against_sequences: int,
    mesh: str | None,
    dtype: str | None,
    quantize: str | None,
    attention: str,
) -> Iterator[ScoringResult]:
    """Time passes of ours and, where asked for, of padded batches, in turn.

    Args:
      model: see :func:`prb_jax.bench.scorer.bench_source`.
      responses: K of each workload.
      pairs: comparisons of a pass; 64 / K if None, at least 2.
      prefix_tokens, response_tokens: mean lengths.
      rounds: timed passes of each side.
      batch_tokens: padded tokens of a batch of ours.
      against: "transformers", "vllm" or None.
      against_sequences: conversations that the padded way scores a round.
      mesh, dtype, quantize, attention: as in :func:`prb_jax.scoring.load.load`.

    Yields:
      A result for each of `responses`.
    """
    source = bench_source(model)
    loaded = load_for_bench(source, mesh=mesh, dtype=dtype, quantize=quantize, attention=attention)
    rival = _rival(against, source, loaded)
    config = loaded.decoder
    for count in responses:
        workload = synthetic_workload(
            pairs or max(2, 64 // count),
            responses=count,
            prefix_tokens=prefix_tokens,
            response_tokens=response_tokens,
            vocab_size=config.vocab_size,
            longest=config.max_position_embeddings,
        )
        sequences = against_sequences if rival else 0
        yield _bench(loaded, workload, rival, rounds=rounds, batch_tokens=batch_tokens, sequences=sequences)


def _rival(
    against: str | None, source: Path | DecoderConfig, model: RewardModel
) -> TransformersScorer | VllmScorer | None:
    given = source if isinstance(source, Path) else source.original
    if against == "vllm":
        from prb_jax.bench.rivals.vllm_scoring import VllmScorer

        return VllmScorer(given, dtype=model.dtype, longest=model.decoder.max_position_embeddings)
    return None if against is None else TransformersScorer(given, dtype=model.dtype)


def _bench(
    model: RewardModel,
    workload: Workload,
    rival: TransformersScorer | VllmScorer | None,
    *,
    rounds: int,
    batch_tokens: int | None,
    sequences: int,
) -> ScoringResult:
    start = time.perf_counter()
    cold = score_pass(model, workload, batch_tokens=batch_tokens)
    compile_seconds = time.perf_counter() - start
    peak = measured_peak(model.dtype)

    batches = padded_batches(workload.trees)[: max(1, sequences // BATCH)] if rival else []
    if rival:
        rival.run([[ids[:64] for ids in batches[0]]])  # starts its threads
    passes: list[TreePass] = []
    ratios: list[float] = []
    rates: list[float] = []
    theirs = None
    for _ in range(rounds):
        passes.append(score_pass(model, workload, batch_tokens=batch_tokens))
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
        "peak_share": tree_flops(workload.trees, model.decoder) / seconds / peak / model.mesh.size,
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
    return ScoringResult(**result)


def line(result: ScoringResult) -> str:
    """Return one line for the terminal."""
    text = f"{result.kind}, {result.workload}: {result.pairs_per_second:.2f} comparisons/s"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of padded batches"
    return text


def table(results: Sequence[ScoringResult], *, rival_name: str | None) -> Group:
    """Return all results as a table."""

    def difference(r: ScoringResult) -> str:
        return "-" if r.largest_difference is None else f"{r.largest_difference:.1e}"

    return rates_table(
        results,
        title="scoring",
        kind=lambda r: r.kind,
        workload=lambda r: r.workload,
        rate=Column("comparisons/s", lambda r: f"{r.pairs_per_second:.2f}"),
        rival_name=rival_name,
        difference=Column("score difference", difference),
    )
