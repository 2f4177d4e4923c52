"""Tiny random causal language models, written by transformers itself, with a tokenizer beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import TINY_FAMILIES, tiny_config
from tests.tiny_tokenizer import write_tokenizer

VOCABULARY = 400


def write_policy(
    folder: Path, family: str, *, eos: int | None = None, seed: int = 0, **overrides: Any
) -> Any:
    """Write a random ``*ForCausalLM`` of one of ``FAMILIES``; returns transformers' model."""
    torch = pytest.importorskip("torch", reason="transformers writes no model without torch")
    import transformers

    tiny = TINY_FAMILIES[family]
    config = tiny_config(tiny, vocab_size=VOCABULARY, **overrides)
    config.eos_token_id = eos
    name = tiny.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    gemma = "Gemma" in tiny.config_class
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                weight.copy_(0.3 * noise + (0.0 if gemma else 1.0))
            elif key.endswith(".bias"):
                weight.copy_(0.3 * noise)
            else:  # logits of variance one: no token is certain
                weight.copy_(noise / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
