"""A reward model ready to score: a reader, weights on a mesh, and a compiled scorer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import quote
from prb_jax.models.attention.choice import StreamAttention, choose_attention
from prb_jax.models.checkpoints.load import abstract_params, load_params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.open_model import OpenedModel, ResolvedModel
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.platform.sharding import batch_sharding, check_heads, replicated, to_global
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records
from prb_jax.scoring.batching import (
    Batch,
    BatchOptions,
    batch_sizes,
    lanes,
    stream_options,
    stream_scores,
)
from prb_jax.scoring.reader import Reader, open_reader
from prb_jax.scoring.scorer import GivesRewards
from prb_jax.seams import get
from prb_jax.text.view import View, ViewOptions
from prb_jax.trees.packing import pack_together
from prb_jax.trees.streams import StreamBatch, StreamOptions, make_stream_batch, places_of_trees
from prb_jax.trees.tree import ScoredBatch, Skip, Tree, skip_nothing

if TYPE_CHECKING:
    from prb_jax.models.checkpoints.load import LoadReport
    from prb_jax.models.config.decoder import DecoderConfig
    from prb_jax.models.decoder import Params
    from prb_jax.models.model import Config
    from prb_jax.models.readouts.module import RewardModule
    from prb_jax.models.readouts.pair_model import PairRewardModule
    from prb_jax.text.pair_tokenizer import PairTokenizer
    from prb_jax.text.tokenizer import ChatTokenizer

AnyBatch = TypeVar("AnyBatch", bound="Batch")


class _ViewChoices(TypedDict, total=False):
    profile_posts: int | None
    protocol: str | None
    max_length: int | None


class _ScoreOptions(_ViewChoices, total=False):
    batch_tokens: int | None


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardModel(GivesRewards):
    """A reward model. Build with :func:`prb_jax.load`.

    Attributes:
      reader: Turns comparisons into trees of token ids: tokenizer, default view, soft prompts of users.
      params: Weights, a nested dict of arrays sharded over ``mesh``; layers are stacked on axis 0, matrices are
        [in, out]. Soft prompts are extra rows of the embedding.
      score_fn: Pure jitted function of (params, batch) that returns the rewards of a batch of :meth:`batch`, float32
        [B, K]. Values of absent responses are meaningless. It compiles once for each shape of a batch.
      mesh: Device mesh.
      dtype: Type of weights and activations; the head and the rewards are float32.
      readout: How logits become a reward; for a head in the registry of reward models, the name of its row.
      labels: Rule of :func:`prb_jax.models.head.read_out` for the head's values.
      quantize: Storage format of the layers' matrices, if they are quantised: see :mod:`prb_jax.models.quantization`.
      streams: Implementation of attention over packed streams; None for an encoder.
      report: Report on the tensors read from the checkpoint.
      source: Revision and file fingerprints, for ``run.json``.
    """

    # `field()` keeps the defaults of `Scorer` from becoming defaults here
    reader: Reader = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    params: Params = field(repr=False)
    score_fn: Callable[[Params, Any], jax.Array] = field(repr=False)
    mesh: Mesh = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    dtype: str
    readout: str
    labels: str = "logit"
    quantize: str | None = None
    streams: StreamAttention | None = None
    report: LoadReport | None = field(default=None, repr=False)
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)

    has_prompt: ClassVar[bool] = True
    has_heading: ClassVar[bool] = True

    def __repr__(self) -> str:
        facts = {
            "name": self.name,
            "model_type": self.config.model_type,
            "dtype": self.dtype,
            "quantize": self.quantize,
            "readout": self.readout,
            "devices": self.mesh.size,
        }
        shown = ", ".join(f"{name}={quote(value)}" for name, value in facts.items() if value is not None)
        return f"{type(self).__name__}({shown})"

    @functools.cached_property
    def module(self) -> RewardModule | PairRewardModule:
        """The model as a `flax.nnx` module with the same arrays. Run it under `nnx.jit`.

        ``module(batch)`` returns the values of ``score_fn``; ``module.score_tokens(tokens, lengths)`` returns the
        rewards of plain sequences. Updates of the module, e.g. by `nnx.Optimizer`, do not change this model.
        """
        program = {"mesh": self.mesh, "dtype": jnp.dtype(self.dtype), "readout": self.labels}
        return get("models", "module").value(self.config, self.params, attention=self.streams, **program)

    @property
    def name(self) -> str:
        """Folder or hub id of the model."""
        return self.reader.name

    @property
    def config(self) -> Config:
        """Architecture of the model."""
        return cast("Config", self.reader.config)

    @property
    def decoder(self) -> DecoderConfig:
        """Architecture of a decoder; TypeError for another model."""
        return cast("DecoderConfig", self.config)

    @property
    def attention(self) -> str:
        """Name of the attention implementation of its programs."""
        assert self.streams is not None
        return self.streams.name

    @property
    def tokenizer(self) -> ChatTokenizer | PairTokenizer:
        """Tokenizer of the reader."""
        return self.reader.tokenizer

    @overload
    def score(  # pyright: ignore[reportOverlappingOverload] - a mapping is one record
        self, comparisons: Comparison | Mapping[str, Any], **options: Unpack[_ScoreOptions]
    ) -> np.ndarray: ...
    @overload
    def score(self, comparisons: Records, **options: Unpack[_ScoreOptions]) -> list[np.ndarray]: ...
    def score(
        self,
        comparisons: Records,
        *,
        profile_posts: int | None = None,
        protocol: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Return the rewards of every response: one float32 array [K] per comparison, in the order given.

        Args:
          comparisons: Comparisons or records (`prb_jax.records.intake.Records`); for a single one, only its array [K]
            is returned. Labels are ignored.
          profile_posts: Maximum number of posts of each profile that the model sees; 0 shows none. If not given, as in
            training; if the model's files do not record it, 10, or 0 for the paper protocol.
          protocol: "default" or "paper"; if not given, as in training, or "default".
          max_length: Maximum length of a conversation in tokens; if not given, as in training, or the limit of the
            protocol and the model.
          batch_tokens: Approximate number of tokens computed at a time.

        Raises:
          DataError: The model cannot read a comparison; the message names it.
          CheckpointError: The head has several labels, and none is named as the reward.
        """
        asked = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
        return self._in_order(comparisons, view=self.reader.view(asked), batch_tokens=batch_tokens)

    def encode(self, comparisons: Sequence[Comparison], **view: Unpack[_ViewChoices]) -> list[Tree]:
        """Return each comparison as the model sees it, a tree of token ids; arguments as in :meth:`score`."""
        return self.reader.encode(comparisons, view=self.reader.view(ViewOptions(**view)))

    def batch(self, trees: Sequence[Tree]) -> Batch:
        """Return one batch of all the trees, for ``score_fn``: packed streams, or sequences for an encoder.

        Raises:
          ValueError: `trees` is empty.
        """
        if not trees:
            raise ValueError("a batch needs at least one tree, found none")
        options = self.batch_options()
        assert isinstance(options, StreamOptions)
        if options.keys is not None:
            options = get("kernel tables", "fit").value(options, trees, whole=True)
        packed = pack_together(trees, options)
        batch = make_stream_batch(trees, packed, options)
        return self.place(replace(batch, places=places_of_trees(trees, packed)))

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        """Yield the scores of each batch as soon as it is computed; arguments as in `Scorer.stream`."""
        view = view or self.reader.view(ViewOptions())
        return stream_scores(
            comparisons,
            encode=functools.partial(self.reader.encode, view=view),
            dispatch=self.run,
            options=self.batch_options(batch_tokens),
            skip=skip,
            lanes=lanes(self.mesh),
        )

    def run(self, batch: Batch, program: Callable[[Params, Any], jax.Array] | None = None) -> jax.Array:
        """Start scoring a host batch; return its pending scores, or the results of another program of the weights."""
        program = program or self.score_fn
        with get("progress", "compiling").value(program, *batch_sizes(batch)):
            return program(self.params, self.place(batch))

    def batch_options(self, batch_tokens: int | None = None) -> BatchOptions:
        """Return the options that shape batches."""
        assert self.streams is not None
        return stream_options(self.decoder, self.mesh, self.streams, batch_tokens)

    def place(self, batch: AnyBatch) -> AnyBatch:
        """Return a host batch with its rows or streams sharded over the mesh."""
        if isinstance(batch, StreamBatch) and batch.places is not None:
            whole = to_global(np.asarray(batch.places), replicated(self.mesh))
            return replace(self.place(replace(batch, places=None)), places=whole)
        return jax.tree.map(lambda x: to_global(np.asarray(x), batch_sharding(self.mesh, x.ndim)), batch)

    def identity(self) -> dict[str, Any]:
        """Return everything about the model that decides its scores, JSON-ready."""
        return {
            "name": self.name,
            **self.source,
            "architecture": next(iter(self.config.architectures), None),
            "dtype": self.dtype,
            **({} if self.quantize is None else {"quantize": self.quantize}),
            "readout": self.readout,
            "template": self.tokenizer.template_hash,
        }

    def explain_scores(self) -> str:
        """Return a sentence on the weights that may explain unusable scores."""
        return get("models", "out of range").value(self.params, self.config)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return True if a prompt contains a post, or a user has a soft prompt."""
        if view.profile_posts > 0 and any(one.profile for one in comparisons):
            return True
        unknown = self.unknown(comparisons)
        users = {one.user_id for one in comparisons} - {None}
        return unknown is not None and len(unknown) < len(users)

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the format of quantised weights, and the bytes of the whole model before and after."""
        if self.quantize is None:
            return {}
        report = self.report
        before, held = (None, None) if report is None else (report.bytes_unquantized, report.bytes_held)
        form = {"form": self.quantize, "bytes_unquantized": before, "bytes_held": held}
        return {"quantization": form}


def load_reward_model(opened: OpenedModel) -> RewardModel:
    """Read the weights of an opened model onto its devices, without compiling a program.

    Raises:
      CheckpointError: The checkpoint cannot be used; the message names file, tensor or field.
      MeshError: The mesh does not fit the devices or the model.
    """
    if not isinstance(opened.body, ResolvedModel):
        return get("encoder", "load").value(opened)
    reader, prompts = open_reader(opened)
    config, mesh, dtype = opened.body.config, opened.mesh, jnp.dtype(opened.dtype)
    quantize = opened.options.quantize
    check_heads(mesh, heads=config.head_counts)
    if quantize is not None:
        get("quantisation", "form").value(quantize, mesh=mesh)
    shardings = parameter_shardings(abstract_params(config, quantize=quantize), mesh, config=config)
    streams = choose_attention(mesh, dtype, opened.options.attention, config=config)
    score_fn = make_score_fn(config, mesh=mesh, dtype=dtype, readout=opened.labels, shardings=shardings)
    loaded = load_params(
        opened.folder.path,
        config,
        dtype=dtype,
        head_dtype=jnp.float32,
        shardings=shardings,
        quantize=quantize,
    )
    params = loaded.params
    if prompts is not None:
        params = {**params, "embed": prompts.extend(params["embed"], sharding=shardings["embed"])}
    return RewardModel(
        reader=reader,
        params=params,
        score_fn=score_fn,
        mesh=mesh,
        dtype=opened.dtype,
        readout=opened.readout,
        labels=opened.labels,
        quantize=quantize,
        streams=streams,
        report=loaded.report,
        source=opened.source,
    )
