"""Compare the options of several processes before a model is loaded; unequal options can deadlock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.platform.processes.agreement import check_agreement
from prb_jax.platform.processes.refusals import refuse_together
from prb_jax.platform.processes.sharing import process_count
from prb_jax.records.options import flat_settings, options_of
from prb_jax.scoring.inputs import Inputs
from prb_jax.scoring.kinds import model_contents
from prb_jax.scoring.open_scorer import Model
from prb_jax.scoring.options import EvaluateOptions
from prb_jax.scoring.remote import is_url
from prb_jax.version import computing_versions


def check_same_choices(
    verb: str,
    models: Mapping[str, tuple[Model, LoadOptions | None]],
    chosen: Mapping[str, Any],
    *,
    inputs: Inputs | None = None,
) -> None:
    """Compare the options of several processes before a model is loaded; unequal options can deadlock.

    Args:
      verb: Name of the command.
      models: Models to load with their options, by role.
      chosen: All other options, JSON-ready, with the contents of files.
      inputs: Inputs of the run, if any.

    Raises:
      RunError: A model is behind a server, which supports only one process, or a process differs from process 0; the
        message names the process and the fields. Raised in every process.
    """
    if process_count() == 1:
        return
    refuse_together(endpoint=next((model for model, _ in models.values() if is_url(model)), None))
    alike = [name for name, choice in options_of(LoadOptions).items() if choice.effect == "result"]
    asked = {what: (model, loading or LoadOptions()) for what, (model, loading) in models.items()}
    check_agreement(
        {
            "verb": verb,
            **chosen,
            "data": None if inputs is None else inputs.to_json(whole=False),
            "models": {
                what: {
                    "contents": model_contents(model, loading),
                    **{name: str(getattr(loading, name)) for name in alike},
                }
                for what, (model, loading) in asked.items()
            },
            "versions": computing_versions(plain=False),
        }
    )


def check_same_evaluation(model: Model, inputs: Inputs, options: EvaluateOptions) -> None:
    """Like :func:`check_same_choices`, for an evaluation."""
    chosen, known = flat_settings(options), options_of(EvaluateOptions)
    check_agreement(
        {
            "verb": "evaluate",
            **{key.rpartition(".")[2]: chosen[key] for key in known if known[key].effect == "result"},
            "data": inputs.to_json(whole=False),
            "model": model_contents(model, options.loading),
            "versions": computing_versions(plain=False),
        }
    )
