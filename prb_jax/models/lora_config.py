"""The settings of low-rank adapters, for `tuning="lora"`; the adapters are in :mod:`prb_jax.models.lora`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prb_jax.errors import CheckpointError
from prb_jax.records.options import Options, option

BOTH: Final = "gate_up"  # for experts with one matrix for gate and up, which are adapted together


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Options, prefix="lora.", error=CheckpointError):
    """Low-rank updates of the layers' matrices, for `tuning="lora"`."""

    rank: int = option(16, "inner dimension of each update.", least=1)
    alpha: float = option(32.0, "numerator of the scale alpha / rank of updates.", above=0)
    targets: tuple[str, ...] = option(
        ("q", "k", "v", "o", "gate", "up", "down"),
        "adapted matrices, among q, k, v, o, gate, up, down; also q_gate for gated attention; dense_gate, "
        "dense_up, dense_down, shared_gate, shared_up, shared_down for layers without experts and for shared experts "
        "in a mixture; and delta_q, delta_k, delta_v, delta_z, delta_b, delta_a, delta_o for recurrent layers.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        recurrent = (f"delta_{name}" for name in "qkvzbao")
        of_mixtures = (f"{part}_{name}" for part in ("dense", "shared") for name in ("gate", "up", "down"))
        every = (*LoraConfig.targets, "q_gate", *of_mixtures, *recurrent)  # the default and all others
        unknown = [name for name in self.targets if name not in (*every, BOTH)]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            raise CheckpointError(
                f"lora.targets: expected different names among {', '.join(every)}, "
                f"found {', '.join(self.targets) or 'none'}"
            )

    @property
    def scale(self) -> float:
        """Scale of updates, alpha / rank."""
        return self.alpha / self.rank
