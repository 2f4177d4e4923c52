"""The decoder as a language model: logits of the whole vocabulary, and the keys and values that later tokens need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.checkpoints.load import load_params
from prb_jax.checkpoints.weight_index import index_folder
from prb_jax.models.config.decoder import DecoderConfig, parse_config, read_raw_config
from prb_jax.models.decoder import decode_tree, decode_tree_keeping
from prb_jax.models.head import LanguageHead
from prb_jax.readouts.score_tree import score_tree
from prb_jax.trees.batches import Bucket, make_batch
from prb_jax.trees.tree import build_tree
from tests.tiny_models import TINY_FAMILIES

TOLERANCE = 1e-5
SEQUENCE = [5, 9, 3, 17, 44, 8, 23, 61, 7, 12]
TREE = build_tree([SEQUENCE, [*SEQUENCE[:6], 30, 31]])


def language_model(family: str, folder: Path, *, tied: bool) -> tuple[Any, DecoderConfig]:
    """transformers' model, and our configuration of what it wrote."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tiny = TINY_FAMILIES[family]
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    arguments = {**sizes, **tiny.arguments, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    config = getattr(transformers, tiny.config_class)(**arguments, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    raw = read_raw_config(folder)
    stored = {name: tensor.shape for name, tensor in index_folder(folder).tensors.items()}
    head = LanguageHead().bound(stored, raw, where="test", what="language model")
    assert head.tied is tied
    return model, replace(parse_config(raw, where="test"), head=head)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("gemma2", True)])
def test_logits_keys_and_values_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    import torch

    model, config = language_model(family, tmp_path, tied=tied)
    params = load_params(tmp_path, config).params
    assert ("lm_head" in params) is not tied
    assert "score" not in params
    batch = make_batch([TREE], Bucket(8, 2, 6), batch=1)
    logits = score_tree(params, batch, config=config, dtype=jnp.dtype("float32"))
    decoded = decode_tree_keeping(params, batch, config=config, dtype=jnp.dtype("float32"))
    assert logits.shape == (1, 2, config.vocab_size)
    padding, prefix = 8 - len(TREE.prefix), len(TREE.prefix)
    for response in range(2):
        ids = TREE.sequence(response).tolist()
        with torch.no_grad():
            theirs = model(torch.tensor([ids]), use_cache=True)
        np.testing.assert_allclose(logits[0, response], theirs.logits[0, -1], atol=TOLERANCE)
        own = 8 + 6 * response + np.arange(len(ids) - prefix)
        places = np.concatenate([padding + np.arange(prefix), own])
        for layer, cached in enumerate(theirs.past_key_values.layers):
            if config.layer_windows[layer]:
                continue  # transformers keeps only a window of them
            for ours, expected in ((decoded.keys, cached.keys), (decoded.values, cached.values)):
                np.testing.assert_allclose(
                    np.asarray(ours)[layer, 0, places], expected[0].transpose(0, 1), atol=TOLERANCE
                )
    states = decode_tree(params, batch, config=config, dtype=jnp.dtype("float32"))
    np.testing.assert_array_equal(states, decoded.states)
