"""Describe a checkpoint on one screen, using only its headers: no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prb_jax.behaviour.generation.policy import read_stop_ids
from prb_jax.errors import CheckpointError, RunError
from prb_jax.models.checkpoints.encoder_folder import open_encoder
from prb_jax.models.checkpoints.load import inspect_checkpoint
from prb_jax.models.checkpoints.locate import ModelFolder, locate
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import refuse_for_encoder
from prb_jax.models.config.family import is_encoder
from prb_jax.models.head import Linear
from prb_jax.models.readouts.language_model import open_reward_or_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import ResolvedModel, open_model
from prb_jax.models.readouts.recognise import class_names
from prb_jax.models.readouts.text_encoder import read_pooling
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.personal.prompts import load_prompts
from prb_jax.records.comparison import Message
from prb_jax.reports.inspection import words
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.reader import Reader
from prb_jax.text.open_tokenizer import open_tokenizer
from prb_jax.text.template_clock import FIXED_DATE
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.trained_view import read_trained_view
from prb_jax.text.view import TextProtocol, ViewOptions

_TEA = (Message("user", "Tea or coffee?"), Message("assistant", "Tea."))


def inspect(
    model: str,
    *,
    revision: str | None = None,
    base: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
    readout: str | None = None,
    quantize: str | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    max_length: int | None = None,
    profile_posts: int | None = None,
    protocol: str | None = None,
    limit: int | None = None,
) -> dict[str, str]:
    """Describe a reward model, a language model, a policy or an encoder. Runs all checks of loading, except on the
    weights' values.

    Args:
      model: Folder or hub id, or a run of `prb train` or `prb ppo`.
      revision, base, chat_template, tokenizer, readout, quantize: Same as for :func:`prb_jax.load`; does not check that
        devices can compute in the quantised form.
      data: Comparisons by name, as for :func:`prb_jax.evaluate`: adds their lengths for this model, and what is cut or
        rejected.
      max_length: Longest conversation in tokens; default: the training's limit, or the protocol's and the model's own.
      profile_posts: Number of posts of the data; default: the number in training, or the protocol's own.
      protocol: "default" or "paper"; both by default.
      limit: Maximum number of comparisons from each source.

    Returns:
      Facts by name, in display order.

    Raises:
      CheckpointError: loading the model would raise it.
      DataError: the data cannot be read or shown to this model, or a limit exceeds the model's context.
      RunError: an option for data is given without data.
    """
    if data is None and (profile_posts is not None or limit is not None):
        raise RunError("profile_posts and limit are for data: name some with --data")
    if model.startswith("baseline:"):
        raise CheckpointError(
            f"{model}: a baseline has no checkpoint to inspect; expected a folder or a hub id"
        )
    folder = locate(model, revision=revision, base=base)
    reading: Any = {"tokenizer": tokenizer, "chat_template": chat_template, "readout": readout}
    options = LoadOptions(revision=revision, base=base, quantize=quantize, **reading)
    if is_encoder(read_raw_config(folder.path)):
        given = {"data": data, "max_length": max_length, "protocol": protocol}
        refuse_for_encoder(folder.name, chat_template=chat_template, quantize=quantize, **given)
        return _encoder(folder, options)
    opened, no_reward = open_reward_or_language_model(folder, options)
    resolved, config = opened.decoder, opened.decoder.config
    weights = inspect_checkpoint(
        folder.path, config, dtype=config.default_dtype, head_dtype="float32", quantize=quantize
    )
    chat = opened.chat()
    saved = load_prompts(folder.path, width=config.hidden_size)
    reader = Reader(
        name=folder.name,
        config=config,
        tokenizer=chat,
        labels_named=opened.labels_named,
        prompts=None if saved is None else saved.prompts(first_id=config.vocab_size),
        trained=read_trained_view(folder.path),
    )
    asked = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    reader.view(asked)  # may warn
    comparisons, lengths = None if data is None else read_inputs(data, limit=limit).comparisons, {}
    for name in list(TextProtocol) if protocol is None else [protocol]:
        view = reader.choose_view(replace(asked, protocol=name)).view
        if comparisons is None:
            rule = words.length_rule(view.protocol, limit=reader.limit(view))
            lengths[f"too long, {view.protocol}"] = rule
        else:
            lengths |= words.length_facts(comparisons, reader, view=view)
    remarks, around = _warnings(folder.path, resolved, chat), [*chat.added_before, *chat.added_after]
    users = {}
    if saved is not None:
        count, tokens, _ = saved.table.shape
        users = {"soft prompts": f"{count - 1:,} users and a generic one, {tokens} tokens each"}
    if isinstance(config.head, LanguageHead):
        use = {
            **words.language_facts(config.head, read_stop_ids(folder.path, chat, raw=config.original)),
            "as a reward model": f"no: {no_reward}",
        }
    else:
        remarks += reader.remarks(TextProtocol.PAPER)
        unnamed = "" if opened.labels_named else " (protocol paper; the default one needs --readout)"
        use = {
            **words.view_fact(folder),
            "score head": weights.head,
            "readout": f"{resolved.row.name}: {words.reading(resolved, opened.labels)}{unnamed}",
        }
    return {
        **words.model_facts(folder, config, weights),
        "shape": words.shape(config),
        "attention": words.attention(config),
        "rope": words.rope(config),
        "context": f"{config.max_position_embeddings:,} tokens",
        **use,
        **lengths,
        **users,
        **words.files_fact(weights),
        "in memory": words.memory(weights, config.default_dtype),
        **words.ignored_facts(config, weights),
        "tokenizer": f"{chat.vocab_size:,} ids of {config.vocab_size:,} embeddings",
        "special ids": f"bos {chat.bos_token_id}, eos {chat.eos_token_id}, pad {chat.pad_token_id} (config.json: "
        f"{config.pad_token_id})",
        "BOS": _bos(chat),
        "added by paper": f"special ids {around} around the rendered conversation" if around else "nothing",
        "chat template": chat.template_hash,
        "example": _example(chat),
        "warnings": "\n".join(remarks) or "none",
    }


def _bos(chat: ChatTokenizer) -> str:
    """Return how many BOS tokens a conversation has, in each protocol."""
    bos = chat.bos_token_id
    if bos is None:
        return "the tokenizer has none"
    written = chat.encode(_TEA).count(bos)
    if _opens_turns(chat):
        return f"{written} in a conversation of {len(_TEA)} turns: the token opens every turn"
    return f"{written} in a conversation; {written + chat.added_before.count(bos)} in the paper protocol"


def _opens_turns(chat: ChatTokenizer) -> bool:
    """Return whether the BOS token marks turns, e.g. Qwen's ``<|im_start|>``: each further turn adds one."""
    bos = chat.bos_token_id
    return bos is not None and chat.encode([*_TEA, *_TEA]).count(bos) > chat.encode(_TEA).count(bos)


def _example(chat: ChatTokenizer) -> str:
    """Return one conversation as the model sees it, and its ids; control characters are escaped."""
    ids = chat.encode(_TEA)
    return f"{chat.render([_TEA])[0]!r}\n{len(ids)} ids: {' '.join(map(str, ids))}"


def _warnings(folder: Path, resolved: ResolvedModel, chat: ChatTokenizer) -> list[str]:
    config, said = resolved.config, list(resolved.row.notes)
    pad = config.pad_token_id if config.pad_token_id is not None else chat.pad_token_id
    if pad is not None and pad == chat.eos_token_id:
        said.append(
            f"pad equals eos (id {pad}): programs that find the last token by its id read one token early; here the "
            "position comes from the lengths"
        )
    if pad is not None and pad >= config.vocab_size:
        said.append(f"pad id {pad} is beyond the {config.vocab_size} embeddings")
    if beyond := chat.vocab_size - config.vocab_size:
        said.append(
            f"the tokenizer has {chat.vocab_size:,} ids, the model {config.vocab_size:,} embeddings: "
            + (
                f"{beyond} added tokens have none, and a conversation that holds one is refused"
                if beyond > 0
                else f"{-beyond} embeddings are never used (rows that fill up a vocabulary, or another model's "
                "tokenizer: compare the example's ids)"
            )
        )
    if chat.template.reads_clock:
        said.append(f"the chat template prints today's date: it is fixed to {FIXED_DATE:%d %b %Y}")
    probe = [Message("user", "a"), Message("assistant", "b")]
    bos = chat.bos_token_id
    if bos is not None and (written := chat.encode(probe).count(bos)) != 1 and not _opens_turns(chat):
        said.append(f"{written} BOS in a conversation")
    if "system" in chat.render([probe])[0]:
        said.append("the chat template writes a system turn of its own")
    extras = config.original
    if any(extras.get(name) is not None for name in ("mean", "std")) or extras.get("do_normalize"):
        said.append("config.json has a normaliser of rewards: it is not applied, rewards are the head's own")
    read = {name for name, _ in config.layout.side_files}
    if beside := sorted(path.name for path in folder.glob("*value_head*") if path.name not in read):
        said.append(f"not read, because the weights include a head: {', '.join(beside)}")
    if isinstance(config.head, Linear) and config.head.bias:
        said.append(f"{config.head.bias_key} is added to every reward")
    return said


def _encoder(folder: ModelFolder, options: LoadOptions) -> dict[str, str]:
    """Return the facts of a reward model that reads pairs of texts, or of an encoder of single texts."""
    where = options.tokenizer or folder.path
    named = class_names(read_raw_config(folder.path))
    classifier = any(name.endswith("ForSequenceClassification") for name in named)
    if not classifier and options.readout is None:
        encoder = open_encoder(folder.path)
        vocabulary = 1 + max(open_tokenizer(str(where)).get_vocab().values())
        reading = {
            "embedding": words.pooling_rule(read_pooling(folder.path)),
            "use": "prb rank-profiles --encoder",
        }
    else:
        opened = open_model(folder, options)
        encoder, row, pairs = opened.encoder, opened.row, opened.pairs()
        vocabulary = pairs.vocab_size
        ids = pairs.encode(_TEA)
        reading = {
            **words.view_fact(folder),
            "score head": encoder.report.head,
            "readout": f"{row.name}: pooler and classifier of {words.pooled_state(encoder.config)}, {opened.labels}",
            "example": f"{pairs.texts(_TEA)!r}\n{len(ids)} ids: {' '.join(map(str, ids))}",
            "warnings": "\n".join(row.notes) or "none",
        }
    config, weights = encoder.config, encoder.report
    if vocabulary > config.vocab_size:
        raise CheckpointError(
            f"{where}: has ids up to {vocabulary - 1}, but {folder.name} has only {config.vocab_size} embeddings: this "
            "is not the tokenizer of this model"
        )
    return {
        **words.model_facts(folder, config, weights),
        "shape": f"encoder, {config.num_hidden_layers} layers, width {config.hidden_size:,}, "
        f"{config.num_attention_heads} heads of {config.head_dim}, mlp {config.intermediate_size:,} "
        f"({config.hidden_activation})",
        "attention": words.encoder_attention(config),
        "context": f"{config.max_position_embeddings:,} tokens",
        **words.files_fact(weights),
        **words.ignored_facts(config, weights),
        "tokenizer": f"{vocabulary:,} ids of {config.vocab_size:,} embeddings",
        **reading,
    }
