"""`prb bench sample`: how fast a policy draws texts on this machine, beside `generate` of transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.bench.scorer import bench_source
from prb_jax.bench.table import shown
from prb_jax.bench.workload import synthetic_workload
from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.errors import DataError
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import make_program
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import LanguageHead
from prb_jax.models.random_params import init_params
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_language_model
from prb_jax.sharding import check_heads, make_mesh, parameter_shardings


@dataclass(frozen=True, kw_only=True)
class SamplingResult:
    """Sampling in one dtype. Rates are medians over rounds; ``speedup`` is the median of ratios."""

    dtype: str = field(metadata=shown("dtype", meaning="of both sides"))
    prompts: int = field(metadata=shown("prompts x samples", "{v} x {r.samples}", "of a round"))
    samples: int
    new_tokens: int = field(metadata=shown("new tokens", "{v:,}", "of each sample"))
    prompt_tokens: int = field(metadata=shown("prompt tokens", "{r.mean_prompt:,.0f}", "mean"))
    tokens_per_second: float = field(
        metadata=shown("tokens/s", "{v:,.1f}", "drawn, reading the prompts included")
    )
    compile_seconds: float = field(metadata=shown("compile s", "{v:.1f}", "the first pass beyond another"))
    against_prompts: int | None = None
    against_tokens_per_second: float | None = field(
        default=None, metadata=shown("transformers tokens/s", "{v:,.1f}")
    )
    speedup: float | None = field(default=None, metadata=shown("speed-up", "{v:.2f}x"))
    equal_tokens: float | None = field(
        default=None,
        metadata=shown(
            "equal tokens",
            "{v:.1%}",
            "of greedy texts, up to the first difference; none of random weights or of drawn tokens",
        ),
    )

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt."""
        return self.prompt_tokens / self.prompts


def bench_sampling(
    model: str,
    *,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    new_tokens: int,
    temperature: float,
    rounds: int,
    against: str | None,
    against_prompts: int | None,
    mesh: str | None,
    dtype: str | None,
    attention: str = "auto",
) -> SamplingResult:
    """Time passes of ours and, where asked for, of transformers, in turn; every sample has ``new_tokens`` tokens.

    The arguments are the options of `prb bench sample`, whose help explains them.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: several greedy samples, or more tokens than the context.
      RunError: torch is not installed.
    """
    source = bench_source(model)
    policy = silent_policy(source, mesh=mesh, dtype=dtype, attention=attention)
    if 2 * new_tokens >= policy.context:
        raise DataError(
            f"new tokens: expected less than half of the context of {policy.context}, found {new_tokens}"
        )
    work = synthetic_workload(
        prompts,
        responses=1,
        prefix_tokens=prompt_tokens,
        response_tokens=2,
        vocab_size=policy.config.vocab_size,
        longest=policy.context - new_tokens,
    )
    given = [np.asarray(tree.prefix) for tree in work.trees]
    rival = None
    if against:
        from prb_jax.bench.rivals.transformers import TransformersSampler

        config = policy.config.original | {"tie_word_embeddings": True}
        rival = TransformersSampler(source if isinstance(source, Path) else config, dtype=policy.dtype)
        rival.run(given[:1], samples=samples, tokens=1, temperature=temperature)
    drawing: dict[str, Any] = {"n": samples, "temperature": temperature, "stop_ids": []}

    def timed() -> tuple[float, list[np.ndarray]]:
        start = time.perf_counter()
        found = policy.sample(given, max_new_tokens=new_tokens, **drawing)
        return time.perf_counter() - start, [sample.token_ids for row in found for sample in row]

    first, ours = timed()
    theirs, passes, count = [], list[float](), min(prompts, against_prompts or prompts)
    for _ in range(rounds):
        passes.append(timed()[0])
        if rival:
            theirs.append(
                rival.run(given[:count], samples=samples, tokens=new_tokens, temperature=temperature)
            )
    seconds = statistics.median(passes)
    result = SamplingResult(
        dtype=policy.dtype,
        prompts=prompts,
        samples=samples,
        new_tokens=new_tokens,
        prompt_tokens=sum(map(len, given)),
        tokens_per_second=prompts * samples * new_tokens / seconds,
        compile_seconds=max(0.0, first - seconds),
    )
    if not theirs:
        return result
    rates = [step.tokens / step.seconds for step in theirs]
    ratios = [
        result.prompts * samples * new_tokens / own / rate for own, rate in zip(passes, rates, strict=True)
    ]
    same = rival is not None and rival.same_weights and temperature == 0
    return replace(
        result,
        against_prompts=count,
        against_tokens_per_second=statistics.median(rates),
        speedup=statistics.median(ratios),
        equal_tokens=_equal(ours, np.concatenate(theirs[0].ids)) if same else None,
    )


def silent_policy(
    source: Path | DecoderConfig, *, mesh: str | None, dtype: str | None, attention: str
) -> Policy:
    """Return a policy without a tokenizer: token ids go in."""
    if isinstance(source, Path):
        opened = open_language_model(source, LoadOptions(mesh=mesh, dtype=dtype, attention=attention))
        config, devices, chosen = opened.decoder.config, opened.mesh, opened.dtype
    else:
        config = replace(source, head=LanguageHead(True, source.final_logit_softcapping))
        devices, chosen = make_mesh(mesh), dtype or source.default_dtype
    kind = jnp.dtype(chosen)
    check_heads(devices, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    shardings = parameter_shardings(abstract_params(config), devices)

    def make() -> Params:
        made = init_params(config, dtype=kind)
        return {name: value for name, value in made.items() if name != "score"}

    params = (
        load_params(source, config, dtype=kind, shardings=shardings).params
        if isinstance(source, Path)
        else jax.jit(make, out_shardings=shardings)()
    )
    return Policy(
        name=str(source) if isinstance(source, Path) else config.model_type,
        program=make_program(config, mesh=devices, dtype=kind, attention=attention),
        params=params,
        tokenizer=cast(Any, _Silent()),
        stop_ids=(),
        mesh=devices,
        dtype=chosen,
    )


class _Silent:
    """In the place of a tokenizer: nobody reads the texts."""

    tokenizer: Any

    def __init__(self) -> None:
        self.tokenizer = self

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def _equal(ours: Sequence[np.ndarray], theirs: np.ndarray) -> float:
    same = []
    for own, other in zip(ours, theirs):
        different = np.flatnonzero(own != other)
        same.append(different[0] if len(different) else len(own))
    return float(np.sum(same) / (len(same) * theirs.shape[1]))
