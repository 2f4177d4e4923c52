"""`prb bench score`: how fast a model scores on this machine, compared with padded batches and other libraries.

Our side is the scorer of `prb evaluate`, fed with token ids.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from prb_jax.measure.bench.figures import Figures, in_turn, median_ratio, timed
from prb_jax.measure.bench.models import bench_source, load_for_bench
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.rivals.transformers import (
    BATCH,
    CachedScorer,
    PaddedRun,
    TransformersScorer,
    padded_batches,
    torch_peak,
    trees_of_people,
)
from prb_jax.measure.bench.workload import Workload, count_pairs, workload_for
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.flops import measured_peak, stream_flops
from prb_jax.models.readouts.score_tree import is_pointwise
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.batching import lanes, stream_scores
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.trees.tree import Tree, build_tree


@dataclass(frozen=True)
class TreePass:
    """One timed pass over a workload, from the first tree to the last score."""

    seconds: float
    padded_tokens: int
    # tokens computed, without padding; a beginning shared by several trees counts once if it is computed
    # once
    needed_tokens: int
    flops: float  # analytic, of these tokens
    compiles: int  # programs that this pass compiled
    scores: list[np.ndarray]


def score_pass(model: RewardModel, workload: Workload, *, batch_tokens: int | None) -> TreePass:
    """Score all trees through the pipeline of :meth:`RewardModel.stream`."""
    padded = needed = 0
    flops = 0.0
    program = cast(Any, model.score_fn)
    before = program._cache_size()
    counting = threading.Lock()  # batches run concurrently

    def dispatch(batch: Any) -> jax.Array:
        nonlocal padded, flops
        with counting:
            padded += batch.tokens.size
            flops += stream_flops(batch, model.decoder, reads_only=is_pointwise(model.decoder))
        return model.run(batch)

    # The stream only counts the comparisons and passes them to `encode`, so trees work too.
    stream = stream_scores(
        cast(Sequence[Comparison], workload.trees),
        encode=lambda trees: list(cast(Sequence[Tree], trees)),
        dispatch=dispatch,
        options=model.batch_options(batch_tokens),
        lanes=lanes(model.mesh),
    )
    seconds, batches = timed(lambda: list(stream))
    scores: list[np.ndarray] = [np.zeros(0)] * len(workload.trees)
    for scored in batches:
        needed += scored.computed or 0
        for index, row in zip(scored.indices, scored.scores, strict=True):
            scores[index] = row
    return TreePass(seconds, padded, needed, flops, program._cache_size() - before, scores)


def bench_scoring(options: BenchOptions) -> Iterator[Figures]:
    """Time passes of ours and, on request, of another library, alternating.

    Yields:
      One result per entry of `responses` and `questions_per_user`.

    Raises:
      RunError: there are fewer pairs than one user has questions.
    """
    sizes = list(itertools.product(options.responses, options.questions_per_user))
    counts = [
        count_pairs(options.pairs, usual=max(2, 64 // responses), questions_per_user=questions)
        for responses, questions in sizes
    ]
    source = bench_source(options.model)
    model = load_for_bench(source, options)
    scorer = _open_rival(source, model, options)
    for (responses, questions), pairs in zip(sizes, counts, strict=True):
        given: Any = {"responses": responses, "questions_per_user": questions}
        workload = workload_for(model.decoder, options, pairs, **given)
        yield _bench(model, workload, scorer, options)


def _open_rival(source: Path | DecoderConfig, model: RewardModel, options: BenchOptions) -> Any:
    given = source if isinstance(source, Path) else source.original
    if options.against == "transformers-cached":
        return CachedScorer(given, dtype=model.dtype, responses=options.against_responses)
    if options.against == "vllm":
        from prb_jax.measure.bench.rivals.vllm_scoring import VllmScorer

        return VllmScorer(given, dtype=model.dtype, longest=model.decoder.max_position_embeddings)
    return None if options.against is None else TransformersScorer(given, dtype=model.dtype)


@dataclass(frozen=True)
class _Rival:
    """Another library's scorer on a workload, with its conversations in `order`.

    Scores are comparable if the weights are the same. If people have several questions, it is also timed by person.
    """

    same_weights: bool
    order: list[np.ndarray]
    run: Callable[[], PaddedRun]
    by_person: Callable[[], PaddedRun] | None = None


def _rival(scorer: Any, workload: Workload, options: BenchOptions) -> _Rival:
    if isinstance(scorer, CachedScorer):
        trees, questions = workload.trees, workload.questions_per_user
        people = trees_of_people(trees, questions)
        scorer.run([build_tree([trees[0].sequence(0)[:64]])])  # start its threads
        order = [tree.sequence(k) for tree in trees for k in range(len(tree.responses))]
        by_person = (lambda: scorer.run(people)) if questions > 1 else None
        return _Rival(scorer.same_weights, order, lambda: scorer.run(trees), by_person)
    batches = padded_batches(workload.trees)[: max(1, options.against_sequences // BATCH)]
    scorer.run([[ids[:64] for ids in batches[0]]])  # start its threads
    return _Rival(
        scorer.same_weights, [ids for batch in batches for ids in batch], lambda: scorer.run(batches)
    )


def _bench(model: RewardModel, workload: Workload, scorer: Any, options: BenchOptions) -> Figures:
    def ours() -> TreePass:
        return score_pass(model, workload, batch_tokens=options.batch_tokens)

    whole, cold = timed(ours)
    peak = measured_peak(model.dtype)
    rival = None if scorer is None else _rival(scorer, workload, options)
    runs = [ours] if rival is None else [ours, rival.run, *([rival.by_person] if rival.by_person else [])]
    passes, *others = in_turn(options.rounds, *runs)
    trees, rates = len(workload.trees), [len(workload.trees) / one.seconds for one in passes]
    seconds = statistics.median(one.seconds for one in passes)
    # Comparisons per second if the rival scored every response of the workload at this rate.
    per_tree = workload.responses / trees
    theirs = [run.sequences / run.seconds / per_tree for run in others[0]] if others else []
    people = [trees / run.seconds for run in others[1]] if len(others) > 1 else []
    form = model.dtype if model.quantize is None else f"{model.dtype}, {model.quantize}"
    padding = speed = difference = their_peak = None
    if rival is not None:
        last = others[0][-1]
        padding, speed = 1 - last.tokens / last.padded_tokens, median_ratio(rates, theirs)
        their_peak = torch_peak(model.dtype) / 1e9
        if rival.same_weights:
            difference = _largest_difference(workload, cold.scores, rival.order, last.scores)
    people_speed = median_ratio(rates, people) if people else None
    figures = Figures()
    add = figures.add
    add("workload", workload.name, "workload")
    add("dtype", model.dtype, "dtype", form)
    add("trees", trees)
    add("responses", workload.responses)
    add("pairs_per_second", trees / seconds, "comparisons/s", "{:.2f}")
    # shared tokens count once
    add("tokens_per_second", cold.needed_tokens / seconds, "tokens/s", "{:,.0f}")
    add("padding_waste", 1 - cold.needed_tokens / cold.padded_tokens, "padding", "{:.0%}")
    add("compiles", cold.compiles, "compiles")
    add("compile_seconds", max(0.0, whole - seconds), "compile s", "{:.1f}")
    share = cold.flops / seconds / peak / model.mesh.size  # without padding, relative to the dtype's peak
    add("peak_share", share, "of matmul peak", f"{{:.0%}} of {peak / 1e9:,.0f} GFLOP/s")
    add("peak_gflops", peak / 1e9)
    beside = statistics.median(theirs) if theirs else None
    add("against_pairs_per_second", beside, f"{options.against} comparisons/s", "{:.3f}")
    add("speedup", speed, "speed-up", "{:.2f}x")
    add("against_padding_waste", padding, "its padding", "{:.0%}")
    add("largest_difference", difference, "score difference", "{:.1e}")
    add("quantize", model.quantize)
    add("attention", model.attention)
    add("questions_per_user", workload.questions_per_user)
    add("against_peak_gflops", their_peak, "its matmul peak", "{:,.0f} GFLOP/s")
    add("against_people_pairs_per_second", statistics.median(people) if people else None)
    add("people_speedup", people_speed, "speed-up, person by person", "{:.2f}x")
    figures.line = f"{form}, {workload.name}: {trees / seconds:.2f} comparisons/s"
    figures.line += "" if speed is None else f", {speed:.2f}x of the rival"
    figures.line += "" if people_speed is None else f", {people_speed:.2f}x of the rival, person by person"
    return figures


def _largest_difference(
    workload: Workload, scores: Sequence[np.ndarray], order: Sequence[np.ndarray], theirs: np.ndarray
) -> float:
    """Return the largest difference over the conversations that both sides scored."""
    ours = {
        tree.sequence(k).tobytes(): score
        for tree, row in zip(workload.trees, scores, strict=True)
        for k, score in enumerate(row)
    }
    our_scores = [ours[np.asarray(ids, np.int32).tobytes()] for ids in order]
    return float(np.abs(np.array(our_scores) - theirs).max())
