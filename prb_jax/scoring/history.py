"""The history of users, from which a fitted method learns them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prb_jax.errors import PrbWarning, RunError, counted
from prb_jax.personal import holds_states
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.options import Data
from prb_jax.scoring.scorer import Scorer


def with_history(
    scorers: Mapping[str, Scorer], history: Sequence[Comparison] | Path | None
) -> dict[str, Scorer]:
    """Return the scorers by name, with the fitted methods among them adapted to the history, if there is one.

    Args:
      scorers: Scorers by name.
      history: Comparisons, or a folder of user states: see :func:`read_history`.

    Raises:
      RunError: There is a history and no scorer adapts to users.
    """
    if history is None:
        return dict(scorers)
    adapted = {name: scorer.with_history(history) for name, scorer in scorers.items() if scorer.adapts}
    if not adapted:
        raise RunError(
            f"history: {', '.join(scorers)} does not adapt to users; expected a folder of a fitted method, as "
            "`prb personalise` writes it"
        )
    return {**scorers, **adapted}


def tell_strangers(scorers: Iterable[Scorer], comparisons: Sequence[Comparison]) -> None:
    """Warn of users of whom the history of a fitted method knows nothing, as when names are spelled in two ways."""
    for scorer in (one for one in scorers if one.adapts):
        if lacking := scorer.own_figures(comparisons).get("users_without_history"):
            users = len({one.user_id for one in comparisons} - {None})
            told = f"the history knows nothing of {lacking:,} of {counted(users, 'user')}"
            warnings.warn(told, PrbWarning, stacklevel=3)


def read_history(history: Data | None) -> Sequence[Comparison] | Path | None:
    """Return the comparisons of a history, or its folder of saved user states.

    Raises:
      DataError: The history cannot be used.
      RunError: A folder of states is combined with other data.
    """
    if history is None:
        return None
    parts = list(history) if isinstance(history, list | tuple) else [history]
    folders = [Path(part).expanduser() for part in parts if holds_states(part)]  # pyright: ignore[reportArgumentType]
    if not folders:
        return read_inputs(history).comparisons
    if len(parts) > 1:
        raise RunError(f"history: {folders[0]} contains user states, so it must be the only history")
    return folders[0]
