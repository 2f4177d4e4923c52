"""Scorers other than reward models, by the form of their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.locate import describe, locate
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.personal import PERSONALISED, fitted_methods, is_personalised
from prb_jax.records.files import file_digest
from prb_jax.records.options import refuse_given
from prb_jax.scoring import READS_TEXTS
from prb_jax.scoring.open_scorer import Model
from prb_jax.scoring.remote import is_class_server, is_url
from prb_jax.scoring.scorer import Scorer
from prb_jax.seams import get, is_python_value


@dataclass(frozen=True)
class Kind:
    """A kind of scorer other than a reward model, selected by the form of its name."""

    named: Callable[[Any], bool]  # returns True for a name of this kind
    opener: str  # entry of "scorers" in `prb_jax.seams`; makes a scorer from the name and options
    decided: str = READS_TEXTS  # reason why other options have no effect
    takes: tuple[str, ...] = ()  # options that have an effect
    contents: Callable[[str], Any] = str  # JSON-ready fingerprint of the source of scores, without loading it


def _begins_with(start: str) -> Callable[[Any], bool]:
    return lambda model: isinstance(model, str) and model.startswith(start)


_SERVED: Final = "decided by the server {}"


_OF_TOKENIZER: Final = ("tokenizer", "revision", "chat_template")


_WITHOUT_WEIGHTS: Final = (
    Kind(_begins_with("baseline:"), "baseline"),
    Kind(_begins_with("plugin:"), "plug-in"),
    Kind(
        is_python_value,
        "file",
        contents=lambda name: file_digest(Path(name.rpartition(":")[0])),
    ),
)


_KINDS: Final = (
    *_WITHOUT_WEIGHTS,
    Kind(is_class_server, "class server", _SERVED, _OF_TOKENIZER),
    Kind(is_url, "server", _SERVED),
    Kind(
        is_personalised,
        "fitted method",
        "decided where {} was fitted",
        takes=("mesh",),
        contents=lambda name: file_digest(Path(name).expanduser() / PERSONALISED),
    ),
)
"""The first kind that matches a name opens it, and imports its dependencies only then."""


def kind_of(model: str | Path) -> Kind | None:
    """Return the kind of a name; None for a reward model.

    Raises:
      RunError: The name is a study of several methods.
    """
    kind = next((kind for kind in _KINDS if kind.named(model)), None)
    if kind is None and (methods := fitted_methods(model)):
        raise RunError(
            f"{model}: is a study of several methods: name one of them: {', '.join(map(str, methods))}"
        )
    return kind


def model_contents(model: Model, loading: LoadOptions) -> Any:
    """Return a JSON-ready description of a named model's contents, without loading it; None for an object."""
    if not isinstance(model, str | Path):
        return None
    kind = kind_of(model)
    if kind is not None:
        return kind.contents(str(model))
    described = describe(locate(model, revision=loading.revision, base=loading.base))
    if loading.reference is None:
        return described
    return described | {"reference": describe(locate(loading.reference))}


def has_no_weights(model: str | Path) -> bool:
    """Return True for the name of a baseline or a function (FILE.py:NAME, plugin:NAME)."""
    return any(kind.named(model) for kind in _WITHOUT_WEIGHTS)


def check_name(model: str | Path) -> None:
    """Raise an error for a name of no model, without loading anything."""
    if kind_of(model) is None:
        locate(model)


def open_other(model: str | Path, options: LoadOptions) -> Scorer | None:
    """Return the scorer of a name with options that have an effect on its kind; None for a reward model."""
    if (kind := kind_of(model)) is None:
        return None
    given = options.given
    taken = {option: given.pop(option) for option in kind.takes if option in given}
    refuse_given(given, kind.decided.format(model))
    return get("scorers", kind.opener).value(str(model), **taken)
