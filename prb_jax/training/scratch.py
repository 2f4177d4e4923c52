"""A model trained from scratch: a new tokenizer, and random weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from prb_jax.models.checkpoints.locate import describe, locate
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.config.family import known_families
from prb_jax.models.decoder import Params
from prb_jax.models.model import init_params
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.text.new_tokenizer import train_tokenizer, training_texts
from prb_jax.text.open_tokenizer import load_tokenizer
from prb_jax.training.config import SCRATCH, TrainSettings
from prb_jax.training.start import Start, shardings_of, weights_dtype
from prb_jax.trees.tree import round_up

_TEXTS_OF = 10_000
"""Number of evenly spaced comparisons that a new tokenizer is trained on if the data exceeds memory."""


def from_scratch(settings: TrainSettings, train: Items[Comparison], *, out: Path) -> Start:
    """Return a new model as the start of a run; for arguments see :func:`prb_jax.training.start.start_from`."""
    sizes = asdict(settings.scratch)
    kind, theta, vocab_size, folder = map(sizes.pop, ("model_type", "rope_theta", "vocab_size", "tokenizer"))
    folder = locate(folder).path if folder else out / "tokenizer"

    def make_tokenizer() -> None:
        if not (settings.scratch.tokenizer or (folder / "tokenizer_config.json").exists()):
            texts = training_texts(train.sample(_TEXTS_OF), profiles=settings.view.profile_posts > 0)
            train_tokenizer(texts, folder, vocab_size=vocab_size)

    on_first_process(make_tokenizer)
    tokenizer = load_tokenizer(folder, chat_template=settings.chat_template)
    raw: dict[str, Any] = {
        "architectures": [known_families()[kind].architecture],
        "model_type": kind,
        "vocab_size": round_up(tokenizer.vocab_size, 64),
        **sizes,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "pad_token_id": tokenizer.pad_token_id,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "torch_dtype": settings.dtype,
    }
    config = parse_config(raw, where="config section 'scratch'")

    def load(mesh: Mesh) -> Params:
        dtype = weights_dtype(settings)

        def make() -> Params:
            params = init_params(config, seed=settings.seed)
            return {
                name: leaf if name == "score" else jax.tree.map(lambda x: x.astype(dtype), leaf)
                for name, leaf in params.items()
            }

        return jax.jit(make, out_shardings=shardings_of(config, mesh))()

    return Start(
        name=SCRATCH,
        config=config,
        raw_config=raw,
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        identity={"template": tokenizer.template_hash, "tokenizer": describe(locate(folder))["files"]},
        load=load,
    )
