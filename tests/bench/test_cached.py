"""The clever script beside the benchmark: it scores alike, pair by pair and person by person."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prb_jax.bench.scorer import load_for_bench, score_pass
from prb_jax.bench.workload import count_pairs, synthetic_workload
from prb_jax.cli import main as prb
from prb_jax.models.flops import best_time, stream_flops, tree_flops
from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams
from prb_jax.trees.streams import make_stream_batch
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "gemma3", "gemma3", pad_token_id=77)


def test_people_with_several_questions(
    folder: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(
        "prb_jax.models.flops.best_time", lambda run, *, seconds: best_time(run, seconds=seconds / 100)
    )
    monkeypatch.setattr("prb_jax.bench.scoring.torch_peak", lambda dtype: 1e9)
    report = tmp_path / "bench.json"
    lengths = ["--prefix-tokens", "160", "--response-tokens", "12", "--pairs", "5", "--rounds", "1"]
    arguments = ["--against", "transformers-cached", "--questions-per-user", "1,5", "--json", str(report)]
    arguments += ["--against-responses", "4"]  # a pair in one batch, a person's ten responses in three
    assert prb(["bench", "score", str(folder), *arguments, *lengths]) == 0
    alone, people = json.loads(report.read_text())
    assert [row["questions_per_user"] for row in (alone, people)] == [1, 5]
    assert max(alone["largest_difference"], people["largest_difference"]) < 1e-5
    assert alone["people_speedup"] is None
    assert people["people_speedup"] > 0
    shown = capsys.readouterr().out
    assert "x of it person by person" in shown
    assert "speed-up, person by person" in shown
    assert prb(["bench", "score", str(folder), "--against-responses", "1"]) == 2
    assert "--against-responses needs --against transformers-cached" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        prb(["bench", "score", str(folder), "--questions-per-user", "1,0"])
    assert "--questions-per-user: expected a number above 0, found 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        prb(["bench", "score", str(folder), "--questions-per-user", "1 5"])
    assert "expected numbers as in 1,5,15, found '1 5'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["score", "train"])
def test_a_workload_has_whole_users(folder: Path, capsys, verb: str) -> None:
    assert [count_pairs(None, usual=32, questions_per_user=each) for each in (1, 5, 15)] == [32, 35, 45]
    assert prb(["bench", verb, str(folder), "--pairs", "14", "--questions-per-user", "1,15"]) == 2
    shown = capsys.readouterr()
    assert "pairs: expected at least 15, the questions of one user, found 14" in shown.err
    assert not shown.out  # and nothing was timed before


def test_shared_profiles_are_counted_once(folder: Path) -> None:
    model = load_for_bench(folder, mesh=None, dtype=None)
    options = {"prefix_tokens": 160, "response_tokens": 10, "vocab_size": 256, "longest": 4096}
    workload = synthetic_workload(6, responses=2, questions_per_user=3, **options)
    first, second = workload.trees[0].prefix, workload.trees[1].prefix
    assert len(first) == len(second)
    np.testing.assert_array_equal(first[:-40], second[:-40])
    assert (first[-40:] != second[-40:]).any()
    found = score_pass(model, workload, batch_tokens=1024)
    assert found.needed_tokens < 0.7 * workload.tokens
    assert found.flops < 0.7 * tree_flops(workload.trees, model.decoder)
    # Streams of single trees need what trees need.
    single = StreamOptions(tokens=1024, share=False)
    flops = sum(
        stream_flops(make_stream_batch(workload.trees, packed, single), model.decoder)
        for packed in pack_streams(workload.trees, StreamShape(1024, 16), single)
    )
    assert flops == pytest.approx(tree_flops(workload.trees, model.decoder), rel=1e-9)
