"""Sweeps: many parameters of one path through the code, a few of which `make test` tries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], *, few: Collection[int]) -> list[Any]:
    """Return the parameters of a test: every case for `make test-all`, those at the places `few` for `make test`.

    A case that is a tuple has a value for each argument of the test.
    """
    parameters = []
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=() if place in few else pytest.mark.slow))
    return parameters
