"""Sampling options for users. Does not import JAX."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from prb_jax.errors import DataError
from prb_jax.records.options import Options, option

if TYPE_CHECKING:
    from prb_jax.behaviour.generation.choose import Rules


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Options):
    """How samples are drawn; :meth:`prb_jax.behaviour.generation.policy.Policy.sample` describes each option.

    Raises:
      DataError: a number is out of range.
    """

    n: int = option(1, "texts of each prompt", "N", least=1, below=2**31)
    temperature: float = option(1.0, "sampling temperature; 0 takes the most probable token", "T")
    top_k: int = option(
        0, "sample from the K most probable tokens; 0 for all (default)", "K", least=0, below=2**31
    )
    top_p: float = option(
        1.0, "sample from the most probable tokens up to this mass; 1 for all (default)", "P"
    )
    min_p: float = option(0.0, "least probability, relative to the largest; 0 for all tokens (default)", "P")
    repetition_penalty: float = option(
        1.0, "penalty for tokens that occurred; 1 changes nothing (default)", "R"
    )
    max_new_tokens: int = option(256, "maximum tokens of a text", "M", least=1, below=2**31)
    stop: tuple[str, ...] = option((), "texts that end a text", "TEXT ...")
    stop_ids: tuple[int, ...] | None = option(
        None, "tokens that end a text (default: the model's)", "ID ...", least=0, flag="stop-id"
    )
    seed: int = option(0, "seed of the draws", "N", least=0, below=2**31)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("temperature", 0 <= self.temperature < math.inf, "0 or more")
        self.check("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1")
        self.check("min_p", 0 <= self.min_p <= 1, "0 to 1")
        self.check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a finite number above 0")
        texts = all(isinstance(text, str) and text for text in self.stop)
        self.check("stop", texts, "texts, none of them empty")
        if self.temperature == 0 and self.n > 1:
            raise DataError(
                f"n: expected 1 at temperature 0, found {self.n}: greedy samples of a prompt are all the same"
            )

    @property
    def rules(self) -> Rules:
        """The rules for drawing a token, as host arrays."""
        import numpy as np  # slow to import

        from prb_jax.behaviour.generation.choose import Rules  # starts JAX

        kinds = {"top_k": np.int32}
        names = [rule.name for rule in fields(Rules)]
        return Rules(**{name: np.asarray(getattr(self, name), kinds.get(name, np.float32)) for name in names})

    def to_json(self, *, stop_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return everything that determines the samples, JSON-ready, with the stop ids in use."""
        return asdict(self) | {"stop": list(self.stop), "stop_ids": list(stop_ids)}
