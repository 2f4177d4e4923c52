"""Scores of K separate forwards by transformers: what a tree's scores must equal."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest


def transformers_scores(
    folder: Path, sequences: Sequence[Sequence[int]], *, dtype: str = "float32", attention: str = "eager"
) -> np.ndarray:
    """Logits [len(sequences), num_labels] of each sequence alone, unpadded, read at its last token.

    Computed in ``dtype`` throughout and returned in float64. "eager" is transformers' plain attention.
    """
    torch = pytest.importorskip("torch", reason="transformers runs no model without torch")
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).eval()
    model.config.pad_token_id = None  # the last token is read, whatever its id
    rows = []
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.tensor([list(sequence)])
            rows.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double().numpy())
    return np.stack(rows)
