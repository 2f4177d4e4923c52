"""Opening of a language model as policy, judge or feature extractor; reads headers of weight files but no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prb_jax.errors import CheckpointError, quote
from prb_jax.models.checkpoints.locate import ModelFolder
from prb_jax.models.checkpoints.weight_index import index_folder
from prb_jax.models.config.decoder import parse_config, read_raw_config
from prb_jax.models.config.family import is_encoder
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import OpenedModel, ResolvedModel, located, open_model
from prb_jax.models.readouts.row import ModelRow
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.seams import get

LANGUAGE_MODEL = ModelRow(name="language-model", models=(), head=LanguageHead())
"""Row of a ``*ForCausalLM``; not in the table because it has no reward."""


def open_language_model(model: str | Path | ModelFolder, options: LoadOptions) -> OpenedModel:
    """Open a ``*ForCausalLM``; reads headers of weight files but no weights.

    Args:
      model: Folder or hub id.
      options: Options of the user; ``readout`` is ignored.

    Raises:
      CheckpointError: The model is not a causal language model, or cannot be used.
    """
    folder = located(model, options)
    where, raw = str(folder.path / "config.json"), read_raw_config(folder.path)
    if is_encoder(raw):
        raise CheckpointError(
            f"{where}: expected a causal language model, found the encoder {raw['model_type']}"
        )
    config = parse_config(raw, where=where)
    expected, found = (
        get("tables", "families").value[config.model_type].language_model,
        config.architectures[:1],
    )
    if found != (expected,):
        raise CheckpointError(
            f"{where}: architectures: expected {quote(expected)}, found {quote(found[0] if found else None)}: a policy "
            "needs a causal head, which gives logits of the whole vocabulary"
        )
    stored = {name: tensor.shape for name, tensor in index_folder(folder.path).tensors.items()}
    facts = {
        "tie_word_embeddings": config.tie_word_embeddings,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    head = LanguageHead().bound(stored, facts, where=str(folder.path), what=LANGUAGE_MODEL.name)
    body = ResolvedModel(replace(config, head=head), LANGUAGE_MODEL)
    return OpenedModel(
        folder=folder, options=options, body=body, row=LANGUAGE_MODEL, labels="logit", labels_named=True
    )


def open_reward_or_language_model(
    model: str | Path | ModelFolder, options: LoadOptions
) -> tuple[OpenedModel, str]:
    """Open a reward model. If the model is only a ``*ForCausalLM``, open the language model instead and return the
    reason why it is not a reward model.

    Raises:
      CheckpointError: The model is neither, or cannot be used.
    """
    folder = located(model, options)
    raw = read_raw_config(folder.path)
    family = get("tables", "families").value.get(str(raw.get("model_type")))
    causal = family is not None and (raw.get("architectures") or [None])[0] == family.language_model
    try:
        return open_model(folder, options), ""
    except CheckpointError as error:
        if not causal or options.readout is not None:
            raise
        return open_language_model(folder, options), str(error)
