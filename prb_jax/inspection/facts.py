"""What the reports on decoders and on encoders both say of a checkpoint."""

from __future__ import annotations

from prb_jax.checkpoints.load import LoadReport
from prb_jax.checkpoints.locate import ModelFolder
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.text.view import TRAINED_VIEW, choose_view, read_trained_view


def model_facts(
    folder: ModelFolder, config: DecoderConfig | EncoderConfig, weights: LoadReport
) -> dict[str, str]:
    """What it is."""
    return {
        "model": folder.name + (f" at {folder.revision}" if folder.revision else ""),
        "architecture": ", ".join(config.architectures) or config.model_type,
        "parameters": f"{weights.parameters:,}",
    }


def view_fact(folder: ModelFolder) -> dict[str, str]:
    """What a model is shown of a comparison where nothing else is asked for."""
    trained = read_trained_view(folder.path)
    view = choose_view(trained).view
    if trained is None:
        return {"scored with": f"{view} (general defaults: there is no {TRAINED_VIEW} of a training run)"}
    return {
        "scored with": f"{view} (as it was trained: method {trained.method}, posts {trained.profile_order})"
    }


def files_fact(weights: LoadReport) -> dict[str, str]:
    """Its files, and the tensors that are used."""
    dtypes = [f"{count} {dtype}" for dtype, count in sorted(weights.dtypes.items())]
    return {"weights": f"{len(weights.files)} files; tensors used: {', '.join(dtypes)}"}


def ignored_facts(config: DecoderConfig | EncoderConfig, weights: LoadReport) -> dict[str, str]:
    """What is there and left aside."""
    ignored = [f"{key}: {reason}" for key, reason in weights.ignored_keys.items()]
    return {
        "tensors ignored": "\n".join(ignored) or "none",
        "config ignored": ", ".join(config.ignored_keys) or "none",
    }
