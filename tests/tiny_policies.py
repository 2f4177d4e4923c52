"""Tiny random causal language models, written by transformers itself, with a tokenizer beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import TINY_FAMILIES, randomise, tiny_config
from tests.tiny_tokenizer import write_tokenizer

VOCABULARY = 400


def write_policy(
    folder: Path, family: str, *, eos: int | None = None, seed: int = 0, **overrides: Any
) -> Any:
    """Write a random ``*ForCausalLM`` of one of ``FAMILIES``; returns transformers' model."""
    pytest.importorskip("torch", reason="transformers writes no model without torch")
    import transformers

    tiny = TINY_FAMILIES[family]
    config = tiny_config(tiny, vocab_size=VOCABULARY, **overrides)
    config.eos_token_id = eos
    name = tiny.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    randomise(model, seed=seed)  # logits of variance one: no token is certain
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
