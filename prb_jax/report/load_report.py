"""What a checkpoint is, on one screen, from its headers alone: no weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prb_jax.checkpoints.load import inspect_checkpoint
from prb_jax.checkpoints.locate import locate
from prb_jax.errors import CheckpointError
from prb_jax.models.config import DecoderConfig, load_config
from prb_jax.models.readout import choose_readout
from prb_jax.text.tokenizer import ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    from rich.table import Table


def inspect_model(
    model: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    tokenizer: str | None = None,
    readout: str | None = None,
) -> dict[str, str]:
    """Checks everything that loading would check, except the weights' values.

    Args:
      model: folder or hub id.
      revision, chat_template, tokenizer, readout: as for :func:`prb_jax.load`.

    Returns:
      Facts by name, in the order in which they are shown.

    Raises:
      CheckpointError: what loading the model would raise.
    """
    folder = locate(model, revision=revision)
    config = load_config(folder.path)
    weights = inspect_checkpoint(folder.path, config)
    rule = choose_readout(readout, num_labels=config.num_labels, where=folder.name)
    chat = load_tokenizer(tokenizer or folder.path, chat_template=chat_template)
    if chat.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{chat.name}: has ids up to {chat.vocab_size - 1}, but {folder.name} has only "
            f"{config.vocab_size} embeddings: this is not the tokenizer of this model"
        )
    ignored = [f"{key}: {reason}" for key, reason in weights.ignored_keys.items()]
    dtypes = [f"{count} {dtype}" for dtype, count in sorted(weights.dtypes.items())]
    return {
        "model": folder.name + (f" at {folder.revision}" if folder.revision else ""),
        "architecture": ", ".join(config.architectures) or config.model_type,
        "parameters": f"{weights.parameters:,}",
        "shape": _shape(config),
        "attention": _attention(config),
        "rope": _rope(config),
        "context": f"{config.max_position_embeddings:,} tokens",
        "weights": f"{len(weights.files)} files; tensors used: {', '.join(dtypes)}",
        "tensors ignored": "\n".join(ignored) or "none",
        "config ignored": ", ".join(config.ignored_keys) or "none",
        "score head": weights.head,
        "readout": rule,
        "tokenizer": f"{chat.vocab_size:,} ids of {config.vocab_size:,} embeddings",
        "special ids": f"bos {chat.bos_token_id}, eos {chat.eos_token_id}, pad {chat.pad_token_id}",
        "added by paper": _added(chat),
        "chat template": chat.template_hash,
    }


def load_report_table(facts: dict[str, str]) -> Table:
    """The facts as a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table


def _shape(config: DecoderConfig) -> str:
    return (
        f"{config.num_hidden_layers} layers, width {config.hidden_size:,}, "
        f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}, mlp {config.intermediate_size:,} ({config.hidden_activation})"
    )


def _attention(config: DecoderConfig) -> str:
    sliding = sum(config.layer_windows)
    text = "full" if not sliding else f"{sliding} layers see {config.sliding_window:,} tokens, the others all"
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
