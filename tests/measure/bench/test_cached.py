"""The clever script beside the benchmark: it scores alike, pair by pair and person by person."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prb_jax.measure.bench.models import load_for_bench
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.scoring import score_pass
from prb_jax.measure.bench.workload import count_pairs, synthetic_workload
from prb_jax.models.flops import stream_flops
from prb_jax.trees.packing import pack_streams
from prb_jax.trees.streams import StreamOptions, StreamShape, make_stream_batch


@pytest.mark.slow
def test_people_with_several_questions(folder: Path, bench, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    lengths = "--prefix-tokens 160 --response-tokens 12 --pairs 5 --rounds 1"
    words = "--against transformers-cached --questions-per-user 1,5"
    # a pair in one batch, a person's ten responses in three
    alone, people = bench("score", folder, words, "--against-responses 4", lengths)
    assert [row["questions_per_user"] for row in (alone, people)] == [1, 5]
    assert max(alone["largest_difference"], people["largest_difference"]) < 1e-5
    assert alone["people_speedup"] is None
    assert people["people_speedup"] > 0
    shown = capsys.readouterr().out
    assert "x of the rival, person by person" in shown
    assert "speed-up, person by person" in shown


@pytest.mark.parametrize("verb", ["score", "train"])
def test_a_workload_has_whole_users(folder: Path, refused, verb: str) -> None:
    assert [count_pairs(None, usual=32, questions_per_user=n) for n in (1, 5, 15)] == [32, 35, 45]
    said = refused(verb, folder, "--pairs 14 --questions-per-user 1,15")  # and nothing was timed before
    assert "pairs: expected at least 15, the questions of one user, found 14" in said


def test_shared_profiles_are_counted_once(folder: Path) -> None:
    model = load_for_bench(folder, BenchOptions())
    options = {"prefix_tokens": 160, "response_tokens": 10, "vocab_size": 256, "longest": 4096}
    workload = synthetic_workload(6, responses=2, questions_per_user=3, **options)
    first, second = workload.trees[0].prefix, workload.trees[1].prefix
    assert len(first) == len(second)
    np.testing.assert_array_equal(first[:-40], second[:-40])
    assert (first[-40:] != second[-40:]).any()
    timed = score_pass(model, workload, batch_tokens=1024)
    assert timed.needed_tokens < 0.7 * workload.tokens
    single = StreamOptions(tokens=1024, share=False)
    flops = sum(
        stream_flops(make_stream_batch(workload.trees, packed, single), model.decoder, reads_only=True)
        for packed in pack_streams(workload.trees, StreamShape(1024, 16), single)
    )
    assert timed.flops < 0.7 * flops
