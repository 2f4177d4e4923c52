"""Errors for folders without usable weights, with a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prb_jax.errors import CheckpointError, listed
from prb_jax.models.checkpoints.weight_index import INDEX_FILE, SINGLE_FILE, WeightIndex
from prb_jax.models.head import HEAD_KEY, OUTPUT_EMBEDDING_KEY
from prb_jax.seams import BUILTIN

_PICKLE_SUFFIXES = (*BUILTIN["weights"], ".pkl", ".ckpt")


def no_weights(folder: Path) -> CheckpointError:
    """Return the error for a folder without weights."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if "adapter_model.safetensors" in names:
        return CheckpointError(
            f"{folder}: contains an adapter (adapter_model.safetensors) but no model: "
            "merge it into its base model first"
        )
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return CheckpointError(
            f"{folder}: expected {SINGLE_FILE}, found only pickle files ({', '.join(pickles[:3])}), "
            "which can run code when opened and are never loaded here. Convert them where you trust them: "
            "AutoModelForSequenceClassification.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"found {', '.join(others[:3])}" if others else "found no weight file"
    return CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, {found}")


# Substrings of the names of reward heads in other training frameworks.
_HEAD_NAMES = (
    "score", "v_head", "value_head", "regression", "rm_head", "reward", "classifier", "gating", "summary",
)  # fmt: skip


def missing_head(index: WeightIndex, extra: Sequence[str]) -> CheckpointError:
    """Return the error for weights without a score head; `extra` names the tensors that the model has no place for."""
    heads = [name for name in extra if any(part in name for part in _HEAD_NAMES)]
    side = sorted(path.name for path in index.folder.glob("*value_head*"))
    if heads:
        why = (
            f"The file holds a head of another kind, {_shown(heads)}: if you know which, name its row of the table of "
            "reward models with --readout"
        )
    elif side:
        why = f"The side file {_shown(side)} does not hold what it should, 'v_head.summary.weight'"
    elif OUTPUT_EMBEDDING_KEY in index.tensors:
        why = f"The tensors ('{OUTPUT_EMBEDDING_KEY}') are those of a causal language model, not of a reward model"
    else:
        why = (
            "Expected a checkpoint of a *ForSequenceClassification class: get the whole one, or train a head with "
            "`prb train ... init_head=true`"
        )
    return CheckpointError(
        f"{index.folder}: the score head '{HEAD_KEY}' is missing, so it would have to be random. {why}"
    )


def _shown(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names])
