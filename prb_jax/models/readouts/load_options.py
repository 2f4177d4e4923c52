"""The choices of a user who opens a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prb_jax.models import ATTENTIONS, DTYPES, QUANTIZATIONS, Together
from prb_jax.records.options import option

if TYPE_CHECKING:
    from jax.sharding import Mesh
else:
    Mesh = object  # the command line reads the types of fields and starts no JAX

IMPLICIT = ("reference", "beta", "reference_free", "logprobs")
"""Fields of :class:`LoadOptions` by which a policy gives rewards."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The choices of a user who opens a model; :func:`prb_jax.load` explains them at length."""

    mesh: str | Mesh | None = option(None, "as fsdp=4,tensor=2 (default: all devices)", "M")
    dtype: str | None = option(None, "(default: the checkpoint's)", choices=DTYPES)
    quantize: str | None = option(
        None,
        "matrices of the layers in eight bits; int8 and fp8 quantise activations too",
        choices=QUANTIZATIONS,
    )
    attention: str = option(
        "auto",
        "the machine's own choice (default: in bfloat16 a kernel on TPUs and GPUs), or the XLA program",
        choices=ATTENTIONS,
    )
    revision: str | None = option(None, "branch, tag or commit on the hub", "R", effect="contents")
    base: str | Path | None = option(
        None,
        "base model of a PEFT adapter: a folder or hub id (default: the one that the adapter names)",
        "BASE",
        effect="contents",
    )
    tokenizer: str | Path | None = option(
        None, "folder or hub id of the tokenizer (default: the model's)", "T", effect="contents"
    )
    chat_template: str | None = option(
        None, "a Jinja file, or plain; for models without one", "FILE", effect="contents"
    )
    readout: str | None = option(
        None,
        "a row of the table of reward models; qwen2-prm:min (product, mean, last), how the steps of a process model "
        "become one reward; steps:ID for two labels at every token ID; vocabulary:ID; or which logit of several is the "
        "reward: first-logit, last-softmax",
        "NAME",
    )
    reference: str | Path | None = option(
        None,
        "the model from which a policy was trained by DPO: rewards are beta (log p_policy - log p_reference)",
        "BASE",
        effect="contents",
    )
    beta: float = option(0.1, "with --reference or --reference-free: factor of the rewards", "B", above=0)
    reference_free: bool = option(
        False, "rewards of a policy are beta log p_policy alone, without a reference"
    )
    logprobs: Together = option(
        "sum",
        "with --reference-free: the log-probabilities of a response's tokens as their sum, average, or negative "
        "Euclidean norm, as in RewardBench",
    )

    template_variables: Mapping[str, Any] | None = None
    """Values of variables that the chat template reads, as ``{"enable_thinking": False}``."""

    @property
    def is_implicit(self) -> bool:
        """Whether a policy's implicit rewards are asked for, rather than a reward model."""
        return not self.given.keys().isdisjoint(IMPLICIT)

    @property
    def devices(self) -> LoadOptions:
        """The choices that hold for any other model too: how it computes, and not how it is read."""
        return LoadOptions(mesh=self.mesh, dtype=self.dtype, quantize=self.quantize, attention=self.attention)

    @property
    def of_reward(self) -> LoadOptions:
        """The choices for a reward beside a policy: how it computes, and whether it is a policy's implicit reward."""
        return replace(self.devices, **{name: getattr(self, name) for name in IMPLICIT})

    @property
    def given(self) -> dict[str, Any]:
        """The choices that were made, by name."""
        choices = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in choices.items() if value != default}
