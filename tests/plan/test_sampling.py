"""`prb plan --sample`: the sampler's own program, its caches, and what a step of it needs."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax import cli
from prb_jax.errors import MeshError
from prb_jax.models.config.decoder import parse_config
from prb_jax.plan.chips import CHIPS, PlanOptions, Slice
from prb_jax.plan.program import executed_flops
from prb_jax.plan.sampling import plan_sampling, sampling_program, step_flops
from prb_jax.plan.streams import BatchShape
from prb_jax.sharding import make_mesh
from tests.plan.test_plan import TINY

SHAPE = BatchShape(batch=2, prefix=64, responses=3, response_length=32)


def test_the_program_and_its_caches() -> None:
    config = parse_config(TINY, where="tiny")
    mesh = make_mesh(None, devices=jax.devices()[:1])
    program, caches = sampling_program(config, SHAPE, mesh=mesh, dtype="float32")
    one_token = 3 * 2 * 2 * 64 * 4  # layers, keys and values, kv heads, head dim, bytes
    assert caches == (2 * 64 * one_token, 2 * 3 * 32 * one_token)
    assert program.flops == step_flops(config, SHAPE)
    # a step computes what is needed on paper; attention looks at a further column, and sums over V choose the token
    traced = program.function.trace(*program.arguments, **program.named)
    assert executed_flops(traced.jaxpr) == pytest.approx(program.flops, rel=0.05)
    windowed = replace(config, sliding_window=16, layer_windows=(True, False, True))
    attention = 4 * 4 * 64 * 2 * 3 * (64 + 32 - 16) * 2
    assert step_flops(config, SHAPE) - step_flops(windowed, SHAPE) == attention
    place = Slice("cpu", CHIPS["v5e"], jax.devices()[:1])
    found = plan_sampling(config, PlanOptions(topology=place, dtype="float32", **asdict(SHAPE)))
    assert found.plan.fits
    assert found.plan.argument_bytes_per_chip > sum(caches)
    assert found.to_json()["prefix_cache_bytes_per_chip"] == caches[0]
    assert found.plan.estimated_seconds is not None
    assert found.tokens_per_second == pytest.approx(6 / found.plan.estimated_seconds)
    with pytest.raises(MeshError, match="conversations of 1025 tokens"):
        sampling_program(config, replace(SHAPE, prefix=993), mesh=mesh, dtype="float32")


@pytest.mark.parametrize("other", ["--train", "--sweep"])
def test_flags_that_do_not_go_together(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "qwen3-8b", "--topology", "v5e:2x2", "--sample", other]) == 2
    assert f"{other} does not go with --sample, a plan of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_slice_of_tpus() -> None:
    pytest.importorskip("libtpu")
    config = parse_config(TINY | {"vocab_size": 1024}, where="tiny")
    sizes = asdict(BatchShape(batch=8, prefix=128, responses=4, response_length=64))
    found = plan_sampling(config, PlanOptions(topology="v5e:2x2", mesh="fsdp=4", **sizes))
    one_token = 3 * 2 * 2 * 64 * jnp.dtype("bfloat16").itemsize
    assert found.prefix_cache_bytes_per_chip == 2 * 128 * one_token
    assert found.sample_cache_bytes_per_chip == 2 * 4 * 64 * one_token
    assert found.plan.fits
    assert found.plan.unknown_loops <= 1
    assert np.isfinite(found.tokens_per_second or np.nan)
