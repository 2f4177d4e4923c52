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

from prb_jax.errors import short_repr
from prb_jax.models.attention.choice import StreamAttention, choose_attention
from prb_jax.models.checkpoints.load import abstract_params, load_params
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.open_model import OpenedModel
from prb_jax.models.readouts.resolve import ResolvedModel
from prb_jax.models.readouts.score_tree import make_score_fn
from prb_jax.platform.sharding import batch_sharding, check_heads, replicated, to_global
from prb_jax.records.comparison import Comparison
from prb_jax.records.intake import Records
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import (
    Batch,
    BatchOptions,
    batch_sizes,
    lanes,
    stream_options,
    stream_scores,
)
from prb_jax.scoring.reader import Reader, open_reader
from prb_jax.scoring.scorer import GivesRewards, Skip, skip_nothing
from prb_jax.seams import get
from prb_jax.text.view import View, ViewOptions
from prb_jax.trees.packing import StreamOptions
from prb_jax.trees.stream_shapes import pack_together
from prb_jax.trees.streams import StreamBatch, make_stream_batch, places_of_trees
from prb_jax.trees.tree import ScoredBatch, Tree

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
      reader: turns comparisons into trees of token ids: tokenizer, defaults of what is shown, soft prompts of users.
      params: weights, a nested dict of arrays sharded over ``mesh``; layers stacked on axis 0, matrices
        [in, out]. Soft prompts are further rows of the embedding.
      score_fn: pure jitted function of (params, batch): rewards float32 [B, K] of a batch of :meth:`batch`; what it
        gives for absent responses is meaningless. It compiles once for each shape of a batch.
      mesh: devices.
      dtype: of weights and activations; the head and the rewards are float32.
      readout: how logits become a reward; with a head of the table of reward models, the name of its row.
      labels: the rule of :func:`prb_jax.models.readouts.rules.read_out` for the head's values.
      quantize: the form in which the layers' matrices are held, if they are quantised: see
        :mod:`prb_jax.models.quantization`.
      streams: the implementation of attention over packed streams; None for an encoder.
      report: what was read from the checkpoint.
      source: revision and file fingerprints, for ``run.json``.
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

    __repr__ = short_repr

    @functools.cached_property
    def module(self) -> RewardModule | PairRewardModule:
        """The model as a `flax.nnx` module around the same arrays: ``module(batch)`` gives what ``score_fn`` does, and
        ``module.score_tokens(tokens, lengths)`` the rewards of plain sequences. Run it under `nnx.jit`.

        What changes the module, such as `nnx.Optimizer`, leaves this model as it was loaded.
        """
        program = {"mesh": self.mesh, "dtype": jnp.dtype(self.dtype), "readout": self.labels}
        return get("models", "module").value(self.config, self.params, attention=self.streams, **program)

    @property
    def name(self) -> str:
        """The folder or hub id that it was loaded from."""
        return self.reader.name

    @property
    def config(self) -> Config:
        """The architecture."""
        return cast("Config", self.reader.config)

    @property
    def decoder(self) -> DecoderConfig:
        """The architecture of a decoder; TypeError for another model."""
        return cast("DecoderConfig", self.config)

    @property
    def attention(self) -> str:
        """The implementation of attention in its programs, in words."""
        assert self.streams is not None
        return self.streams.name

    @property
    def tokenizer(self) -> ChatTokenizer | PairTokenizer:
        """The tokenizer of its reader."""
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
        """Return the rewards of every response: one float32 array [K] a comparison, in the order given.

        Args:
          comparisons: several comparisons or records (`prb_jax.records.intake.Records`), or a single one, of which
            its array [K] is returned; labels are not looked at.
          profile_posts: at most this many posts of each profile are shown; 0 shows none. If not given, as many
            as in training; of a model whose files do not say that, 10, and 0 for the paper protocol.
          protocol: "default" or "paper"; that of the training, or "default".
          max_length: longest conversation in tokens; that of the training, or the protocol's and the model's own.
          batch_tokens: tokens computed at a time, about.

        Raises:
          DataError: a comparison that cannot be shown to this model; the message names it.
          CheckpointError: nothing says which of the head's labels is the reward.
        """
        asked = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
        return self._in_order(comparisons, view=self.reader.view(asked), batch_tokens=batch_tokens)

    def encode(self, comparisons: Sequence[Comparison], **view: Unpack[_ViewChoices]) -> list[Tree]:
        """Return what the model sees of each comparison, as trees of token ids; arguments as of :meth:`score`."""
        return self.reader.encode(comparisons, view=self.reader.view(ViewOptions(**view)))

    def batch(self, trees: Sequence[Tree]) -> Batch:
        """Return one batch that holds all the trees, for ``score_fn``: packed streams, or sequences for an encoder.

        Raises:
          ValueError: no tree.
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
        """As :meth:`score`, a batch at a time, as soon as it is computed; arguments as of `Scorer.stream`."""
        view = view or self.reader.view(ViewOptions())
        return stream_scores(
            comparisons,
            encode=functools.partial(self.reader.encode, view=view),
            dispatch=self.dispatch,
            options=self.batch_options(batch_tokens),
            skip=skip,
            lanes=lanes(self.mesh),
        )

    def dispatch(self, batch: Batch) -> jax.Array:
        """Start scoring a batch of the host and return its scores, not yet computed."""
        return self.run(batch, self.score_fn)

    def run(self, batch: Batch, program: Callable[[Params, Any], jax.Array]) -> jax.Array:
        """As :meth:`dispatch`, with another program of the same parameters."""
        with compiling(program, *batch_sizes(batch)):
            return program(self.params, self.place(batch))

    def batch_options(self, batch_tokens: int | None = None) -> BatchOptions:
        """Return how comparisons are put into batches."""
        assert self.streams is not None
        return stream_options(self.decoder, self.mesh, self.streams, batch_tokens)

    def place(self, batch: AnyBatch) -> AnyBatch:
        """Return a batch of the host with its rows, or its streams, dealt over the mesh."""
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
        """Return in words which weights may be why the scores cannot be used."""
        return get("models", "out of range").value(self.params, self.config)

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return whether a post is in a prompt, or a user has a soft prompt."""
        if view.profile_posts > 0 and any(one.profile for one in comparisons):
            return True
        unknown = self.unknown(comparisons)
        users = {one.user_id for one in comparisons} - {None}
        return unknown is not None and len(unknown) < len(users)

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return how the weights are quantised, and the bytes of the whole model before and as held."""
        if self.quantize is None:
            return {}
        report = self.report
        before, held = (None, None) if report is None else (report.bytes_unquantized, report.bytes_held)
        form = {"form": self.quantize, "bytes_unquantized": before, "bytes_held": held}
        return {"quantization": form}


def load_reward_model(opened: OpenedModel) -> RewardModel:
    """Read the weights of an opened model onto its devices; nothing is compiled yet.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
      MeshError: the mesh does not fit the devices or the model.
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
