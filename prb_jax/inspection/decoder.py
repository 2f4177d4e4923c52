"""What a checkpoint is, on one screen, from its headers alone: no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prb_jax.checkpoints.load import LoadReport, inspect_checkpoint
from prb_jax.checkpoints.locate import locate
from prb_jax.data.comparison import Comparison, Message
from prb_jax.errors import CheckpointError, RunError
from prb_jax.inspection.encoder import inspect_encoder
from prb_jax.inspection.facts import files_fact, ignored_facts, model_facts, view_fact
from prb_jax.inspection.lengths import length_report, length_rule
from prb_jax.models.config.decoder import DecoderConfig, read_raw_config
from prb_jax.models.config.encoder import is_encoder, refuse_for_encoder
from prb_jax.models.head import Linear, Vocabulary
from prb_jax.personal.prompts import SavedPrompts, load_prompts
from prb_jax.readouts.gated import Gated
from prb_jax.readouts.heads import TOGETHER, Mlp, Steps
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.readouts.resolve import ResolvedModel
from prb_jax.reports.style import facts_table
from prb_jax.scoring.inputs import read_inputs
from prb_jax.scoring.reader import Reader
from prb_jax.text.protocol import TextProtocol
from prb_jax.text.template import FIXED_DATE
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import View, ViewOptions, read_trained_view

if TYPE_CHECKING:
    from rich.table import Table


_TEA = (Message("user", "Tea or coffee?"), Message("assistant", "Tea."))


def inspect_model(
    model: str,
    *,
    revision: str | None = None,
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
    """Checks everything that loading would check, except the weights' values.

    Args:
      model: folder or hub id.
      revision, chat_template, tokenizer, readout, quantize: as for :func:`prb_jax.load`; whether devices can
        compute in the quantised form is not asked.
      data: comparisons by name, as for :func:`prb_jax.evaluate`: the report then says how long they are for this
        model, and what is cut or refused.
      max_length: longest conversation in tokens; that of the training, or the protocol's and the model's own.
      profile_posts: of the data; as many as in training, or the protocol's own number.
      protocol: "default" or "paper"; both if not given.
      limit: at most so many comparisons of each source.

    Returns:
      Facts by name, in the order in which they are shown.

    Raises:
      CheckpointError: what loading the model would raise.
      DataError: data that cannot be read or shown to this model, or a limit beyond the model's context.
      RunError: an option for data without data.
    """
    if data is None and (profile_posts is not None or limit is not None):
        raise RunError("profile_posts and limit are for data: name some with --data")
    if model.startswith("baseline:"):
        raise CheckpointError(
            f"{model}: a baseline has no checkpoint to inspect; expected a folder or a hub id"
        )
    folder = locate(model, revision=revision)
    options = LoadOptions(
        revision=revision,
        chat_template=chat_template,
        tokenizer=tokenizer,
        readout=readout,
        quantize=quantize,
    )
    if is_encoder(read_raw_config(folder.path)):
        refuse_for_encoder(
            folder.name,
            chat_template=chat_template,
            quantize=quantize,
            data=data,
            max_length=max_length,
            protocol=protocol,
        )
        return inspect_encoder(folder, options)
    opened = open_model(folder, options)
    found, named = opened.decoder, opened.labels_named
    config = found.config
    weights = inspect_checkpoint(
        folder.path, config, dtype=config.default_dtype, head_dtype="float32", quantize=quantize
    )
    chat = opened.chat()
    saved = load_prompts(folder.path, width=config.hidden_size)
    reader = Reader(
        name=folder.name,
        config=config,
        tokenizer=chat,
        labels_named=named,
        prompts=None if saved is None else saved.prompts(first_id=config.vocab_size),
        trained=read_trained_view(folder.path),
    )
    asked = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
    reader.view(asked)  # warns
    protocols = list(TextProtocol) if protocol is None else [protocol]
    lengths = _lengths(
        reader,
        views=[reader.choose_view(replace(asked, protocol=each)).view for each in protocols],
        comparisons=None if data is None else read_inputs(data, limit=limit).comparisons,
    )
    return {
        **model_facts(folder, config, weights),
        "shape": _shape(config),
        "attention": _attention(config),
        "rope": _rope(config),
        "context": f"{config.max_position_embeddings:,} tokens",
        **view_fact(folder),
        **lengths,
        **({} if saved is None else {"soft prompts": _users(saved)}),
        **files_fact(weights),
        "in memory": _in_memory(weights, config.default_dtype),
        **ignored_facts(config, weights),
        "score head": weights.head,
        "readout": f"{found.row.name}: {_reading(found, opened.labels)}"
        + ("" if named else " (protocol paper; the default one needs --readout)"),
        "tokenizer": f"{chat.vocab_size:,} ids of {config.vocab_size:,} embeddings",
        "special ids": f"bos {chat.bos_token_id}, eos {chat.eos_token_id}, pad {chat.pad_token_id} (config.json: "
        f"{config.pad_token_id})",
        "BOS": _bos(chat),
        "added by paper": _added(chat),
        "chat template": chat.template_hash,
        "example": _example(chat),
        "warnings": "\n".join([*_warnings(folder.path, found, chat), *reader.remarks(TextProtocol.PAPER)])
        or "none",
    }


def load_report_table(facts: dict[str, str]) -> Table:
    """The facts as a table for the terminal."""
    return facts_table(facts.items())


def _in_memory(weights: LoadReport, dtype: str) -> str:
    """Bytes of all parameters, before and after quantising."""
    before = f"{weights.bytes_unquantized:,} bytes in {dtype}"
    return before if weights.quantize is None else f"{before}, {weights.bytes_held:,} in {weights.quantize}"


def _reading(found: ResolvedModel, rule: str) -> str:
    """What the head does, in words."""
    head = found.config.head
    if isinstance(head, Linear):
        return f"linear, at the last token, {rule}"
    if isinstance(head, Mlp):
        return f"{len(head.stack.layers)} linear layers, {head.stack.activation} between, at the last token"
    if isinstance(head, Vocabulary):
        cap = "" if head.softcap is None else f", logits capped at {head.softcap:g}"
        if head.numbers:
            of = ", ".join(f"{number:g}" for number in head.numbers)
            return f"expectation over the tokens {list(head.tokens)} for {of} at the last token{cap}"
        if len(head.tokens) == 1:
            return f"logit of token {head.tokens[0]} at the last token{cap}"
        return f"probability of token {head.tokens[0]} against {head.tokens[1]} at the last token{cap}"
    if isinstance(head, Steps):
        others = ", ".join(f"{found.row.name}:{each}" for each in TOGETHER if each != head.together)
        return (
            f"probability of a good step at every {head.marker_text!r}, the {head.together} of them "
            f"(others by --readout {others})"
        )
    assert isinstance(head, Gated)
    count = head.objectives.outputs // int(head.per_objective)
    values = {
        "one": "",
        "mean": f", each the mean of {head.per_objective} quantiles",
        "first": ", each the mean of a normal distribution",
        "bins": f", each the expectation over {head.per_objective} bins",
    }[head.value]
    if head.gate is None:
        return f"{count} objectives{values}, at the last token, mixed by fixed weights"
    place = f"at the last ids {list(head.needs)}" if head.needs else "at the last token"
    return f"{count} objectives{values}, at the last token, mixed by a gate read {place}"


def _bos(chat: ChatTokenizer) -> str:
    """How many BOS tokens a conversation has, in each protocol."""
    bos = chat.bos_token_id
    if bos is None:
        return "the tokenizer has none"
    written = chat.encode(_TEA).count(bos)
    if _opens_turns(chat):
        return f"{written} in a conversation of {len(_TEA)} turns: the token opens every turn"
    return f"{written} in a conversation; {written + chat.added_before.count(bos)} in the paper protocol"


def _opens_turns(chat: ChatTokenizer) -> bool:
    """Whether the BOS token is the mark of a turn, as Qwen's ``<|im_start|>``: each further turn has one more."""
    bos = chat.bos_token_id
    return bos is not None and chat.encode([*_TEA, *_TEA]).count(bos) > chat.encode(_TEA).count(bos)


def _users(prompts: SavedPrompts) -> str:
    count, tokens, _ = prompts.table.shape
    return f"{count - 1:,} users and a generic one, {tokens} tokens each"


def _lengths(
    reader: Reader, *, views: Sequence[View], comparisons: Sequence[Comparison] | None
) -> dict[str, str]:
    """What happens to conversations that are too long; with comparisons, how often."""
    facts = {}
    for view in views:
        if comparisons is None:
            facts[f"too long, {view.protocol}"] = length_rule(view.protocol, limit=reader.limit(view))
            continue
        report = length_report(comparisons, reader, view=view)
        facts[f"lengths, {view.protocol}"] = report.lengths
        facts[f"at {report.limit:,} tokens, {view.protocol}"] = report.effect
    return facts


def _example(chat: ChatTokenizer) -> str:
    """One conversation as the model sees it, and its ids; control characters made visible."""
    ids = chat.encode(_TEA)
    return f"{chat.render([_TEA])[0]!r}\n{len(ids)} ids: {' '.join(map(str, ids))}"


def _warnings(folder: Path, found: ResolvedModel, chat: ChatTokenizer) -> list[str]:
    config, said = found.config, list(found.row.notes)
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
    beside = sorted(path.name for path in folder.glob("*value_head*") if path.name not in read)
    if beside:
        said.append(f"not read, as the weights have a head of their own: {', '.join(beside)}")
    if isinstance(config.head, Linear) and config.head.bias:
        said.append(f"{config.head.bias_key} is added to every reward")
    return said


def _shape(config: DecoderConfig) -> str:
    return (
        f"{config.num_hidden_layers} layers, width {config.hidden_size:,}, "
        f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}, mlp {config.intermediate_size:,} ({config.hidden_activation})"
    )


def _attention(config: DecoderConfig) -> str:
    sliding, layers, window = sum(config.layer_windows), config.num_hidden_layers, config.sliding_window
    text = "full"
    if sliding and window is not None and window < config.max_position_embeddings:
        text = f"every layer sees {window:,} tokens"
        if sliding < layers:
            text = f"{sliding} of {layers} layers see {window:,} tokens, the others all"
    if config.qk_norm:
        text += "; q and k normalised"
    if config.attn_logit_softcapping:
        text += f"; logits capped at {config.attn_logit_softcapping:g}"
    return text


def _rope(config: DecoderConfig) -> str:
    kinds = [rope for rope in config.rope if rope is not None]
    texts = [
        f"{rope.rope_type}, theta {rope.theta:,.0f}"
        + (f", factor {rope.factor:g}" if rope.factor != 1 else "")
        for rope in kinds
    ]
    return texts[0] if len(texts) == 1 else f"{texts[0]}; sliding layers {texts[1]}"


def _added(chat: ChatTokenizer) -> str:
    """The special tokens that the paper protocol writes around a rendered conversation."""
    ids = [*chat.added_before, *chat.added_after]
    return f"special ids {ids} around the rendered conversation" if ids else "nothing"
