"""Options for opening a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from prb_jax.errors import short_repr
from prb_jax.models import ATTENTIONS, DTYPES, QUANTIZATIONS, Together
from prb_jax.records.options import choice_named, option

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike
else:
    Mesh = DTypeLike = object  # the command line reads field types without starting JAX

IMPLICIT = ("reference", "beta", "reference_free", "logprobs")
"""Fields of :class:`LoadOptions` for the rewards of a policy."""


class LoadChoices(TypedDict, total=False):
    """Keywords of a public function that opens a model, explained in :func:`prb_jax.load`."""

    mesh: str | Mesh | None
    dtype: DTypeLike | None
    revision: str | None
    base: str | Path | None
    tokenizer: str | Path | Any
    chat_template: str | None
    readout: str | None
    quantize: str | None
    attention: str
    reference: str | Path | None
    beta: float
    reference_free: bool
    logprobs: Together


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for opening a model, explained in :func:`prb_jax.load`."""

    mesh: str | Mesh | None = option(
        None, "mesh axes and sizes, e.g. fsdp=4,tensor=2 (default: all devices)", "M"
    )
    dtype: str | None = option(None, "type of the weights (default: the checkpoint's)", choices=DTYPES)
    quantize: str | None = option(
        None,
        "eight-bit format of the layers' matrices; int8 and fp8 also quantise activations",
        choices=QUANTIZATIONS,
    )
    attention: str = option(
        "auto",
        "attention for the machine (default: in bfloat16 a kernel on TPUs and GPUs), or the XLA program",
        choices=ATTENTIONS,
    )
    revision: str | None = option(None, "branch, tag or commit on the hub", "R", effect="contents")
    base: str | Path | None = option(
        None,
        "base model of a PEFT adapter: a folder or hub id (default: the base named in the adapter)",
        "BASE",
        effect="contents",
    )
    tokenizer: str | Path | None = option(
        None, "folder or hub id of the tokenizer (default: the model's)", "T", effect="contents"
    )
    chat_template: str | None = option(
        None, "Jinja file, or plain; for models without a template", "FILE", effect="contents"
    )
    readout: str | None = option(
        None,
        "row of the table of reward models; ROW:min (product, mean, last) of a process model, e.g. qwen2-prm:min, to "
        "reduce steps to one reward; steps:ID for two labels at every token ID; vocabulary:ID; or for several logits: "
        "first-logit, last-softmax",
        "NAME",
    )
    reference: str | Path | None = option(
        None,
        "model from which a policy was trained by DPO: rewards are beta (log p_policy - log p_reference)",
        "BASE",
        effect="contents",
    )
    beta: float = option(0.1, "factor of the rewards, with --reference or --reference-free", "B", above=0)
    reference_free: bool = option(False, "rewards of a policy are beta log p_policy, without a reference")
    logprobs: Together = option(
        "sum",
        "reduction of the log-probabilities of a response's tokens with --reference-free: sum, average, or negative "
        "Euclidean norm, as in RewardBench",
    )

    template_variables: Mapping[str, Any] | None = None
    """Values of variables in the chat template, e.g. ``{"enable_thinking": False}``."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", choice_named(self.dtype, DTYPES))

    @property
    def is_implicit(self) -> bool:
        """True if implicit rewards of a policy are requested instead of a reward model."""
        return not self.given.keys().isdisjoint(IMPLICIT)

    @property
    def devices(self) -> LoadOptions:
        """Options that apply to any model: devices and computation, not the interpretation of files."""
        return LoadOptions(mesh=self.mesh, dtype=self.dtype, quantize=self.quantize, attention=self.attention)

    @property
    def of_reward(self) -> LoadOptions:
        """Options for a reward used with a policy: computation, and options of implicit rewards."""
        return replace(self.devices, **{name: getattr(self, name) for name in IMPLICIT})

    @property
    def given(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        choices = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in choices.items() if value != default}
