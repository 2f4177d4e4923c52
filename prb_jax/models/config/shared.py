"""Fields of ``config.json`` that mean the same in every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prb_jax.errors import CheckpointError, quote
from prb_jax.models import DTYPES
from prb_jax.models.config.fields import FieldReader

_STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")

# Fields that cannot change a score of any model: initialisation, training, generation, bookkeeping.
WITHOUT_EFFECT = frozenset(
    "|".join(
        (
            "_name_or_path|name_or_path|transformers_version|finetuning_task|torchscript|return_dict",
            "initializer_range|attention_dropout|hidden_dropout|problem_type|label2id|pretraining_tp",
            "use_cache|cache_implementation|output_attentions|output_hidden_states|chunk_size_feed_forward",
            "bos_token_id|eos_token_id|sep_token_id|decoder_start_token_id|final_logit_softcapping",
            "attn_implementation|_attn_implementation|_attn_implementation_autoset",
            "use_sliding_window|max_window_layers|sliding_window_pattern|_sliding_window_pattern",
            "rope_local_base_freq|hidden_act|hidden_activation",
        )
    ).split("|")
)


def parse_architectures(fields: FieldReader) -> tuple[str, ...]:
    """The names of the checkpoint's classes; empty where it names none."""
    architectures = fields.value("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures)
    ):
        raise fields.error("architectures", "a list of class names")
    return tuple(architectures or ())


def refuse_unless_neutral(fields: FieldReader, only_neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that would change numbers in a way that is not followed here.

    Args:
      fields: of the raw ``config.json``.
      only_neutral: the values that each such field may have.

    Raises:
      CheckpointError: quantised weights, or another value; names the field.
    """
    for name in ("quantization_config", "compression_config"):
        if fields.has(name):
            raise CheckpointError(
                f"{fields.where}: field '{name}': quantised weights are not supported; "
                "use the checkpoint in its original precision"
            )
    for name, neutral in only_neutral.items():
        if fields.has(name) and fields.value(name) not in neutral:
            raise fields.error(
                name, f"{neutral[0]!r} or no such field, as another value is not followed here"
            )


def parse_num_labels(fields: FieldReader) -> int:
    """From ``id2label`` or ``num_labels``; transformers writes neither for its default of 2."""
    labels = fields.value("id2label")
    if labels is None:
        return fields.integer("num_labels", default=2)
    if not isinstance(labels, Mapping) or not labels:
        raise fields.error("id2label", "an object with one entry a label")
    count = fields.integer("num_labels", default=len(labels))
    if count != len(labels):
        raise fields.error("num_labels", f"{len(labels)}, the number of entries of id2label")
    return count


def parse_dtype(fields: FieldReader) -> str | None:
    """``dtype`` (transformers 5) or ``torch_dtype``; the first wins, as in transformers."""
    fields.read |= {"dtype", "torch_dtype"}
    for name in ("dtype", "torch_dtype"):
        if fields.has(name):
            found = fields.text(name).removeprefix("torch.")
            if found not in _STORED_DTYPES:
                raise fields.error(name, f"one of {', '.join(_STORED_DTYPES)}")
            return found
    return None


def choose_dtype(asked: str | None, stored: str | None, *, where: str) -> str:
    """The dtype to compute in: the one asked for, else the checkpoint's (bfloat16 for float16 ones).

    Raises:
      CheckpointError: one that is not of :data:`DTYPES` was asked for.
    """
    if asked is None:
        return "float32" if stored in (None, "float32", "float64") else "bfloat16"
    if asked not in DTYPES:
        raise CheckpointError(f"{where}: dtype: expected {' or '.join(DTYPES)}, found {quote(asked)}")
    return asked
