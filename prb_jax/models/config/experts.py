"""Mixtures of experts: experts per layer, experts per token, and names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prb_jax.models.config.fields import FieldReader


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of a family's experts in ``config.json`` and in a checkpoint."""

    router: str = "mlp.gate"  # module of the router
    gate: str = "mlp.experts.{expert}.gate_proj"  # modules of one expert
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    merged_router: str = "mlp.gate"  # module of the router in files with all experts in one tensor
    size: str = "moe_intermediate_size"  # field with the width of an expert
    normalised: bool | None = None  # see `Experts.normalised`; None reads the field ``norm_topk_prob``
    gate_up: str = ""
    """Tensor with gate and up of all experts [E, D, 2F], columns interleaved; ``down`` then also contains all experts
    [E, F, D]."""
    biased: bool = False  # the router and the matrices of experts have biases
    clamped: bool = False  # the gated activation is clamped, see `Experts.limit`
    some_layers: bool = True  # ``mlp_only_layers`` and ``decoder_sparse_step`` name layers without experts
    shared: bool = False  # the mixture has a shared expert of ``shared_expert_intermediate_size``


QWEN_EXPERTS = ExpertNames()
MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
    size="intermediate_size",
    normalised=True,
    some_layers=False,
)


GPT_OSS_EXPERTS = ExpertNames(
    router="mlp.router",
    gate_up="mlp.experts.{expert}.gate_up_proj",
    down="mlp.experts.{expert}.down_proj",
    merged_router="mlp.router",
    size="intermediate_size",
    normalised=True,
    some_layers=False,
    biased=True,
    clamped=True,
)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts, the mlp of a layer."""

    count: int  # E
    chosen: int  # experts per token
    size: int  # F of each expert
    normalised: bool  # weights of the chosen experts sum to 1
    shared: int  # F of the shared expert, which every token takes and which has a separate gate; 0 for none
    names: ExpertNames
    dense: tuple[int, ...] = ()  # layers with one mlp of ``intermediate_size`` instead of experts
    limit: float | None = None
    """Clamp of the activation (up + 1) gate sigmoid(alpha gate): gate is clamped from above, up on both sides."""
    alpha: float = 1.0

    @property
    def active(self) -> int:
        """Sum of F over the experts of one token."""
        return self.chosen * self.size + self.shared


def parse_experts(
    fields: FieldReader, names: ExpertNames, absent: Mapping[str, Any], *, layers: int
) -> Experts:
    """Read the mixture of experts of a family.

    Args:
      fields: Reader of the whole ``config.json``.
      names: Names of the family.
      absent: The family's defaults for absent fields.
      layers: Number of layers.

    Raises:
      CheckpointError: A field is missing or mistyped, two spellings disagree, more experts are chosen than exist, or
        no layer has experts.
    """
    # transformers 5 writes 'num_local_experts' in families whose older files have 'num_experts'.
    spellings = [name for name in ("num_experts", "num_local_experts") if fields.has(name)]
    count = fields.integer(spellings[0] if spellings else "num_experts", default=absent["num_experts"])
    if len(spellings) > 1 and fields.integer(spellings[1]) != count:
        raise fields.error(spellings[1], f"the same as {spellings[0]} ({count})")
    chosen = fields.integer("num_experts_per_tok", default=absent["num_experts_per_tok"])
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"at most the number of experts ({count})")
    normalised = names.normalised
    if normalised is None:
        normalised = fields.flag("norm_topk_prob", default=absent.get("norm_topk_prob", False))
    return Experts(
        count=count,
        chosen=chosen,
        size=fields.integer(names.size, default=absent.get(names.size)),
        normalised=normalised,
        shared=fields.integer(_SHARED, default=absent[_SHARED]) if names.shared else 0,
        names=names,
        dense=_dense_layers(fields, names, layers=layers),
        limit=fields.number("swiglu_limit", default=7.0) if names.clamped else None,
        alpha=fields.number("swiglu_alpha", default=1.702) if names.clamped else 1.0,
    )


def _dense_layers(fields: FieldReader, names: ExpertNames, *, layers: int) -> tuple[int, ...]:
    """Return the layers without experts: ``mlp_only_layers``, and all but each ``decoder_sparse_step``-th."""
    if not names.some_layers:
        fields.refuse_unless({"decoder_sparse_step": 1, "mlp_only_layers": []})
        return ()
    step, listed = fields.integer("decoder_sparse_step", default=1), fields.value("mlp_only_layers") or []
    known = range(layers)
    if not isinstance(listed, list) or any(type(layer) is not int or layer not in known for layer in listed):
        raise fields.error("mlp_only_layers", f"a list of numbers from 0 to {layers - 1}")
    dense = tuple(layer for layer in known if layer in listed or (layer + 1) % step)
    if len(dense) == layers:
        name = "mlp_only_layers" if len({*listed}) == layers else "decoder_sparse_step"
        raise fields.error(name, "at least one layer with experts")
    return dense


_SHARED = "shared_expert_intermediate_size"
