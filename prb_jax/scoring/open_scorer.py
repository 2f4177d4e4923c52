"""Open what is to be evaluated: a scorer, a function, or a model by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prb_jax.data.comparison import Comparison
from prb_jax.data.files import file_digest
from prb_jax.errors import RunError
from prb_jax.personal.folder import PERSONALISED, holds_states, is_personalised
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.plain import ScoreFunction, baseline_scorer, function_scorer
from prb_jax.scoring.read_inputs import Data, read_inputs
from prb_jax.scoring.scored import AdaptsToUsers, Scorer

Model = Scorer | ScoreFunction | str | Path


def open_scorer(
    model: Model,
    options: LoadOptions,
    *,
    name: str | None = None,
    recorded: bool = False,
    history: Sequence[Comparison] | Path | None = None,
) -> Scorer:
    """Return the scorer, loaded if it is given by name.

    Args:
      model: what :func:`prb_jax.evaluate` takes.
      options: for a model by name alone.
      name: of a function.
      recorded: a run folder will tell this scorer from others.
      history: comparisons that a fitted method of personalisation is adapted on, or a folder of states of its users:
        :func:`read_history`.

    Raises:
      RunError: options without effect, or a thing that cannot score.
      CheckpointError, MeshError: the model cannot be loaded.
    """
    if history is not None:
        scorer = open_scorer(model, options, name=name, recorded=recorded)
        if not isinstance(scorer, AdaptsToUsers):
            raise RunError(
                f"history: {scorer.identity().get('name', 'this model')} does not adapt to users; expected a folder of "
                "a fitted method, as `prb personalise` writes it"
            )
        return _knowing(scorer, history)
    if _is_baseline(model):
        if options.quantize is not None:
            raise RunError(f"quantize: {model} has no weights; leave it out")
        return baseline_scorer(str(model), **options.given)
    if is_personalised(model):
        from prb_jax.scoring.load import load

        return cast(Scorer, load(str(model), **options.given))
    if isinstance(model, str | Path):
        from prb_jax.readouts.open_model import open_model
        from prb_jax.scoring.load_opened import load_opened

        return load_opened(open_model(model, options))
    if given := options.given:
        raise RunError(f"{', '.join(given)}: decided where the model was loaded; leave out here")
    if hasattr(model, "stream"):
        return cast(Scorer, model)
    if not callable(model):
        raise RunError(f"model: expected a model, a name or a function, found {type(model).__name__}")
    scorer = function_scorer(model, name=name)
    if recorded and name is None and "<lambda>" in scorer.name:
        raise RunError(f"{scorer.name}: a lambda has no name that tells it from others: give name=...")
    return scorer


def with_history(
    scorers: Mapping[str, Scorer], history: Sequence[Comparison] | Path | None
) -> dict[str, Scorer]:
    """Return the scorers by name; the fitted methods of personalisation among them know the history, if there is one.

    Raises:
      RunError: a history, and no model that adapts to users.
    """
    if history is None:
        return dict(scorers)
    adapting = {name: one for name, one in scorers.items() if isinstance(one, AdaptsToUsers)}
    if not adapting:
        raise RunError(
            f"history: none of {', '.join(scorers)} adapts to users; expected a folder of a fitted method, as "
            "`prb personalise` writes it"
        )
    return {**scorers, **{name: _knowing(one, history) for name, one in adapting.items()}}


def _knowing(scorer: AdaptsToUsers, history: Sequence[Comparison] | Path) -> Scorer:
    return scorer.with_states(history) if isinstance(history, Path) else scorer.with_history(history)


def model_contents(model: Model, revision: str | None) -> Any:
    """Return the digests of the files of a model that is not loaded yet, or the name of a baseline."""
    if not isinstance(model, str | Path) or _is_baseline(model):
        return model if isinstance(model, str) else None
    from prb_jax.checkpoints.locate import describe, locate

    if is_personalised(model):
        return file_digest(Path(model).expanduser() / PERSONALISED)
    return describe(locate(model, revision=revision))


def _is_baseline(model: Model) -> bool:
    return isinstance(model, str) and model.startswith("baseline:")


def read_history(history: Data | None) -> Sequence[Comparison] | Path | None:
    """Return the comparisons that a history names, or the folder of saved states that it is.

    Raises:
      DataError: it cannot be used.
      RunError: a folder of states beside other data.
    """
    if history is None:
        return None
    named = list(history) if isinstance(history, list | tuple) else [history]
    folders = [
        Path(each).expanduser() for each in named if isinstance(each, str | Path) and holds_states(each)
    ]
    if not folders:
        return read_inputs(history).comparisons
    if len(named) > 1:
        raise RunError(f"history: {folders[0]} holds states of people: give it alone")
    return folders[0]
