"""The choices of a user who opens a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The choices of a user who opens a model; :func:`prb_jax.load` says what each one means."""

    mesh: str | Mesh | None = None
    dtype: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    readout: str | None = None
    tokenizer: str | Path | None = None
    quantize: str | None = None
    attention: str = "auto"

    @property
    def given(self) -> dict[str, Any]:
        """The choices that were made, by name."""
        found = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in found.items() if value != default}
