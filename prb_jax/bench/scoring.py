"""`prb bench score`: how fast a model scores on this machine, beside the usual way of padded batches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prb_jax.bench.rivals.transformers import (
    BATCH,
    CachedScorer,
    PaddedRun,
    TransformersScorer,
    padded_batches,
    torch_peak,
    trees_of_people,
)
from prb_jax.bench.scorer import TreePass, bench_source, load_for_bench, score_pass
from prb_jax.bench.table import Column, rates_table
from prb_jax.bench.workload import Workload, count_pairs, synthetic_workload
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import measured_peak
from prb_jax.reports.style import ResultsTable
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.tree import build_tree

if TYPE_CHECKING:
    from prb_jax.bench.rivals.vllm_scoring import VllmScorer

    Rival = TransformersScorer | VllmScorer | CachedScorer


@dataclass(frozen=True)
class ScoringResult:
    """One workload in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios.

    Attributes:
      workload, dtype: what was timed.
      quantize: how the matrices were quantised, if they were.
      attention: the implementation of attention.
      trees, responses: how many a pass scores.
      pairs_per_second: comparisons a second.
      tokens_per_second: real tokens a second (what is computed once counted once).
      padding_waste: share of the computed tokens that is padding.
      compiles, compile_seconds: programs of this workload and the time until they were ready; with a
        warm compilation cache that is the time to load them.
      peak_share: FLOPs without padding, over time, over the measured matmul peak of ``dtype``, also where
        products are of eight-bit factors.
      peak_gflops: that peak.
      against_peak_gflops: the same of the other library, where it was measured.
      against_pairs_per_second, speedup: the other way, and how many times faster ours is.
      against_padding_waste: its padding.
      against_people_pairs_per_second, people_speedup: the same of a script that computes a person's common beginning
        once, where people have several questions.
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
    questions_per_user: int = 1
    against_peak_gflops: float | None = None
    against_people_pairs_per_second: float | None = None
    people_speedup: float | None = None

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
    against_responses: int | None = None,
    mesh: str | None,
    dtype: str | None,
    quantize: str | None,
    attention: str,
    questions_per_user: Sequence[int] = (1,),
) -> Iterator[ScoringResult]:
    """Time passes of ours and, where asked for, of another way, in turn.

    Args:
      model: see :func:`prb_jax.bench.scorer.bench_source`.
      responses: K of each workload.
      pairs: comparisons of a pass; if None 64 / K, at least 2, and then so many more that all users are whole.
      prefix_tokens, response_tokens: mean lengths.
      rounds: timed passes of each side.
      batch_tokens: padded tokens of a batch of ours.
      against: "transformers" (padded batches), "transformers-cached" (a common prefix once, with its cache), "vllm" or
        None.
      against_sequences: conversations that the padded way scores a round.
      against_responses: the most responses of a padded batch of "transformers-cached"; all of a comparison if None.
      mesh, dtype, quantize, attention: as in :func:`prb_jax.scoring.load.load`.
      questions_per_user: comparisons in a row that begin with the same profile, of each workload.

    Yields:
      A result for each of `responses` and `questions_per_user`.

    Raises:
      RunError: fewer pairs than one user has questions.
    """
    workloads = [
        (count, questions, count_pairs(pairs, usual=max(2, 64 // count), questions_per_user=questions))
        for count, questions in itertools.product(responses, questions_per_user)
    ]
    source = bench_source(model)
    loaded = load_for_bench(source, mesh=mesh, dtype=dtype, quantize=quantize, attention=attention)
    rival = _rival(against, source, loaded, responses=against_responses)
    config = loaded.decoder
    for count, questions, all_pairs in workloads:
        workload = synthetic_workload(
            all_pairs,
            responses=count,
            questions_per_user=questions,
            prefix_tokens=prefix_tokens,
            response_tokens=response_tokens,
            vocab_size=config.vocab_size,
            longest=config.max_position_embeddings,
        )
        sequences = against_sequences if rival else 0
        yield _bench(loaded, workload, rival, rounds=rounds, batch_tokens=batch_tokens, sequences=sequences)


def _rival(
    against: str | None, source: Path | DecoderConfig, model: RewardModel, *, responses: int | None
) -> Rival | None:
    given = source if isinstance(source, Path) else source.original
    if against == "transformers-cached":
        return CachedScorer(given, dtype=model.dtype, responses=responses)
    if against == "vllm":
        from prb_jax.bench.rivals.vllm_scoring import VllmScorer

        return VllmScorer(given, dtype=model.dtype, longest=model.decoder.max_position_embeddings)
    return None if against is None else TransformersScorer(given, dtype=model.dtype)


def _bench(
    model: RewardModel,
    workload: Workload,
    rival: Rival | None,
    *,
    rounds: int,
    batch_tokens: int | None,
    sequences: int,
) -> ScoringResult:
    start = time.perf_counter()
    cold = score_pass(model, workload, batch_tokens=batch_tokens)
    compile_seconds = time.perf_counter() - start
    peak = measured_peak(model.dtype)

    theirs_run = None if rival is None else _way_of(rival, workload, sequences=sequences)
    passes: list[TreePass] = []
    ratios: list[float] = []
    rates: list[float] = []
    people: list[float] = []
    theirs = None
    for _ in range(rounds):
        passes.append(score_pass(model, workload, batch_tokens=batch_tokens))
        if theirs_run:
            theirs = theirs_run.run()
            # Comparisons a second, had it scored every response of the workload at this rate.
            rates.append(theirs.sequences / theirs.seconds / (workload.responses / len(workload.trees)))
            ratios.append(len(workload.trees) / passes[-1].seconds / rates[-1])
            if theirs_run.by_person:
                people.append(len(workload.trees) / theirs_run.by_person().seconds)
    seconds = statistics.median(each.seconds for each in passes)
    result: dict[str, Any] = {
        "workload": workload.name,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "attention": model.attention,
        "trees": len(workload.trees),
        "responses": workload.responses,
        "pairs_per_second": len(workload.trees) / seconds,
        "tokens_per_second": cold.needed_tokens / seconds,
        "padding_waste": 1 - cold.needed_tokens / cold.padded_tokens,
        "compiles": cold.compiles,
        "compile_seconds": max(0.0, compile_seconds - seconds),
        "peak_share": cold.flops / seconds / peak / model.mesh.size,
        "peak_gflops": peak / 1e9,
        "questions_per_user": workload.questions_per_user,
    }
    if rival is not None and theirs is not None and theirs_run is not None:
        by_sequence = {
            ids.tobytes(): score
            for tree, scores in zip(workload.trees, cold.scores, strict=True)
            for ids, score in zip((tree.sequence(k) for k in range(len(tree.responses))), scores, strict=True)
        }
        ours = np.array([by_sequence[np.asarray(ids, np.int32).tobytes()] for ids in theirs_run.order])
        result |= {
            "against_pairs_per_second": statistics.median(rates),
            "speedup": statistics.median(ratios),
            "against_padding_waste": 1 - theirs.tokens / theirs.padded_tokens,
            "against_peak_gflops": torch_peak(model.dtype) / 1e9,
            "against_people_pairs_per_second": statistics.median(people) if people else None,
            "people_speedup": statistics.median(
                len(workload.trees) / each.seconds / rate for each, rate in zip(passes, people, strict=True)
            )
            if people
            else None,
            "largest_difference": float(np.abs(ours - theirs.scores).max()) if rival.same_weights else None,
        }
    return ScoringResult(**result)


@dataclass(frozen=True)
class _Way:
    """How a rival scores a workload: a timed pass, the conversations in its order, and a pass person by person."""

    run: Callable[[], PaddedRun]
    order: list[np.ndarray]
    by_person: Callable[[], PaddedRun] | None = None


def _way_of(rival: Rival, workload: Workload, *, sequences: int) -> _Way:
    if isinstance(rival, CachedScorer):
        trees = workload.trees
        people = trees_of_people(trees, workload.questions_per_user)
        rival.run([build_tree([trees[0].sequence(0)[:64]])])  # starts its threads
        return _Way(
            run=lambda: rival.run(trees),
            order=[tree.sequence(k) for tree in trees for k in range(len(tree.responses))],
            by_person=(lambda: rival.run(people)) if workload.questions_per_user > 1 else None,
        )
    batches = padded_batches(workload.trees)[: max(1, sequences // BATCH)]
    rival.run([[ids[:64] for ids in batches[0]]])  # starts its threads
    return _Way(run=lambda: rival.run(batches), order=[ids for batch in batches for ids in batch])


def line(result: ScoringResult) -> str:
    """Return one line for the terminal."""
    text = f"{result.kind}, {result.workload}: {result.pairs_per_second:.2f} comparisons/s"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of the other way"
    if result.people_speedup is not None:
        text += f", {result.people_speedup:.2f}x of it person by person"
    return text


def table(results: Sequence[ScoringResult], *, rival_name: str | None) -> ResultsTable:
    """Return all results as a table."""

    def difference(r: ScoringResult) -> str:
        return "-" if r.largest_difference is None else f"{r.largest_difference:.1e}"

    def by_person(r: ScoringResult) -> str:
        return "-" if r.people_speedup is None else f"{r.people_speedup:.2f}x"

    return rates_table(
        results,
        title="scoring",
        kind=lambda r: r.kind,
        workload=lambda r: r.workload,
        rate=Column("comparisons/s", lambda r: f"{r.pairs_per_second:.2f}"),
        more=[Column("its matmul peak", lambda r: f"{r.against_peak_gflops:,.0f} GFLOP/s")]
        if rival_name
        else [],
        rival_name=rival_name,
        difference=Column("score difference", difference),
        last=[Column("speed-up, person by person", by_person)]
        if any(r.people_speedup is not None for r in results)
        else [],
    )
