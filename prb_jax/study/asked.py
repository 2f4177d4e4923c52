"""Which methods a study compares, as the command line names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prb_jax.errors import RunError
from prb_jax.personal.few_shot.backbone import TRAINS
from prb_jax.personal.few_shot.protocol import Method
from prb_jax.personal.few_shot.registry import METHODS, method_named
from prb_jax.study.results import POOLED, STRONG

ALL: Final = "all"


@dataclass(frozen=True)
class Asked:
    """The methods of a study.

    Attributes:
      methods: in the order of its tables.
      named: those that must be possible; others are left out where the data lack what they need.
      left_out: of "all", with the reason.
    """

    methods: list[Method]
    named: frozenset[str]
    left_out: dict[str, str]


def asked_methods(asked: str | Sequence[str]) -> Asked:
    """Return the methods of a study: those that are named, or "all"; pooled and offset are always among them.

    "all" leaves out the methods that train the backbone, unless they are named beside it.

    Raises:
      RunError: a name is given twice.
      DataError: there is no such method.
    """
    given = [part for name in ([asked] if isinstance(asked, str) else asked) for part in name.split(",")]
    if twice := [name for place, name in enumerate(given) if name in given[:place]]:
        raise RunError(f"methods: {twice[0]} is given twice")
    named = [method_named(name).name for name in given if name != ALL]
    every = {name: method_named(name) for name in METHODS} if ALL in given else {}
    slow = {name for name, method in every.items() if TRAINS in method.needs} - set(named)
    names = dict.fromkeys([POOLED, STRONG, *named, *every])
    return Asked(
        methods=[method_named(name) for name in names if name not in slow],
        named=frozenset(named),
        left_out={
            name: f"trains the backbone, which takes long; name it to have it: --methods {ALL},{name}"
            for name in sorted(slow)
        },
    )
