"""Typed access to the fields of a raw ``config.json``: every error names the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prb_jax.errors import CheckpointError, quote
from prb_jax.models import DTYPES

MOST_LAYERS = 4096  # tables with one entry per layer are built before the layers of the weights are counted
LARGEST_INTEGER = 2**53  # floats represent all integers up to this value
LARGEST_NUMBER = 3.4028234663852886e38  # largest float32
LARGEST_EPSILON = 1.0  # a larger one would drown the values that a norm divides by

_STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")

# Fields that cannot change a score of any model: initialisation, training, generation, bookkeeping.
_BOOKKEEPING = """
_name_or_path name_or_path transformers_version finetuning_task torchscript return_dict initializer_range
attention_dropout hidden_dropout problem_type label2id pretraining_tp use_cache cache_implementation output_attentions
output_hidden_states chunk_size_feed_forward bos_token_id eos_token_id sep_token_id decoder_start_token_id
final_logit_softcapping attn_implementation _attn_implementation _attn_implementation_autoset use_sliding_window
max_window_layers sliding_window_pattern _sliding_window_pattern rope_local_base_freq hidden_act hidden_activation
resid_pdrop embd_pdrop residual_dropout output_router_logits router_aux_loss_coef router_jitter_noise
"""
WITHOUT_EFFECT = frozenset(_BOOKKEEPING.split())


@dataclass(frozen=True)
class FieldReader:
    """Reader of fields of one JSON object; records which fields were read.

    A field without a default is required. Null counts as absent, except in the ``optional_`` readers, where null has a
    meaning.
    """

    raw: Mapping[str, Any]
    where: str
    """Prefix of messages, usually the path."""
    prefix: str = ""
    """Prefix of field names in messages."""
    read: set[str] = field(default_factory=set)

    def error(self, name: str, expected: str, *, found: Any = None) -> CheckpointError:
        """Return the error for field ``name``; ``found`` defaults to the value in the file."""
        if found is None and name not in self.raw:
            return CheckpointError(
                f"{self.where}: field '{self.prefix}{name}' is missing: expected {expected}"
            )
        value = self.raw.get(name) if found is None else found
        return CheckpointError(
            f"{self.where}: field '{self.prefix}{name}': expected {expected}, found {quote(value)}"
        )

    def value(self, name: str) -> Any:
        """Return the raw value of the field, or None."""
        self.read.add(name)
        return self.raw.get(name)

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null; it then counts as read."""
        return self.value(name) is not None

    def integer(
        self,
        name: str,
        *,
        default: int | None = None,
        minimum: int | None = 1,
        maximum: int = LARGEST_INTEGER,
    ) -> int:
        """Return an integer of at least ``minimum`` (unbounded if None) and at most ``maximum``."""
        expected = "an integer" if minimum is None else f"an integer of at least {minimum}"
        value = self._present(name, default, expected)
        if type(value) is not int or (minimum is not None and value < minimum):
            raise self.error(name, expected)
        if value > maximum:
            raise self.error(name, f"{expected} and at most {maximum}")
        return value

    def optional_integer(
        self, name: str, *, default: int | None = None, minimum: int | None = 1
    ) -> int | None:
        """Same as :meth:`integer`, but return None for an explicit null, or for an absent field without default."""
        return self.integer(name, default=default, minimum=minimum) if self._given(name, default) else None

    def number(
        self,
        name: str,
        *,
        default: float | None = None,
        positive: bool = True,
        maximum: float = LARGEST_NUMBER,
    ) -> float:
        """Return a finite number (or integer) of at most ``maximum``, by default above zero."""
        expected = "a number above 0" if positive else "a number"
        value = self._present(name, default, expected)
        if type(value) not in (int, float) or value != value or (positive and value <= 0):
            raise self.error(name, expected)
        if abs(value) > maximum:
            raise self.error(name, f"{expected} and at most {maximum:g}")
        return float(value)

    def optional_number(self, name: str, *, default: float | None = None) -> float | None:
        """Same as :meth:`number`, but return None for an explicit null, or for an absent field without default."""
        return self.number(name, default=default) if self._given(name, default) else None

    def numbers(self, name: str, *, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` finite numbers above zero."""
        values = self.value(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"a list of {count} numbers")
        return tuple(FieldReader({name: value}, self.where, self.prefix).number(name) for value in values)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._present(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """Return a non-empty string."""
        value = self._present(name, default, "a string")
        if not isinstance(value, str) or not value:
            raise self.error(name, "a string")
        return value

    def like(self, name: str, *, default: Any) -> Any:
        """Return a number, string or boolean of the default's type; an integer is also accepted for a float."""
        value = self.value(name)
        if value is None:
            return default
        kind = type(default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.error(name, f"a value like {default!r}")
        return kind(value)

    def architectures(self) -> tuple[str, ...]:
        """Return the names of the checkpoint's classes; empty if the file has none."""
        names = self.value("architectures")
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise self.error("architectures", "a list of class names")
        return tuple(names or ())

    def num_labels(self) -> int:
        """Return the number of labels from ``id2label`` or ``num_labels``; transformers omits both for its default of
        2."""
        labels = self.value("id2label")
        if labels is None:
            return self.integer("num_labels", default=2)
        if not isinstance(labels, Mapping) or not labels:
            raise self.error("id2label", "an object with one entry a label")
        count = self.integer("num_labels", default=len(labels))
        if count != len(labels):
            raise self.error("num_labels", f"{len(labels)}, the number of entries of id2label")
        return count

    def dtype(self) -> str | None:
        """Return ``dtype`` (transformers 5) or ``torch_dtype``; the first takes precedence, as in transformers."""
        names = [name for name in ("dtype", "torch_dtype") if self.has(name)]
        if not names:
            return None
        dtype = self.text(names[0]).removeprefix("torch.")
        if dtype not in _STORED_DTYPES:
            raise self.error(names[0], f"one of {', '.join(_STORED_DTYPES)}")
        return dtype

    def refuse_unless(self, neutral: Mapping[str, Any]) -> None:
        """Reject fields that would change numbers in an unsupported way.

        Args:
          neutral: The only value that each such field may have.

        Raises:
          CheckpointError: The weights are quantised, or a field has another value; the message names the field.
        """
        for name in ("quantization_config", "compression_config"):
            described = self.value(name) if self.has(name) else None
            method = described.get("quant_method") if isinstance(described, Mapping) else None
            in_four_bits = (
                method == "bitsandbytes" and isinstance(described, Mapping) and described.get("load_in_4bit")
            )
            # The scales of these formats are read with the weights.
            if self.has(name) and method not in ("fp8", "mxfp4") and not in_four_bits:
                raise CheckpointError(
                    f"{self.where}: field '{name}': quantised weights ({method or 'of no named method'}) are not "
                    "supported; use the checkpoint in its original precision"
                )
        for name, value in neutral.items():
            if self.has(name) and self.value(name) != value:
                raise self.error(name, f"{value!r} or no such field, because other values are not supported")

    def _given(self, name: str, default: Any) -> bool:
        self.read.add(name)
        return self.raw.get(name, default) is not None

    def _present(self, name: str, default: Any, expected: str) -> Any:
        value = self.value(name)
        if value is None and default is None:
            raise self.error(name, expected)
        return default if value is None else value


def choose_dtype(asked: str | None, stored: str | None, *, where: str) -> str:
    """Return the dtype to compute in: the requested one, else the checkpoint's (bfloat16 for float16).

    Raises:
      CheckpointError: The requested dtype is not in :data:`DTYPES`.
    """
    if asked is None:
        return "float32" if stored in (None, "float32", "float64") else "bfloat16"
    if asked not in DTYPES:
        raise CheckpointError(f"{where}: dtype: expected {' or '.join(DTYPES)}, found {quote(asked)}")
    return asked
