"""Tensors of a text model that a file stores beside a vision tower."""

from __future__ import annotations

from dataclasses import replace

from prb_jax.models.checkpoints.weight_index import WeightIndex


def text_tensors(found: WeightIndex) -> WeightIndex:
    """Return the index with the plain names of the text model's tensors."""
    text = {_text_name(name): tensor for name, tensor in found.tensors.items()}
    updates = {_text_name(name): update for name, update in found.updates.items()}
    named = {name: replace(tensor, name=name) for name, tensor in text.items()}
    return replace(found, tensors=named, updates=updates)


def _text_name(name: str) -> str:
    """Return the plain name of a tensor in a text model with a vision tower; transformers 4 and 5 have two
    prefixes."""
    for prefix, plain in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
