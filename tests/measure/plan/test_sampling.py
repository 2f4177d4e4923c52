"""`prb plan --sample`: the sampler's own program, its caches, and what a step of it needs."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from prb_jax.errors import MeshError
from prb_jax.measure.plan.chips import CHIPS, PlanOptions, Slice
from prb_jax.measure.plan.program import executed_flops
from prb_jax.measure.plan.sampling import plan_sampling, sampling_program, step_flops
from prb_jax.measure.plan.streams import BatchShape
from prb_jax.models.config.decoder import parse_config
from tests.measure.plan.tiny import CONFIG, TINY, needs_libtpu

SHAPE = BatchShape(batch=2, prefix=64, responses=3, response_length=32)


def test_the_program_and_its_caches(mesh: Mesh) -> None:
    program, caches = sampling_program(CONFIG, SHAPE, mesh=mesh, dtype="float32")
    one_token = 3 * 2 * 2 * 64 * 4  # layers, keys and values, kv heads, head dim, bytes
    assert caches == (2 * 64 * one_token, 2 * 3 * 32 * one_token)
    assert program.flops == step_flops(CONFIG, SHAPE)
    # a step computes what is needed on paper; attention looks at a further column, and sums over V choose the token
    traced = program.function.trace(*program.arguments, **program.named)
    assert executed_flops(traced.jaxpr) == pytest.approx(program.flops, rel=0.05)
    windowed = replace(CONFIG, sliding_window=16, layer_windows=(True, False, True))
    attention = 4 * 4 * 64 * 2 * 3 * (64 + 32 - 16) * 2
    assert step_flops(CONFIG, SHAPE) - step_flops(windowed, SHAPE) == attention
    place = Slice("cpu", CHIPS["v5e"], jax.devices()[:1])
    planned = plan_sampling(CONFIG, PlanOptions(topology=place, dtype="float32", **asdict(SHAPE)))
    assert planned.plan.fits
    assert planned.plan.argument_bytes_per_chip > sum(caches)
    assert planned.to_json()["prefix_cache_bytes_per_chip"] == caches[0]
    assert planned.plan.estimated_seconds is not None
    assert planned.tokens_per_second == pytest.approx(6 / planned.plan.estimated_seconds)
    with pytest.raises(MeshError, match="conversations of 1025 tokens"):
        sampling_program(CONFIG, replace(SHAPE, prefix=993), mesh=mesh, dtype="float32")


@needs_libtpu
@pytest.mark.slow
def test_a_slice_of_tpus() -> None:
    config = parse_config(TINY | {"vocab_size": 1024}, where="tiny")
    sizes = asdict(BatchShape(batch=8, prefix=128, responses=4, response_length=64))
    planned = plan_sampling(config, PlanOptions(topology="v5e:2x2", mesh="fsdp=4", **sizes))
    one_token = 3 * 2 * 2 * 64 * jnp.dtype("bfloat16").itemsize
    assert planned.prefix_cache_bytes_per_chip == 2 * 128 * one_token
    assert planned.sample_cache_bytes_per_chip == 2 * 4 * 64 * one_token
    assert planned.plan.fits
    assert planned.plan.unknown_loops <= 1
    assert np.isfinite(planned.tokens_per_second or np.nan)
