"""Open the scorer of an evaluation: a reward model by name, any other kind of name, or an object of Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prb_jax.errors import CheckpointError, RunError, quote
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import MODEL_FIRST
from prb_jax.records.options import refuse_given
from prb_jax.scoring.scorer import ScoreFunction, Scorer, ScoresTokens, StreamsScores
from prb_jax.seams import get

Model = Scorer | StreamsScores | ScoresTokens | ScoreFunction | str | Path


def load_by_name(model: str | Path, options: LoadOptions) -> Any:
    """Return the scorer of a name; arguments and errors are as in :func:`prb_jax.load`."""
    if not isinstance(model, str | Path):
        raise CheckpointError(f"model: expected a folder or a hub id, found {quote(model)}")
    if not isinstance(options.tokenizer, str | Path | None):
        raise RunError(
            f"tokenizer: expected a folder or hub id beside the name of a model, found "
            f"{type(options.tokenizer).__name__}"
        )
    if (other := get("scorers", "other kind").value(model, options)) is not None:
        return other
    if options.is_implicit:
        return get("scorers", "implicit rewards").value(model, options)
    from prb_jax.models.readouts.open_model import open_model  # baselines do not start JAX
    from prb_jax.scoring.reward_model import load_reward_model

    return load_reward_model(open_model(model, options))


def open_scorer(
    model: Model,
    options: LoadOptions,
    *,
    name: str | None = None,
    recorded: bool = False,
    history: Sequence[Comparison] | Path | None = None,
) -> Scorer:
    """Return the scorer of a model; load it if it is a name.

    Args:
      model: Model, as in :func:`prb_jax.evaluate`.
      options: Options of loading, for a name or a `flax.nnx.Module`.
      name: Name of a function.
      recorded: True if a run folder will identify the scorer by its name.
      history: Comparisons or saved states for fitted methods: see :func:`prb_jax.scoring.history.with_history`.

    Raises:
      RunError: Options have no effect, or the object cannot score.
      CheckpointError, MeshError: The model cannot be loaded.
    """
    if history is not None:
        scorer = open_scorer(model, options, name=name, recorded=recorded)
        known_as = str(scorer.identity().get("name", "this model"))
        return get("evaluation", "adapted").value({known_as: scorer}, history)[known_as]
    if isinstance(model, str | Path):
        return load_by_name(model, options)
    if is_module(model):
        return get("scorers", "module").value(model, options)
    refuse_given(options.given, "decided where the model was loaded")
    if isinstance(model, Scorer):
        return model
    if hasattr(model, "stream"):
        return get("scorers", "own").value(model)
    if not callable(model):
        raise RunError(
            f"model: expected a model, a name or a function, found {type(model).__name__}; {MODEL_FIRST}"
        )
    return get("scorers", "function").value(model, name=name, recorded=recorded)


def is_module(model: Any) -> bool:
    """Return True for a `flax.nnx.Module` or a subclass, without importing Flax."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and issubclass(model if isinstance(model, type) else type(model), nnx.Module)
