"""Model that a run starts from, a checkpoint or a new model: tokenizer, head and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, RunError
from prb_jax.models.checkpoints.load import abstract_params, inspect_checkpoint, load_params
from prb_jax.models.checkpoints.locate import describe
from prb_jax.models.config.decoder import STANDARD, DecoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.head import LINEAR
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model
from prb_jax.personal import SOFT_PROMPTS
from prb_jax.personal.method import NULL, OfUser, TrainedMethod
from prb_jax.platform.sharding import check_heads
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.seams import get
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.training.config import SCRATCH, TrainSettings
from prb_jax.training.weights import TrainedModel, trained_decoder


@dataclass(frozen=True)
class Start:
    """Model that a run starts from."""

    name: str  # display name of the model
    config: DecoderConfig  # architecture
    raw_config: Mapping[str, Any]  # contents of the trained model's `config.json`
    tokenizer: ChatTokenizer  # tokenizer with its chat template
    tokenizer_folder: Path  # folder of the tokenizer's files
    identity: Mapping[str, Any]  # all of the above that affects the result, JSON-ready
    # reads or initialises the weights on a mesh; a score head and all trained weights are float32
    load: Callable[[Mesh], Params]

    @property
    def abstract(self) -> Params:
        """Shapes and types of the weights."""
        return abstract_params(self.config)

    def in_training(self, settings: TrainSettings, mesh: Mesh) -> TrainedModel:
        """Return the model for training; CheckpointError or MeshError if these settings cannot train it."""
        return trained_decoder(settings, self.config, mesh=mesh)

    def finished_module(self, out: Path) -> Any:
        """Return the user's module with the parameters of a finished run; None if the run trains a named model."""
        return None


def start_from(settings: TrainSettings, train: Items[Comparison], *, out: Path) -> Start:
    """Return the starting point named in the settings, without loading weights.

    Args:
      settings: Settings of the run.
      train: Training data, for training a tokenizer if a new model has none.
      out: Run folder; a new tokenizer is stored there.

    Raises:
      CheckpointError: The checkpoint or tokenizer cannot be used; the checkpoint has no score head, or one with
        several outputs, and `init_head` is not set; or it contains soft prompts of users.
    """
    if settings.model == SCRATCH:
        return get("training", "scratch").value(settings, train, out=out)
    if settings.model is None:
        raise RunError(
            f"{out}: trains a flax.nnx.Module, not a Hugging Face model: expected a run of a named model; the "
            "module is the `module` of the result of `prb_jax.train`"
        )
    options = LoadOptions(
        revision=settings.revision,
        base=settings.base,
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
    )
    opened = open_model(settings.model, options, new_head=settings.init_head)
    model, folder = opened.decoder, opened.folder.path
    table, names = SOFT_PROMPTS
    if (folder / table).exists():
        raise CheckpointError(
            f"{folder}: holds soft prompts of users ({table}), which a new run would lose: start from a model without "
            f"them; to continue from the weights only, start from a copy of the folder without {table} and {names}"
        )
    is_standard = model.config.head == LINEAR and model.config.layout == STANDARD
    if not is_standard:
        get("training", "check convertible").value(model, where=opened.name)
    if model.config.num_labels != 1:
        raise CheckpointError(
            f"{folder}: the score head has {model.config.num_labels} outputs, expected one for a Bradley-Terry loss; "
            "init_head=true trains a new one from random weights"
        )
    inspect_checkpoint(folder, model.config, head=not model.new_head)
    tokenizer = opened.chat()
    if tokenizer.ends_with is not None:
        tokenizer = get("training", "standard tokenizer").value(opened)
    if settings.tokenizer:
        get("training", "check tokenizer").value(tokenizer, folder)
    raw = with_pad_token(model.config.original, tokenizer)

    def load(mesh: Mesh) -> Params:
        shardings = shardings_of(model.config, mesh)
        head = {} if model.new_head else {"score": shardings["score"]}
        read = {name: value for name, value in shardings.items() if name != "score"} | head
        params = load_params(
            folder,
            model.config,
            dtype=weights_dtype(settings),
            head_dtype=jnp.float32,
            shardings=read,
            head=not model.new_head,
        ).params
        if model.new_head:
            # Small, as in open-instruct: rewards of a new head start near 0.
            deviation = (model.config.hidden_size + 1) ** -0.5
            shape = (model.config.hidden_size, 1)
            make = jax.jit(
                lambda: deviation * jax.random.normal(jax.random.key(settings.seed), shape, jnp.float32),
                out_shardings=shardings["score"],
            )
            params["score"] = make()
        if is_standard:
            return params
        return get("training", "as standard").value(model, params, drop_bias=False, where=opened.name).params

    return Start(
        name=opened.name,
        config=replace(
            model.config,
            pad_token_id=raw.get("pad_token_id", model.config.pad_token_id),
            head=LINEAR,
            layout=STANDARD,
        ),
        raw_config=raw,
        tokenizer=tokenizer,
        tokenizer_folder=opened.tokenizer_folder.path,
        identity={
            **describe(opened.folder),
            "new_head": model.new_head,
            "template": tokenizer.template_hash,
            "tokenizer": describe(opened.tokenizer_folder) if settings.tokenizer else None,
        },
        load=load,
    )


def shardings_of(config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """Return the shardings of the parameters; MeshError if the mesh does not fit the model."""
    check_heads(mesh, heads=config.head_counts)
    return parameter_shardings(abstract_params(config), mesh, config=config)


def weights_dtype(settings: TrainSettings) -> Any:
    """Return the dtype of the backbone: float32 if all weights are trained."""
    return jnp.dtype("float32" if settings.tuning == "full" else settings.dtype)


def with_pad_token(raw_config: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the configuration with a padding token, which transformers requires for batches of several.

    The token must never occur in a text, because transformers reads the score at the last token that is
    not padding.
    """
    raw, pad = dict(raw_config), tokenizer.pad_token_id
    if raw.get("pad_token_id") is None and pad is not None and pad != tokenizer.eos_token_id:
        raw["pad_token_id"] = pad
    return raw


def method_of_run(
    settings: TrainSettings,
    comparisons: Sequence[OfUser],
    *,
    out: Path,
    width: int,
    lengths: Sequence[int],
    mesh: Mesh,
) -> TrainedMethod:
    """Return the method of personalisation for a run with a model of this width.

    Its users come from the training data and are stored in the run folder `out`. Without data, they are read from that
    folder.

    Raises:
      DataError: No comparison has a user.
      RunError: The folder cannot be written, or contains no list of users.
    """
    if settings.method != "persona_embedding":
        return NULL
    given = {"out": out, "width": width, "lengths": lengths, "mesh": mesh}
    return get("training", "soft prompts").value(settings, comparisons, **given)
