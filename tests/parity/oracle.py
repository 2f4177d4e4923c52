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
    return {name: weight.grad.numpy() for name, weight in model.named_parameters()}


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
