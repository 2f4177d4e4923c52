"""What a checkpoint of an encoder is, on one screen, from its headers alone."""

from __future__ import annotations

from prb_jax.checkpoints.encoder_map import open_encoder
from prb_jax.checkpoints.load import LoadReport
from prb_jax.checkpoints.locate import ModelFolder
from prb_jax.data.comparison import Message
from prb_jax.errors import CheckpointError
from prb_jax.inspection.facts import files_fact, ignored_facts, model_facts, view_fact
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.readouts.open_model import open_model
from prb_jax.readouts.pooling import Pooling, read_pooling
from prb_jax.readouts.resolve import class_names
from prb_jax.text.tokenizer import open_tokenizer


def inspect_encoder(folder: ModelFolder, options: LoadOptions) -> dict[str, str]:
    """Checks everything that loading would check, except the weights' values.

    Args:
      folder: of an encoder: a reward model that reads pairs of texts, or an encoder of single texts.
      options: how it was asked for.

    Returns:
      Facts by name, in the order in which they are shown.

    Raises:
      CheckpointError: what loading the model would raise.
    """
    where = options.tokenizer or folder.path
    named = class_names(read_raw_config(folder.path))
    classifier = any(name.endswith("ForSequenceClassification") for name in named)
    if not classifier and options.readout is None:
        found = open_encoder(folder.path)
        vocabulary = 1 + max(open_tokenizer(str(where)).get_vocab().values())
        reading = {"embedding": _pooling(read_pooling(folder.path)), "use": "prb rank-profiles --encoder"}
    else:
        opened = open_model(folder, options)
        found, row, pairs = opened.encoder, opened.row, opened.pairs()
        vocabulary = pairs.vocab_size
        messages = [Message("user", "Tea or coffee?"), Message("assistant", "Tea.")]
        ids = pairs.encode(messages)
        reading = {
            **view_fact(folder),
            "score head": found.report.head,
            "readout": f"{row.name}: pooler and classifier of the first token's state, {opened.labels}",
            "example": f"{pairs.texts(messages)!r}\n{len(ids)} ids: {' '.join(map(str, ids))}",
            "warnings": "\n".join(row.notes) or "none",
        }
    config = found.config
    if vocabulary > config.vocab_size:
        raise CheckpointError(
            f"{where}: has ids up to {vocabulary - 1}, but {folder.name} has only {config.vocab_size} embeddings: this "
            "is not the tokenizer of this model"
        )
    return {
        **_body_facts(folder, config, found.report),
        "tokenizer": f"{vocabulary:,} ids of {config.vocab_size:,} embeddings",
        **reading,
    }


def _body_facts(folder: ModelFolder, config: EncoderConfig, weights: LoadReport) -> dict[str, str]:
    return {
        **model_facts(folder, config, weights),
        "shape": f"encoder, {config.num_hidden_layers} layers, width {config.hidden_size:,}, "
        f"{config.num_attention_heads} heads of {config.head_dim}, mlp {config.intermediate_size:,} "
        f"({config.hidden_activation})",
        "attention": _attention(config),
        "context": f"{config.max_position_embeddings:,} tokens",
        **files_fact(weights),
        **ignored_facts(config, weights),
    }


def _attention(config: EncoderConfig) -> str:
    said = ["in both directions"]
    if config.absolute_positions:
        said.append("learned positions")
    relative = config.relative
    if relative is not None:
        terms = {
            "content to position": relative.content_to_position,
            "position to content": relative.position_to_content,
        }
        kinds = " and ".join(name for name, present in terms.items() if present) or "no term"
        said.append(
            f"distances up to {relative.max_distance:,} in {2 * relative.span:,} embeddings ({kinds})"
        )
    return "; ".join(said)


def _pooling(pooling: Pooling) -> str:
    what = "mean of the last states" if pooling.mode == "mean" else "last state of the first token"
    return f"{what}, {'of length one' if pooling.normalised else 'not normalised'}, compared by dot product"
