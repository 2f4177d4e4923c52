"""Checkpoints of the parity tests with a tokenizer beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import tiny_tokenizer as tiny
from tests.parity.reward_models import CASES, RowCase, write_case

Reference = Callable[[Sequence[int]], float]


def case_of(row: str) -> RowCase:
    return next(case for case in CASES if case.row == row)


def write_row(
    row: str,
    root: Path,
    *,
    template: str | None = tiny.CHAT,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, Reference]:
    """A row's first checkpoint with room for its ids in the vocabulary and the tiny tokenizer."""
    case = case_of(row)
    changes = {"vocab": 416, **changes}
    case = replace(case, config={**case.config, **(config or {})}, **changes)
    folder, reference = write_case(case, root)
    tiny.write_tokenizer(folder, template=template)
    return folder, reference
