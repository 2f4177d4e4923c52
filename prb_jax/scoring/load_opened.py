"""From an opened reward model to one that scores: its weights on the devices, its programs not yet compiled."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from prb_jax.checkpoints.encoder_map import EncoderFolder, load_encoder_params
from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.models.attention.choice import choose_attention, stream_attention_name
from prb_jax.models.quantization import quantization_form
from prb_jax.personal.prompts import extend_embedding, load_prompts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import OpenedModel, open_model
from prb_jax.readouts.score_fn import make_score_fn, make_stream_fn
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import check_heads, parameter_shardings
from prb_jax.text.view import read_trained_view


def load_opened(opened: OpenedModel) -> RewardModel:
    """Read the weights of an opened model; errors as of :func:`load`."""
    tokenizer, mesh, dtype = opened.tokenizer(), opened.mesh, jnp.dtype(opened.dtype)
    config, path = opened.config, opened.folder.path
    quantize, attention, prompts = opened.options.quantize, opened.options.attention, None
    stream_fn = None
    if isinstance(opened.body, EncoderFolder):
        score_fn = make_score_fn(config, mesh=mesh, dtype=dtype, readout=opened.labels)
        loaded = load_encoder_params(opened.body, mesh=mesh, dtype=dtype, head_dtype=jnp.float32)
        params, shown_attention = loaded.params, "whole, both ways"
    else:
        config = opened.body.config
        check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
        if quantize is not None:
            quantization_form(quantize, mesh=mesh)
        shardings = parameter_shardings(abstract_params(config, quantize=quantize), mesh)
        score_fn = make_score_fn(
            config, mesh=mesh, dtype=dtype, readout=opened.labels, shardings=shardings, attention=attention
        )
        streams = stream_attention_name(mesh, attention)
        if streams is not None:
            stream_fn = make_stream_fn(
                config,
                mesh=mesh,
                dtype=dtype,
                readout=opened.labels,
                shardings=shardings,
                attention=attention,
            )
        saved = load_prompts(path, width=config.hidden_size)
        loaded = load_params(
            path, config, dtype=dtype, head_dtype=jnp.float32, shardings=shardings, quantize=quantize
        )
        params = loaded.params
        shown_attention = streams or choose_attention(mesh, dtype, attention, scored=config).name
        if saved is not None:
            embedding = extend_embedding(params["embed"], saved.table, sharding=shardings["embed"])
            params = {**params, "embed": embedding}
            prompts = saved.prompts(first_id=config.vocab_size)
    return RewardModel(
        reader=Reader(
            name=opened.name,
            config=config,
            tokenizer=tokenizer,
            labels_named=opened.labels_named,
            prompts=prompts,
            trained=read_trained_view(path),
        ),
        params=params,
        score_fn=score_fn,
        stream_fn=stream_fn,
        mesh=mesh,
        dtype=opened.dtype,
        readout=opened.readout,
        quantize=quantize,
        attention=shown_attention,
        report=loaded.report,
        source=opened.source,
    )


def open_reader(model: str | Path, options: LoadOptions) -> Reader:
    """Return how comparisons are read for a model, without its weights; errors as of :func:`load`."""
    opened = open_model(model, options)
    prompts = None
    if not isinstance(opened.body, EncoderFolder):
        saved = load_prompts(opened.folder.path, width=opened.body.config.hidden_size)
        prompts = None if saved is None else saved.prompts(first_id=opened.config.vocab_size)
    return Reader(
        name=opened.name,
        config=opened.config,
        tokenizer=opened.tokenizer(),
        labels_named=opened.labels_named,
        prompts=prompts,
        trained=read_trained_view(opened.folder.path),
    )
