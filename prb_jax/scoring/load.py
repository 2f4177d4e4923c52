"""Load a reward model: open it, put its weights onto the devices, compile its scorer when it is first used."""

from __future__ import annotations

from pathlib import Path
from typing import overload

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.encoder_map import EncoderFolder, load_encoder_params
from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.models.attention.choice import PAGED_ATTENTION, choose_attention, stream_attention_name
from prb_jax.models.quantization import quantization_form
from prb_jax.personal.prompts import extend_embedding, load_prompts
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import OpenedModel, open_model
from prb_jax.readouts.score_fn import make_score_fn, make_stream_fn
from prb_jax.scoring.plain import BaselineName, PlainScorer, baseline_scorer
from prb_jax.scoring.reader import Reader
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import check_heads, parameter_shardings
from prb_jax.text.view import read_trained_view


@overload
def load(model: BaselineName) -> PlainScorer: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = ...,
    dtype: str | None = ...,
    revision: str | None = ...,
    chat_template: str | None = ...,
    readout: str | None = ...,
    tokenizer: str | Path | None = ...,
    quantize: str | None = ...,
    attention: str = ...,
) -> RewardModel: ...
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> RewardModel | PlainScorer:
    """Load a reward model from a Hugging Face folder or hub id.

    Args:
      model: folder with ``config.json``, safetensors and tokenizer files; or a hub id. The name of a baseline,
        as "baseline:length", gives a :class:`prb_jax.scoring.plain.PlainScorer`, which takes no options.
      mesh: sizes of the mesh axes, as in "fsdp=4,tensor=2" (-1: all devices that are left), or a mesh
        of :func:`prb_jax.sharding.make_mesh`; parameters split over all devices if not given.
      dtype: "float32" or "bfloat16", of weights and activations; that of the checkpoint if not given
        (bfloat16 for float16 ones).
      revision: branch, tag or commit of a hub id.
      chat_template: "plain", a Jinja file, or its text, instead of the tokenizer's own template.
      readout: a row of :data:`prb_jax.readouts.registry.REGISTRY`, if the files do not say which one, or
        ``vocabulary:ID`` for a logit of a language model; ``ROW:min`` (``product``, ``mean``, ``last``), how the
        steps of a process model become one reward; or which logit is the reward, for heads with several
        labels: see :func:`prb_jax.readouts.labels.choose_readout`; not named, such a head is scored by the paper
        protocol alone, which has a rule.
      tokenizer: folder or hub id of the tokenizer, if it is not with the model.
      quantize: "int8", "int8-weights" or "fp8": the layers' matrices in eight bits, as
        :mod:`prb_jax.models.quantization` describes them.
      attention: "auto", the machine's own choice; "blockwise", the XLA program; or "kernel", our own kernel for
        GPUs (on TPUs the splash kernel): see :func:`prb_jax.models.attention.choice.choose_attention`.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
      MeshError: the mesh does not fit the devices or the model.
    """
    options = LoadOptions(
        mesh=mesh,
        dtype=dtype,
        revision=revision,
        chat_template=chat_template,
        readout=readout,
        tokenizer=tokenizer,
        quantize=quantize,
        attention=attention,
    )
    if str(model).startswith("baseline:"):
        return baseline_scorer(str(model), **options.given)
    return load_opened(open_model(model, options))


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
        shown_attention = stream_attention_name(config, mesh=mesh, dtype=dtype, wanted=attention)
        if shown_attention is not None:
            stream_fn = make_stream_fn(
                config,
                mesh=mesh,
                dtype=dtype,
                readout=opened.labels,
                shardings=shardings,
                paged=shown_attention == PAGED_ATTENTION,
            )
        saved = load_prompts(path, width=config.hidden_size)
        loaded = load_params(
            path, config, dtype=dtype, head_dtype=jnp.float32, shardings=shardings, quantize=quantize
        )
        params = loaded.params
        if shown_attention is None:
            shown_attention = choose_attention(mesh, dtype, attention, scored=config).name
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
