"""Embeddings of texts: tokenised in batches, grouped by length into fixed shapes, rows split over the mesh.

The pooling of states to one vector is read from files beside the model: ``modules.json`` in a folder of
sentence-transformers. Without this file, e.g. for Contriever, vectors are means of the last states over the text's
tokens, compared by dot product.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, DataError, quote
from prb_jax.models.checkpoints.encoder_folder import encoder_shardings, load_encoder_params, open_encoder
from prb_jax.models.checkpoints.load import LoadReport
from prb_jax.models.checkpoints.locate import locate
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.config.fields import choose_dtype
from prb_jax.models.decoder import Params
from prb_jax.models.encoder import bind_encoder, encode_tokens
from prb_jax.platform.sharding import as_mesh, batch_sharding, replicated, to_global
from prb_jax.records.reading import read_json, read_object
from prb_jax.text.open_tokenizer import added_tokens, open_tokenizer
from prb_jax.text.tokenizer import tokenize
from prb_jax.trees.sequences import (
    PackedSequences,
    SequenceBatch,
    make_sequence_batch,
    pack_sequences,
    sequence_options,
)

PoolingMode = Literal["mean", "cls"]

_MODES = ("mean", "cls")
# Flags in older files of sentence-transformers; newer files have "pooling_mode".
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
    """Preprocessing of a text, and reduction of its states to a vector."""

    # ``mean`` over all tokens of the text, including special tokens, or the state of the first token (``cls``)
    mode: PoolingMode = "mean"
    normalised: bool = False  # vectors have length one, so a dot product is a cosine
    lowercase: bool = False  # texts are lowercased before tokenisation
    max_length: int | None = None  # maximum text length in tokens; None for the tokenizer's limit


def read_pooling(folder: Path) -> Pooling:
    """Read the pooling of a model folder.

    Raises:
      CheckpointError: A file differs from the format of sentence-transformers, or requires more than a mean or first
        state, and a norm; the message names file and field.
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

    places = [module.get("path", "") for module in modules[:2]]
    if not all(isinstance(place, str) and place.isprintable() for place in places):
        raise CheckpointError(f"{path}: field 'path': expected names of folders, found {quote(places)}")

    def check(ok: bool, path: Path, field: str, found: object, expected: str) -> None:
        if not ok:
            raise CheckpointError(f"{path}: field '{field}': expected {expected.format(quote(found))}")

    sentence, other, pooling = (
        folder / places[0] / "sentence_bert_config.json",
        folder / "config_sentence_transformers.json",
        folder / places[1] / "config.json",
    )
    text, general = (
        read_object(file, error=CheckpointError) if os.path.exists(file) else {} for file in (sentence, other)
    )
    limit = text.get("max_seq_length")
    fits = limit is None or (type(limit) is int and limit >= 1)
    check(fits, sentence, "max_seq_length", limit, "a positive number, found {}")
    similarity, prompt = general.get("similarity_fn_name"), general.get("default_prompt_name")
    known = isinstance(similarity, str | None) and similarity in _SIMILARITIES
    check(known, other, "similarity_fn_name", similarity, "dot or cosine, found {}")
    without = "none, found {}: texts are embedded without a prompt"
    check(prompt is None, other, "default_prompt_name", prompt, without)
    settings = read_object(pooling, error=CheckpointError)
    mode = settings.get("pooling_mode")
    if mode is None:
        flagged = [name for flag, name in _FLAGS.items() if settings.get(flag)]
        mode = flagged[0] if len(flagged) == 1 else flagged
    check(isinstance(mode, str) and mode in _MODES, pooling, "pooling_mode", mode, "mean or cls, found {}")
    return Pooling(
        mode=mode,  # pyright: ignore[reportArgumentType] - checked above
        # A similarity of "cosine" requires normalised vectors even without a Normalize module.
        normalised=len(kinds) == 3 or _SIMILARITIES[similarity],
        lowercase=bool(text.get("do_lower_case")),
        max_length=limit,
    )


def pool(states: jax.Array, lengths: jax.Array, pooling: Pooling) -> jax.Array:
    """Return vectors float32 [B, D] from last states [B, L, D] of texts with these lengths [B] (0: a finite but
    meaningless vector)."""
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


EmbedFn = Callable[[Params, SequenceBatch], jax.Array]

IN_FLIGHT = 4  # batches queued on the device

_TOKENISED_AT_ONCE = 8_192


@dataclass(frozen=True)
class Embeddings:
    """Vectors of texts."""

    vectors: np.ndarray  # float32 [texts, D]
    truncated: np.ndarray  # bool [texts], True if the end was cut off
    shapes: tuple[tuple[int, int], ...]  # computed shapes [rows, tokens]; each compiles once
    tokens: int  # real tokens of the distinct texts, after truncation
    padded_tokens: int  # computed tokens, padding included


@dataclass(frozen=True, eq=False, kw_only=True)
class TextEncoder:
    """An encoder ready to embed texts. Build with :func:`load_text_encoder`."""

    name: str  # folder or hub id of the model
    config: EncoderConfig  # architecture
    pooling: Pooling  # reduction of states to a vector
    max_length: int  # maximum text length in tokens, including special tokens; longer texts lose their end
    params: Params = field(repr=False)  # weights, a nested dict of arrays split over ``mesh``
    # pure jitted function (params, batch of B sequences) -> float32 [B, D]
    embed_fn: EmbedFn = field(repr=False)
    tokenizer: Any = field(repr=False)  # the transformers tokenizer
    # added_before, added_after: special tokens around every text
    added_before: tuple[int, ...]
    added_after: tuple[int, ...]
    mesh: Mesh  # devices
    dtype: str  # dtype of weights and activations; vectors are float32
    report: LoadReport = field(repr=False)  # tensors read from the checkpoint

    def embed(
        self, texts: Sequence[str], *, advance: Callable[[int, int], object] = lambda texts, tokens: None
    ) -> Embeddings:
        """Return the vector of every text, in the given order; equal texts are computed once.

        Args:
          advance: Function called after each batch with its numbers of texts and tokens.

        Raises:
          CheckpointError: The tokenizer returns ids without an embedding in the model.
        """
        distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        ids, truncated = self._tokenise(list(distinct))
        vectors = np.zeros((len(ids), self.config.hidden_size), np.float32)
        options = sequence_options(
            self.mesh, limit=self.max_length, flops_per_token=self.config.flops_per_token
        )
        lengths = np.asarray([len(row) for row in ids], np.int64)
        # The longest first, so a batch that exceeds the memory fails at once.
        batches = pack_sequences(lengths, np.argsort(-lengths, kind="stable").tolist(), options)
        waiting: deque[tuple[PackedSequences, jax.Array]] = deque()
        for batch in batches:
            waiting.append((batch, self._dispatch(batch, ids)))
            while len(waiting) > (IN_FLIGHT if batch is not batches[-1] else 0):
                done, embedded = waiting.popleft()
                members = list(done.members)
                vectors[members] = np.asarray(embedded)[: len(members)]
                advance(len(members), sum(len(ids[index]) for index in members))
        places = np.fromiter((distinct[text] for text in texts), np.int64, len(texts))
        shapes = [(batch.rows, batch.length) for batch in batches]
        return Embeddings(
            vectors[places],
            truncated[places],
            tuple(dict.fromkeys(shapes)),
            tokens=int(lengths.sum()),
            padded_tokens=sum(rows * length for rows, length in shapes),
        )

    def _tokenise(self, texts: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
        before, after = np.asarray(self.added_before, np.int32), np.asarray(self.added_after, np.int32)
        room = self.max_length - len(before) - len(after)
        rows, truncated = list[np.ndarray](), np.zeros(len(texts), bool)
        for start in range(0, len(texts), _TOKENISED_AT_ONCE):
            part = texts[start : start + _TOKENISED_AT_ONCE]
            if self.pooling.lowercase:
                part = [text.lower() for text in part]
            for ids in tokenize(self.tokenizer, part):
                truncated[len(rows)] = len(ids) > room
                rows.append(np.concatenate([before, ids[:room], after]))
        top = max((int(row.max()) for row in rows if len(row)), default=0)
        if top >= self.config.vocab_size:
            raise CheckpointError(
                f"{self.name}: token id {top}, but there are only {self.config.vocab_size} embeddings: this is not the "
                "tokenizer of this model"
            )
        return rows, truncated

    def _dispatch(self, packed: PackedSequences, ids: Sequence[np.ndarray]) -> jax.Array:
        batch = jax.tree.map(
            lambda x: to_global(x, batch_sharding(self.mesh, x.ndim)), make_sequence_batch(ids, packed)
        )
        return self.embed_fn(self.params, batch)


def load_text_encoder(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    revision: str | None = None,
) -> TextEncoder:
    """Load an encoder of texts: BERT, ModernBERT or DeBERTa-v2/v3, e.g. Contriever or a sentence-transformers model.

    Args:
      model: Folder with ``config.json``, weights and tokenizer files; or a hub id.
      mesh: Mesh, as for :func:`prb_jax.load`; rows are split over ``data`` and ``fsdp``.
      dtype: "float32" or "bfloat16"; by default the checkpoint's dtype.
      max_length: Maximum text length in tokens. The default comes from the model's files: ``max_seq_length`` of
        sentence-transformers, else the tokenizer's limit, else the number of positions.
      revision: Branch, tag or commit of a hub id.

    Raises:
      CheckpointError: The model cannot be used; the message names file, tensor or field.
      DataError: ``max_length`` exceeds the model's positions, or leaves no room for a text.
      MeshError: The mesh does not fit the devices or the model.
    """
    folder = locate(model, revision=revision)
    encoder = open_encoder(folder.path)
    config, pooling = encoder.config, read_pooling(folder.path)
    tokenizer = open_tokenizer(str(folder.path))
    before, after = added_tokens(tokenizer, folder.name)
    added, positions = len(before) + len(after), config.max_position_embeddings
    chosen = choose_dtype(dtype, config.torch_dtype, where=folder.name)
    devices = as_mesh(mesh)
    loaded = load_encoder_params(encoder, mesh=devices, dtype=jnp.dtype(chosen))
    if max_length is not None and max_length > positions:
        raise DataError(
            f"max_length {max_length} is more than the {positions} tokens (max_position_embeddings) that "
            f"{folder.name} was made for"
        )
    said = max_length or pooling.max_length or getattr(tokenizer, "model_max_length", None)
    limit = min(said or positions, positions)
    if limit <= added:
        raise DataError(
            f"max_length {limit} leaves no room beside the {added} special tokens of {folder.name}"
        )
    return TextEncoder(
        name=folder.name,
        config=config,
        pooling=pooling,
        max_length=limit,
        params=loaded.params,
        embed_fn=make_embed_fn(config, pooling, mesh=devices, dtype=jnp.dtype(chosen)),
        tokenizer=tokenizer,
        added_before=before,
        added_after=after,
        mesh=devices,
        dtype=chosen,
        report=loaded.report,
    )


def make_embed_fn(config: EncoderConfig, pooling: Pooling, *, mesh: Mesh, dtype: jnp.dtype) -> EmbedFn:
    """Return the jitted function (params, batch of B sequences) -> vectors float32 [B, D], equal on every device."""

    def embed(params: Params, batch: SequenceBatch) -> jax.Array:
        tokens, lengths = jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
        states = encode_tokens(bind_encoder(config, params), tokens, lengths=lengths, dtype=dtype, mesh=mesh)
        return pool(states, lengths, pooling)

    shardings = (encoder_shardings(config, mesh), batch_sharding(mesh, 1))
    return jax.jit(embed, in_shardings=shardings, out_shardings=replicated(mesh))
