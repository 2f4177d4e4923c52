"""The model a run starts from: a checkpoint, or a new one; its tokenizer, its head, its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from prb_jax.checkpoints.load import abstract_params, load_params
from prb_jax.checkpoints.locate import describe, locate
from prb_jax.checkpoints.safetensors_reader import index_folder
from prb_jax.data.comparison import Comparison
from prb_jax.errors import CheckpointError, quote
from prb_jax.models.config.decoder import DecoderConfig, parse_config, read_raw_config
from prb_jax.models.config.encoder import refuse_encoder
from prb_jax.models.config.families import FAMILIES
from prb_jax.models.config.layout import HEAD_KEY
from prb_jax.models.decoder import Params, init_params
from prb_jax.processes.sharing import on_first_process
from prb_jax.sharding import check_heads, parameter_shardings
from prb_jax.text.new_tokenizer import train_tokenizer, training_texts
from prb_jax.text.tokenizer import ChatTokenizer, load_tokenizer
from prb_jax.training.settings import SCRATCH, TrainSettings

_HEADLESS = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Start:
    """Where a run starts.

    Attributes:
      name: of the model, for people.
      config: architecture; its head has one output.
      raw_config: what `config.json` of the trained model says.
      tokenizer: and its chat template.
      tokenizer_folder: where its files lie.
      identity: everything of the above that decides the result, JSON-ready.
      load: reads or makes the weights: (mesh, dtype of the frozen ones) -> parameters. Head and, where
        everything is trained, all weights are float32.
    """

    name: str
    config: DecoderConfig
    raw_config: Mapping[str, Any]
    tokenizer: ChatTokenizer
    tokenizer_folder: Path
    identity: Mapping[str, Any]
    load: Callable[[Mesh], Params]


def start_from(settings: TrainSettings, train: Sequence[Comparison], *, out: Path) -> Start:
    """The starting point that the settings name; nothing large is read yet.

    Args:
      settings: of the run.
      train: training data, from which a new tokenizer is learned if there is none.
      out: the run folder; a new tokenizer is kept there.

    Raises:
      CheckpointError: a checkpoint or tokenizer that cannot be used; one without a score head, or with
        several outputs, unless `init_head` is set.
    """
    if settings.model == SCRATCH:
        return _from_scratch(settings, train, out=out)
    assert settings.model is not None
    folder = locate(settings.model, revision=settings.revision)
    refuse_encoder(read_raw_config(folder.path), where=str(folder.path / "config.json"))
    raw, new_head = _with_one_head(folder.path, settings)
    tokenizer_folder = locate(settings.tokenizer).path if settings.tokenizer else folder.path
    tokenizer = load_tokenizer(tokenizer_folder, chat_template=settings.chat_template)
    if settings.tokenizer:
        _refuse_other_ids(tokenizer, folder.path)
    raw = with_pad_token(raw, tokenizer)
    config = parse_config(raw, where=str(folder.path / "config.json"))
    return Start(
        name=folder.name,
        config=config,
        raw_config=raw,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        identity={
            **describe(folder),
            "new_head": new_head,
            "template": tokenizer.template_hash,
            "tokenizer": describe(locate(tokenizer_folder)) if settings.tokenizer else None,
        },
        load=functools.partial(_load, folder.path, config, settings, new_head=new_head),
    )


def _with_one_head(folder: Path, settings: TrainSettings) -> tuple[dict[str, Any], bool]:
    """The raw configuration, and whether the head has to be made; one that scores with one output."""
    path, raw = folder / "config.json", read_raw_config(folder)
    named = (raw.get("architectures") or [""])[0]
    family = FAMILIES.get(raw.get("model_type", ""))
    remedy = (
        "init_head=true trains a new one from random weights, and `prb convert` brings a linear head of another "
        "layout into this one"
    )
    if named.endswith(_HEADLESS) or HEAD_KEY not in index_folder(folder).tensors:
        if not settings.init_head:
            what = f"'{named}', a language model" if named.endswith(_HEADLESS) else "this checkpoint"
            raise CheckpointError(f"{folder}: {what}, has no score head '{HEAD_KEY}'; {remedy}")
    else:
        labels = parse_config(raw, where=str(path)).num_labels
        if labels == 1:
            return raw, False
        if not settings.init_head:
            raise CheckpointError(
                f"{folder}: the score head has {labels} outputs, expected one for a Bradley-Terry loss; {remedy}"
            )
    if family is not None:
        raw["architectures"] = [family.architecture]
    raw.pop("num_labels", None)
    raw["id2label"], raw["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    return raw, True


def _load(
    folder: Path, config: DecoderConfig, settings: TrainSettings, mesh: Mesh, *, new_head: bool
) -> Params:
    check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
    shardings = parameter_shardings(abstract_params(config), mesh)
    head_sharding = shardings["score"]
    if new_head:
        shardings = {name: value for name, value in shardings.items() if name != "score"}
    kind = jnp.float32 if settings.tuning == "full" else jnp.dtype(settings.dtype)
    params = load_params(
        folder, config, dtype=kind, head_dtype=jnp.float32, shardings=shardings, head=not new_head
    ).params
    if new_head:
        # As open-instruct: small, so that a new head starts near reward 0.
        deviation = (config.hidden_size + 1) ** -0.5
        shape = (config.hidden_size, 1)
        make = jax.jit(
            lambda: deviation * jax.random.normal(jax.random.key(settings.seed), shape, jnp.float32),
            out_shardings=head_sharding,
        )
        params["score"] = make()
    return params


def _from_scratch(settings: TrainSettings, train: Sequence[Comparison], *, out: Path) -> Start:
    sizes = settings.scratch
    if sizes.tokenizer:
        folder = locate(sizes.tokenizer).path
    else:
        folder = out / "tokenizer"

        def make_tokenizer() -> str:
            if not (folder / "tokenizer_config.json").exists():
                texts = training_texts(train, profiles=settings.view.profile_posts > 0)
                train_tokenizer(texts, folder, vocab_size=sizes.vocab_size)
            return str(folder)

        on_first_process(make_tokenizer)
    tokenizer = load_tokenizer(folder, chat_template=settings.chat_template)
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[sizes.model_type].architecture],
        "model_type": sizes.model_type,
        "vocab_size": _round_up(tokenizer.vocab_size, 64),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": sizes.rope_theta,
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
        check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
        shardings = parameter_shardings(abstract_params(config), mesh)
        kind = jnp.float32 if settings.tuning == "full" else jnp.dtype(settings.dtype)

        def make() -> Params:
            params = init_params(config, seed=settings.seed)
            return {
                name: leaf if name == "score" else jax.tree.map(lambda x: x.astype(kind), leaf)
                for name, leaf in params.items()
            }

        return jax.jit(make, out_shardings=shardings)()

    return Start(
        name=SCRATCH,
        config=config,
        raw_config=raw,
        tokenizer=tokenizer,
        tokenizer_folder=folder,
        identity={"template": tokenizer.template_hash, "tokenizer": describe(locate(folder))["files"]},
        load=load,
    )


def _refuse_other_ids(tokenizer: ChatTokenizer, folder: Path) -> None:
    """A tokenizer that gives the checkpoint's own tokens other ids is that of another model."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    own = load_tokenizer(folder, chat_template="plain").tokenizer.get_vocab()
    given = tokenizer.tokenizer.get_vocab()
    for token, number in sorted(own.items(), key=lambda item: item[1]):
        if given.get(token, number) != number:
            raise CheckpointError(
                f"{tokenizer.name}: token {quote(token)} has id {given[token]}, but {number} in the tokenizer of "
                f"{folder}: this is not the tokenizer of this model"
            )
    shared = len(own.keys() & given.keys())
    if shared < 0.9 * len(own):
        raise CheckpointError(
            f"{tokenizer.name}: has only {shared} of the {len(own)} tokens of the tokenizer of {folder}: "
            "this is not the tokenizer of this model"
        )


def with_pad_token(raw_config: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The configuration with a padding token, without which transformers refuses batches of several.

    Only one that never stands in a text is taken: transformers reads the score at the last token that
    is not padding.
    """
    raw, pad = dict(raw_config), tokenizer.pad_token_id
    if raw.get("pad_token_id") is None and pad is not None and pad != tokenizer.eos_token_id:
        raw["pad_token_id"] = pad
    return raw


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
