"""The compiled loop over tokens: caches are written in place."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.behaviour.generation.choose import Rules
from prb_jax.behaviour.generation.programs import make_program, run_program
from prb_jax.behaviour.generation.steps import Guidance, Program, Stops, empty_prompts, empty_rows
from prb_jax.models.cache import empty_prefix, empty_suffix
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.named_shapes import shape_config
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.platform.meshes import make_mesh

TREES, SAMPLES, PROMPT, COLUMNS = 1, 3, 16, 40


def program_of(shape: str, dtype: str, *, policy: bool) -> Program:
    config = parse_config({**shape_config(shape), "num_hidden_layers": 4}, where=shape)
    if policy:
        config = replace(config, head=LanguageHead(tied=True))
    return make_program(config, mesh=make_mesh(None), dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "guided"), [("qwen3-40m", False), ("qwen3.5-40m", False), ("qwen3-40m", True)]
)
def test_no_token_copies_the_caches(shape: str, guided: bool, dtype: str) -> None:
    policy, reward = (program_of(shape, dtype, policy=policy) for policy in (True, False))
    of_policy, of_reward = (abstract_params(of.config, dtype=of.dtype) for of in (policy, reward))

    def begin() -> Any:
        prompts = empty_prompts(policy, trees=TREES, columns=PROMPT)
        rows = empty_rows(policy, trees=TREES, samples=SAMPLES, columns=COLUMNS)
        if not guided:
            return prompts, rows
        sizes: dict[str, Any] = {"trees": TREES, "dtype": reward.dtype}
        before = empty_prefix(reward.config, columns=PROMPT, **sizes)
        behind = empty_suffix(reward.config, samples=SAMPLES, columns=COLUMNS, **sizes)
        return replace(prompts, reward=before), replace(rows, reward=behind)

    prompts, rows = jax.eval_shape(begin)
    integer = jax.ShapeDtypeStruct((), jnp.int32)
    stops: Any = Stops(ids=jnp.zeros(1, jnp.int32), tokens=jnp.int32(COLUMNS))
    guidance = Guidance(reward=reward, readout="logit", candidates=2) if guided else None
    lowered = run_program(policy, guidance).lower(
        of_policy, prompts, rows, rules=Rules(), stops=stops, seed=integer, most=integer,
        watched=np.zeros((TREES, SAMPLES), bool), reward=(of_reward, np.float32(1)) if guided else None,
    )  # fmt: skip
    copied = re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", lowered.compile().as_text())
    caches = jax.tree.leaves((rows.cache, rows.reward))
    assert copied  # of small arrays
    assert not {",".join(map(str, leaf.shape)) for leaf in caches if leaf.ndim > 2} & set(copied)
