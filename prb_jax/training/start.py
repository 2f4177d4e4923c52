"""Model that a run starts from, a checkpoint or a new model: tokenizer, head and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, RunError, quote
from prb_jax.models.checkpoints.load import abstract_params, inspect_checkpoint, load_params
from prb_jax.models.checkpoints.locate import describe, locate
from prb_jax.models.config.decoder import STANDARD, DecoderConfig, parse_config
from prb_jax.models.config.family import known_families
from prb_jax.models.decoder import Params
from prb_jax.models.head import LINEAR
from prb_jax.models.model import init_params, parameter_shardings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model
from prb_jax.personal import SOFT_PROMPTS
from prb_jax.platform.processes.sharing import on_first_process
from prb_jax.platform.sharding import check_heads
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.text.new_tokenizer import train_tokenizer, training_texts
from prb_jax.text.tokenizer import ChatTokenizer, load_tokenizer
from prb_jax.training.config import SCRATCH, TrainSettings
from prb_jax.training.layouts import as_standard, check_convertible, standard_tokenizer
from prb_jax.training.weights import TrainedModel, trained_decoder
from prb_jax.trees.stream_tables import round_up

_TEXTS_OF = 10_000
"""Number of evenly spaced comparisons that a new tokenizer is trained on if the data exceeds memory."""


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
        return _from_scratch(settings, train.sample(_TEXTS_OF), out=out)
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
    check_convertible(model, where=opened.name)
    if model.config.num_labels != 1:
        raise CheckpointError(
            f"{folder}: the score head has {model.config.num_labels} outputs, expected one for a Bradley-Terry loss; "
            "init_head=true trains a new one from random weights"
        )
    inspect_checkpoint(folder, model.config, head=not model.new_head)
    tokenizer = standard_tokenizer(opened)
    if settings.tokenizer:
        _refuse_other_ids(tokenizer, folder)
    raw = with_pad_token(model.config.original, tokenizer)

    def load(mesh: Mesh) -> Params:
        shardings = _shardings(model.config, mesh)
        head = {} if model.new_head else {"score": shardings["score"]}
        read = {name: value for name, value in shardings.items() if name != "score"} | head
        params = load_params(
            folder,
            model.config,
            dtype=_weights_dtype(settings),
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
        return as_standard(model, params, drop_bias=False, where=opened.name).params

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


def _from_scratch(settings: TrainSettings, train: Sequence[Comparison], *, out: Path) -> Start:
    sizes = asdict(settings.scratch)
    kind, theta, vocab_size, folder = map(sizes.pop, ("model_type", "rope_theta", "vocab_size", "tokenizer"))
    folder = locate(folder).path if folder else out / "tokenizer"

    def make_tokenizer() -> None:
        if not (settings.scratch.tokenizer or (folder / "tokenizer_config.json").exists()):
            texts = training_texts(train, profiles=settings.view.profile_posts > 0)
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
        dtype = _weights_dtype(settings)

        def make() -> Params:
            params = init_params(config, seed=settings.seed)
            return {
                name: leaf if name == "score" else jax.tree.map(lambda x: x.astype(dtype), leaf)
                for name, leaf in params.items()
            }

        return jax.jit(make, out_shardings=_shardings(config, mesh))()

    return Start(
        name=SCRATCH,
        config=config,
        raw_config=raw,
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        identity={"template": tokenizer.template_hash, "tokenizer": describe(locate(folder))["files"]},
        load=load,
    )


def _shardings(config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    check_heads(mesh, heads=config.head_counts)
    return parameter_shardings(abstract_params(config), mesh, config=config)


def _weights_dtype(settings: TrainSettings) -> Any:
    return jnp.dtype("float32" if settings.tuning == "full" else settings.dtype)


def _refuse_other_ids(tokenizer: ChatTokenizer, folder: Path) -> None:
    """Reject a tokenizer of another model: one that gives the checkpoint's tokens other ids."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    vocabulary = load_tokenizer(folder, chat_template="plain").tokenizer.get_vocab()
    other = tokenizer.tokenizer.get_vocab()
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if other.get(token, number) != number:
            raise CheckpointError(
                f"{tokenizer.name}: token {quote(token)} has id {other[token]}, but {number} in the tokenizer of "
                f"{folder}: this is not the tokenizer of this model"
            )
    shared = len(vocabulary.keys() & other.keys())
    if shared < 0.9 * len(vocabulary):
        raise CheckpointError(
            f"{tokenizer.name}: has only {shared} of the {len(vocabulary)} tokens of the tokenizer of {folder}: "
            "this is not the tokenizer of this model"
        )


def with_pad_token(raw_config: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the configuration with a padding token, which transformers requires for batches of several.

    The token must never occur in a text, because transformers reads the score at the last token that is
    not padding.
    """
    raw, pad = dict(raw_config), tokenizer.pad_token_id
    if raw.get("pad_token_id") is None and pad is not None and pad != tokenizer.eos_token_id:
        raw["pad_token_id"] = pad
    return raw
