"""The backbone of a study: features from a folder or a model, and the model itself for methods that train it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.locate import locate
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.family import is_encoder
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.features import FEATURES, KIND, FeatureStore, open_features
from prb_jax.personal.few_shot.choices import Backbone
from prb_jax.personal.few_shot.protocol import Method
from prb_jax.records.comparison import Comparison
from prb_jax.records.reading import read_object
from prb_jax.runs.kind import RUN, as_recorded
from prb_jax.scoring.inputs import Inputs
from prb_jax.study.population import Population
from prb_jax.study.write_features import write_features


def check_backbone(backbone: str | Path, methods: Sequence[Method], options: FeatureOptions | None) -> None:
    """Reject methods that train a backbone that cannot be trained, before any computation.

    Raises:
      RunError: features or an encoder are given; names the method.
    """
    training = [method.name for method in methods if method.trains_backbone]
    if not training:
        return
    if _holds_features(backbone):
        named = f"the folder of features {backbone}"
    else:
        loading = LoadOptions() if options is None else options.loading
        folder = locate(backbone, revision=loading.revision, base=loading.base)
        if not is_encoder(read_raw_config(folder.path)):
            return
        named = f"the encoder {folder.name}"
    raise RunError(
        f"{', '.join(training)}: trains the backbone: expected a decoder as --backbone MODEL, found {named}"
    )


def _holds_features(backbone: str | Path) -> bool:
    """Return whether a folder contains finished features; unfinished features raise an error."""
    folder = Path(backbone)
    if (folder / FEATURES).is_file():
        return True
    if (folder / RUN).is_file() and read_object(folder / RUN, error=RunError).get("kind") == KIND:
        open_features(backbone)
    return False


def features_of(
    backbone: str | Path,
    inputs: Inputs,
    folder: Path,
    options: FeatureOptions | None,
    *,
    limit: int | None,
    progress: bool,
) -> FeatureStore:
    """Return the features of a study, from a folder, or from a model, which writes them to ``folder/features``.

    Raises:
      RunError: the features belong to other data, or options have no effect on them.
    """
    if _holds_features(backbone):
        if options is not None and options != FeatureOptions():
            raise RunError(
                f"{backbone}: already contains features, so options of the model have no effect; remove them"
            )
        store = open_features(backbone)
        store.check_inputs(as_recorded({"data": inputs.to_json()}))
        return store
    return write_features(
        backbone, inputs, out=folder / "features", options=options, limit=limit, progress=progress
    )


def trainable(
    model: str | Path, population: Population, options: FeatureOptions | None, *, mesh: Mesh
) -> Backbone | None:
    """Return the model of the features with the responses of the people; None if only features are given."""
    if _holds_features(model):
        return None
    from prb_jax.study.adapters import TrainableBackbone  # imports the optimiser

    chosen = options or FeatureOptions()
    answers = [
        Comparison(id=f"answer {row}", prompt=prompt, responses=[text])
        for row, (prompt, text) in enumerate(zip(population.prompts, population.texts, strict=True))
    ]
    return TrainableBackbone(str(model), replace(chosen.loading, mesh=mesh), chosen.view, answers, mesh)
