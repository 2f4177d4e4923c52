"""`prb bench serve`: many clients lose nothing and get the offline scores."""

from pathlib import Path

import pytest

from prb_jax.measure.bench.figures import bench_table
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.serving import bench_serving
from tests.scoring.records import write_model


@pytest.mark.slow
def test_many_clients_lose_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen3", num_hidden_layers=1)
    sizes = {"clients": 40, "seconds": 2, "prefix_tokens": 60, "response_tokens": 10, "batch_tokens": 1024}
    figures = bench_serving(BenchOptions(model=str(folder), **sizes))
    assert (figures["lost"], figures["clients"]) == (0, 40)
    assert figures["requests"] >= 40
    assert figures["max_difference"] < 1e-5
    assert figures["p50_seconds"] <= figures["p99_seconds"]
    assert {"scores/s", "p99"} <= {head for head, _ in bench_table("serving", [figures]).figures}
