"""Load a policy: open it, put its weights onto the devices, compile its programs when they are first used."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.generation.policy import Policy, read_stop_ids
from prb_jax.generation.programs import FILLER
from prb_jax.generation.steps import Program
from prb_jax.models.attention.choice import wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.quantization import quantization_form
from prb_jax.readouts.language_model import open_language_model
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import OpenedModel
from prb_jax.sharding import check_heads, parameter_shardings


def load_policy(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> Policy:
    """Load a causal language model from a Hugging Face folder or hub id, to sample texts from it.

    Args:
      model: folder with ``config.json`` of a ``*ForCausalLM``, safetensors and tokenizer files; or a hub id.
      mesh, dtype, revision, chat_template, tokenizer, quantize, attention: as of :func:`prb_jax.load`.

    Raises:
      CheckpointError: it is no causal language model, or cannot be used as it is; the message names file, tensor or
        field.
      MeshError: the mesh does not fit the devices or the model.
    """
    options = LoadOptions(
        mesh=mesh,
        dtype=dtype,
        revision=revision,
        chat_template=chat_template,
        tokenizer=tokenizer,
        quantize=quantize,
        attention=attention,
    )
    return load_opened_policy(open_language_model(model, options))


def load_opened_policy(opened: OpenedModel) -> Policy:
    """Read the weights of an opened language model; errors as of :func:`load_policy`."""
    chat, mesh, dtype = opened.chat(), opened.mesh, jnp.dtype(opened.dtype)
    config, quantize = opened.decoder.config, opened.options.quantize
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    if quantize is not None:
        quantization_form(quantize, mesh=mesh)
    stop_ids = read_stop_ids(opened.folder.path, chat, raw=config.original)
    shardings = parameter_shardings(abstract_params(config, quantize=quantize), mesh)
    program = make_program(config, mesh=mesh, dtype=dtype, attention=opened.options.attention)
    loaded = load_params(opened.folder.path, config, dtype=dtype, shardings=shardings, quantize=quantize)
    return Policy(
        name=opened.name,
        program=program,
        params=loaded.params,
        tokenizer=chat,
        stop_ids=stop_ids,
        mesh=mesh,
        dtype=opened.dtype,
        quantize=quantize,
        report=loaded.report,
        source=opened.source,
    )


def make_program(
    config: DecoderConfig, *, mesh: Mesh, dtype: jnp.dtype, attention: str = "auto", lora_scale: float = 1.0
) -> Program:
    """Return what the programs of a policy have in common.

    Args:
      config: architecture, with a head of the whole vocabulary.
      mesh: devices.
      dtype: of activations and caches.
      attention: that reads prompts, one of :data:`prb_jax.models.ATTENTIONS`.
      lora_scale: of adapters among the parameters.

    Raises:
      CheckpointError, MeshError: these devices or this dtype have no such attention.
    """
    platform = mesh.devices.flat[0].platform
    return Program(
        config=config,
        dtype=dtype,
        mesh=mesh,
        attention=wanted_attention(mesh, dtype, attention),
        lora_scale=lora_scale,
        filler=max(FILLER.get(platform, 1), mesh.shape["sequence"]),
        copies_layers=platform == "cpu",
    )
