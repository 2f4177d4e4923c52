"""Scores of K separate forwards by transformers: what a tree's scores must equal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def transformers_scores(
    folder: Path, sequences: Sequence[Sequence[int]], *, dtype: str = "float32", attention: str = "eager"
) -> np.ndarray:
    """Logits [len(sequences), num_labels] of each sequence alone, unpadded, read at its last token.

    Computed in ``dtype`` throughout and returned in float64. "eager" is transformers' plain attention.
    """
    torch = pytest.importorskip("torch", reason="transformers runs no model without torch")
    model, rows = _model(folder, dtype=dtype, attention=attention), []
    with torch.inference_mode():
        for sequence in sequences:
            rows.append(_logits(model, sequence).double().numpy())
    return np.stack(rows)


def transformers_gradients(
    folder: Path, sequences: Sequence[Sequence[int]], factors: Sequence[float]
) -> dict[str, np.ndarray]:
    """Gradients of the sum of the sequences' first logits times ``factors``, by all parameters, in float32."""
    model = _model(folder, dtype="float32", attention="eager")
    total = sum(_logits(model, sequence)[0] * float(factor) for sequence, factor in zip(sequences, factors))
    total.backward()
    gradients = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    return dict(
        pair
        for name, gradient in gradients.items()
        for pair in as_saved(name, gradient, model.config.model_type)
    )


def as_saved(name: str, value: np.ndarray, family: str) -> list[tuple[str, np.ndarray]]:
    """A parameter as transformers saves it: those of all experts of a layer as one for each."""
    if family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    layer, _, matrix = name.rpartition(".experts.")
    if not layer or family not in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next"):
        return [(name, value)]
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = []
    for number, one in enumerate(value):
        parts = np.split(one, 2) if matrix == "gate_up_proj" else [one]
        for key, part in zip(names[:2] if matrix == "gate_up_proj" else names[2:], parts, strict=True):
            found.append((f"{layer}.experts.{number}.{key}.weight", part))
    return found


def _model(folder: Path, *, dtype: str, attention: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    model.config.pad_token_id = None  # the last token is read, whatever its id
    return model


def _logits(model: Any, sequence: Sequence[int]) -> Any:
    import torch

    ids = torch.tensor([list(sequence)])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
