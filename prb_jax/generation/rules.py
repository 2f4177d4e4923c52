"""How samples are drawn: the rules by which a token is chosen, and the options of users. No JAX is imported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from prb_jax.data.options import Options, option
from prb_jax.errors import DataError, quote

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How tokens are drawn: numbers, or arrays [B, S] with a number for each row.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token (greedy).
      top_k: keeps this many most probable tokens, and those that tie with the last of them; 0 keeps all.
      top_p: keeps the most probable tokens until their probabilities sum up to this; 1 keeps all.
      min_p: keeps tokens of at least this share of the largest probability; 0 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens that occurred before, in the
        prompt too; 1 changes nothing.
    """

    temperature: jax.Array | np.ndarray | float = 1.0
    top_k: jax.Array | np.ndarray | int = 0
    top_p: jax.Array | np.ndarray | float = 1.0
    min_p: jax.Array | np.ndarray | float = 0.0
    repetition_penalty: jax.Array | np.ndarray | float = 1.0

    def checked(self) -> Rules:
        """Return the rules as arrays of their types.

        Raises:
          DataError: a number that is out of its range; names the rule.
        """
        ranges = {
            "temperature": (self.temperature, 0.0, np.inf, "0 or more"),
            "top_k": (self.top_k, 0, np.inf, "0 or more"),
            "top_p": (self.top_p, np.nextafter(0.0, 1.0), 1.0, "more than 0 and at most 1"),
            "min_p": (self.min_p, 0.0, 1.0, "0 to 1"),
            "repetition_penalty": (
                self.repetition_penalty,
                np.nextafter(0.0, 1.0),
                np.inf,
                "a finite number above 0",
            ),
        }
        for name, (value, low, high, expected) in ranges.items():
            numbers = np.asarray(value, np.float64)
            if not (np.isfinite(numbers) & (numbers >= low) & (numbers <= high)).all():
                raise DataError(f"{name}: expected {expected}, found {quote(value)}")
        if (np.asarray(self.top_k) != np.asarray(self.top_k, np.int32)).any():
            raise DataError(f"top_k: expected a whole number, found {quote(self.top_k)}")
        floats = ("temperature", "top_p", "min_p", "repetition_penalty")
        return replace(
            self,
            top_k=np.asarray(self.top_k, np.int32),
            **{name: np.asarray(getattr(self, name), np.float32) for name in floats},
        )


@dataclass(frozen=True, kw_only=True)
class SampleOptions(Options):
    """How samples are drawn; :meth:`prb_jax.generation.policy.Policy.sample` says what each one means.

    Raises:
      DataError: a number that is out of its range.
    """

    n: int = option(1, "texts of each prompt", "N", least=1, below=2**31)
    temperature: float = option(1.0, "0 takes the most probable token", "T")
    top_k: int = option(0, "0 for all tokens (default)", "K", least=0, below=2**31)
    top_p: float = option(1.0, "1 for all tokens (default)", "P")
    min_p: float = option(0.0, "0 for all tokens (default)", "P")
    repetition_penalty: float = option(1.0, "1 changes nothing (default)", "R")
    max_new_tokens: int = option(256, "of a text", "M", least=1, below=2**31)
    stop: tuple[str, ...] = option((), "texts that end a text", "TEXT ...")
    stop_ids: tuple[int, ...] | None = option(
        None, "tokens that end a text (default: the model's)", "ID ...", least=0, flag="stop-id"
    )
    seed: int = option(0, "of the draws", "N", least=0, below=2**31)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return Rules(**{rule.name: getattr(self, rule.name) for rule in fields(Rules)})

    def to_json(self, *, stop_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return what decides the samples, JSON-ready, with the stop ids in use."""
        return asdict(self) | {"stop": list(self.stop), "stop_ids": list(stop_ids)}
