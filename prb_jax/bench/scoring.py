"""`prb bench score`: how fast a model scores on this machine, beside the usual way of padded batches."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from prb_jax.bench.table import shown
from prb_jax.bench.workload import Workload, count_pairs, synthetic_workload
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import measured_peak
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.tree import build_tree

if TYPE_CHECKING:
    from prb_jax.bench.rivals.vllm_scoring import VllmScorer

    Rival = TransformersScorer | VllmScorer | CachedScorer


@dataclass(frozen=True)
class ScoringResult:
    """One workload in one dtype. Rates are medians over rounds; ratios are medians of ratios, side by side."""

    workload: str = field(metadata=shown("workload"))
    dtype: str = field(metadata=shown("dtype", "{r.kind}"))
    trees: int
    responses: int
    pairs_per_second: float = field(metadata=shown("comparisons/s", "{v:.2f}"))
    tokens_per_second: float = field(
        metadata=shown("tokens/s", "{v:,.0f}", "real tokens; what is computed once counts once")
    )
    padding_waste: float = field(metadata=shown("padding", "{v:.0%}", "of the computed tokens"))
    compiles: int = field(metadata=shown("compiles", meaning="programs of this workload"))
    compile_seconds: float = field(
        metadata=shown("compile s", "{v:.1f}", "until they are ready; to load them where the cache is warm")
    )
    peak_share: float = field(
        metadata=shown(
            "of matmul peak",
            "{v:.0%} of {r.peak_gflops:,.0f} GFLOP/s",
            "FLOPs without padding, over time, over the measured peak of the dtype, also of eight-bit products",
        )
    )
    peak_gflops: float
    against_pairs_per_second: float | None = field(
        default=None, metadata=shown("{rival} comparisons/s", "{v:.3f}")
    )
    speedup: float | None = field(default=None, metadata=shown("speed-up", "{v:.2f}x"))
    against_padding_waste: float | None = field(default=None, metadata=shown("its padding", "{v:.0%}"))
    largest_difference: float | None = field(
        default=None,
        metadata=shown(
            "score difference", "{v:.1e}", "over the conversations both scored; none of random weights"
        ),
    )
    quantize: str | None = None
    attention: str | None = None
    questions_per_user: int = 1
    against_peak_gflops: float | None = field(
        default=None, metadata=shown("its matmul peak", "{v:,.0f} GFLOP/s")
    )
    against_people_pairs_per_second: float | None = None
    people_speedup: float | None = field(
        default=None,
        metadata=shown(
            "speed-up, person by person", "{v:.2f}x", "against a common beginning once for each person"
        ),
    )

    @property
    def kind(self) -> str:
        """Dtype and form."""
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

    The arguments are the options of `prb bench score`, whose help explains them.

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

    theirs_run = None if rival is None else _timed_rival(rival, workload, sequences=sequences)
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
    seconds = statistics.median(timed.seconds for timed in passes)
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
                len(workload.trees) / timed.seconds / rate for timed, rate in zip(passes, people, strict=True)
            )
            if people
            else None,
            "largest_difference": float(np.abs(ours - theirs.scores).max()) if rival.same_weights else None,
        }
    return ScoringResult(**result)


@dataclass(frozen=True)
class _TimedRival:
    """How a rival scores a workload: a timed pass, the conversations in its order, and a pass person by person."""

    run: Callable[[], PaddedRun]
    order: list[np.ndarray]
    by_person: Callable[[], PaddedRun] | None = None


def _timed_rival(rival: Rival, workload: Workload, *, sequences: int) -> _TimedRival:
    if isinstance(rival, CachedScorer):
        trees = workload.trees
        people = trees_of_people(trees, workload.questions_per_user)
        rival.run([build_tree([trees[0].sequence(0)[:64]])])  # starts its threads
        return _TimedRival(
            run=lambda: rival.run(trees),
            order=[tree.sequence(k) for tree in trees for k in range(len(tree.responses))],
            by_person=(lambda: rival.run(people)) if workload.questions_per_user > 1 else None,
        )
    batches = padded_batches(workload.trees)[: max(1, sequences // BATCH)]
    rival.run([[ids[:64] for ids in batches[0]]])  # starts its threads
    return _TimedRival(run=lambda: rival.run(batches), order=[ids for batch in batches for ids in batch])


def line(result: ScoringResult) -> str:
    """Return one line for the terminal."""
    text = f"{result.kind}, {result.workload}: {result.pairs_per_second:.2f} comparisons/s"
    if result.speedup is not None:
        text += f", {result.speedup:.2f}x of the other way"
    if result.people_speedup is not None:
        text += f", {result.people_speedup:.2f}x of it person by person"
    return text
