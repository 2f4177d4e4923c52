"""The choices of a user who samples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prb_jax.errors import DataError, quote
from prb_jax.generation.choose import Rules


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How samples are drawn; :meth:`prb_jax.generation.policy.Policy.sample` says what each one means.

    Raises:
      DataError: a number that is out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("n", 1), ("max_new_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
                raise DataError(f"{name}: expected a whole number of at least {low}, found {quote(value)}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise DataError(f"stop: expected texts, none of them empty, found {quote(self.stop)}")
        if self.temperature == 0 and self.n > 1:
            raise DataError(
                f"n: expected 1 at temperature 0, found {self.n}: greedy samples of a prompt are all the same"
            )
        self.rules.checked()

    @property
    def rules(self) -> Rules:
        """The rules by which a token is drawn."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return Rules(**{name: getattr(self, name) for name in names})

    def to_json(self, *, stop_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return what decides the samples, JSON-ready, with the stop ids in use."""
        return asdict(self) | {"stop": list(self.stop), "stop_ids": list(stop_ids)}
