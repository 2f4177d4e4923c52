"""Load a fitted method with its backbone as a model of people."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prb_jax.errors import RunError, quote
from prb_jax.personal.few_shot.backbone import TRAINS, unstacked
from prb_jax.personal.fitted import read_fitted
from prb_jax.processes.agreement import differences
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.scoring.adapted import AdaptedRewards, check_trainable
from prb_jax.scoring.embedder import open_embedder
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.text.view import ViewOptions

SUPPORTED: Final = frozenset({"items", "posts", "posts.signs", "posts.items", TRAINS})
"""What a method may need that can be known of new comparisons."""


def load_personalised(folder: str | Path, options: LoadOptions | None = None) -> PersonalisedModel:
    """Load a fitted method with its backbone.

    Args:
      folder: of the method, as ``prb personalise`` writes it.
      options: ``mesh`` alone; the backbone is opened as it was when the method was fitted.

    Raises:
      RunError: another option, a damaged folder, a method that needs what new comparisons do not have, or a backbone
        that is another model now: the field is named.
      CheckpointError: the backbone cannot be loaded.
    """
    given = (options or LoadOptions()).given
    if unused := [name for name in given if name != "mesh"]:
        raise RunError(f"{', '.join(unused)}: decided where {folder} was fitted; leave out here")
    fitted = read_fitted(Path(folder).expanduser())
    if lacking := set(fitted.method.needs) - SUPPORTED:
        raise RunError(
            f"{folder}: the method {fitted.method.name} needs {min(lacking)}, which no new comparison has"
        )
    backbone = fitted.facts["backbone"]
    opened = dict(backbone["opened_with"])
    alone = bool(opened.pop("responses_alone", False))
    view = ViewOptions(protocol=opened.pop("protocol", None), max_length=opened.pop("max_length", None))
    loading = LoadOptions(**opened, mesh=given.get("mesh"))
    embedder = open_embedder(backbone["model"], loading, view=view, responses_alone=alone)
    changed = differences(backbone["identity"], embedder.identity())
    if changed:
        name, (before, now) = next(iter(changed.items()))
        raise RunError(
            f"{folder}: fitted on features of another model than {backbone['model']} is now: {name}: expected "
            f"{quote(before)}, found {quote(now)}"
        )
    if TRAINS in fitted.method.needs:
        own = fitted.fitted
        adapters = unstacked(own.arrays["adapters"])
        embedder = AdaptedRewards(check_trainable(embedder), adapters, own.settings.scale)
    return PersonalisedModel(fitted, embedder)
