"""How an encoder's states become one vector a text, read from the files beside the model.

A folder of sentence-transformers says it in ``modules.json``; one without, as Contriever's, means the mean of
the last states over the text's tokens and their dot product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from prb_jax.data.reading import read_json, read_object
from prb_jax.errors import CheckpointError, quote

PoolingMode = Literal["mean", "cls"]

_MODES: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls"}
# Flags in older files of sentence-transformers; newer ones have "pooling_mode".
_FLAGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIMILARITIES = {None: False, "dot": False, "dot_product": False, "cosine": True}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """From states to a vector, and what is done to a text before.

    Attributes:
      mode: ``mean`` over all tokens of the text, special ones too, or the state of the first one (``cls``).
      normalised: vectors have length one, so that a dot product is a cosine.
      lowercase: texts are put in lower case before they are tokenised.
      max_length: longest text in tokens; None for the tokenizer's limit.
    """

    mode: PoolingMode = "mean"
    normalised: bool = False
    lowercase: bool = False
    max_length: int | None = None


def read_pooling(folder: Path) -> Pooling:
    """The pooling of a model folder.

    Raises:
      CheckpointError: a file that is not as sentence-transformers writes it, or asks for something else
        than a mean or first state, and a norm; names file and field.
    """
    path = folder / "modules.json"
    if not path.exists():
        return Pooling()
    modules = read_json(path, error=CheckpointError)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: expected a list of modules")
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{path}: expected the modules Transformer, Pooling and perhaps Normalize, found {', '.join(kinds)}"
        )
    sentence = folder / str(modules[0].get("path", "")) / "sentence_bert_config.json"
    settings = read_object(sentence, error=CheckpointError) if sentence.exists() else {}
    limit = settings.get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(
            f"{sentence}: field 'max_seq_length': expected a positive number, found {quote(limit)}"
        )
    cosine = _cosine(folder / "config_sentence_transformers.json")
    return Pooling(
        mode=_mode(folder / str(modules[1].get("path", "")) / "config.json"),
        normalised=len(kinds) == 3 or cosine,
        lowercase=bool(settings.get("do_lower_case")),
        max_length=limit,
    )


def pool(states: jax.Array, lengths: jax.Array, pooling: Pooling) -> jax.Array:
    """Vectors float32 [B, D] from last states [B, L, D] of texts of these lengths [B] (0: a vector without
    meaning, but finite)."""
    wide = states.astype(jnp.float32)
    if pooling.mode == "cls":
        vectors = wide[:, 0]
    else:
        inside = jnp.arange(states.shape[1])[None] < lengths[:, None]
        total = jnp.where(inside[:, :, None], wide, 0.0).sum(axis=1)
        vectors = total / jnp.maximum(lengths, 1)[:, None].astype(jnp.float32)
    if pooling.normalised:
        vectors = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return vectors


def _mode(path: Path) -> PoolingMode:
    settings = read_object(path, error=CheckpointError)
    found = settings.get("pooling_mode")
    if found is None:
        found = [mode for flag, mode in _FLAGS.items() if settings.get(flag)]
        found = found[0] if len(found) == 1 else found
    if not isinstance(found, str) or found not in _MODES:
        raise CheckpointError(f"{path}: field 'pooling_mode': expected mean or cls, found {quote(found)}")
    return _MODES[found]


def _cosine(path: Path) -> bool:
    """Whether vectors are compared by cosine although no module normalises them."""
    settings = read_object(path, error=CheckpointError) if path.exists() else {}
    name = settings.get("similarity_fn_name")
    if name not in _SIMILARITIES:
        raise CheckpointError(
            f"{path}: field 'similarity_fn_name': expected dot or cosine, found {quote(name)}"
        )
    if settings.get("default_prompt_name") is not None:
        raise CheckpointError(
            f"{path}: field 'default_prompt_name': expected none, found {quote(settings['default_prompt_name'])}: "
            "texts are embedded without a prompt"
        )
    return _SIMILARITIES[name]
