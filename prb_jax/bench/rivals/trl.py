"""TRL with torch's backward pass: what the comparisons of training a reward model and a policy have in common."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from typing import Any

from prb_jax.errors import RunError


@dataclass(frozen=True)
class Trl:
    """The packages, and the device that torch uses."""

    torch: Any
    transformers: Any
    trl: Any
    device: str

    @property
    def version(self) -> str:
        """The packages' versions."""
        return (
            f"trl {self.trl.__version__}, transformers {self.transformers.__version__}, "
            f"torch {self.torch.__version__}"
        )

    def arguments(self, folder: tempfile.TemporaryDirectory[str]) -> dict[str, Any]:
        """Return arguments of every trainer: its step is timed without reports, and without gradient checkpointing."""
        return {
            "output_dir": folder.name,
            "use_cpu": self.device == "cpu",
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": [],
        }

    def narrow(self, dtype: str) -> Any:
        """Return the context in which TRL computes by default: in bfloat16 autocast over float32 weights."""
        if dtype != "bfloat16":
            return contextlib.nullcontext()
        return self.torch.autocast(self.device, dtype=self.torch.bfloat16)

    def update(self, model: Any, optimizer: Any, *, clip: float | None) -> None:
        """Clip the gradients to a norm where there is one, let the optimiser take its step, and wait for the device."""
        if clip is not None:
            self.torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def open_trl() -> Trl:
    """Import the packages.

    Raises:
      RunError: one of them is not installed.
    """
    try:
        import torch
        import transformers
        import trl
    except ImportError as error:
        raise RunError(
            f"the comparison with TRL needs {error.name}, which is not installed: pip install trl"
        ) from error
    return Trl(torch, transformers, trl, "cuda" if torch.cuda.is_available() else "cpu")
