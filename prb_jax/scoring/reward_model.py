"""A reward model ready to score: weights on a mesh, a compiled scorer, its tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.checkpoints.encoder_map import EncoderFolder, load_encoder_params
from prb_jax.checkpoints.load import LoadReport, abstract_params, load_params
from prb_jax.data.comparison import Comparison
from prb_jax.data.records import Records, as_comparisons
from prb_jax.errors import short_repr
from prb_jax.models.attention.choice import choose_attention, wanted_attention
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.decoder import Params
from prb_jax.models.quantization import quantization_form
from prb_jax.personal.prompts import UserPrompts, extend_embedding, load_prompts
from prb_jax.readouts.labels import choose_readout, read_out
from prb_jax.readouts.open_model import LoadOptions, OpenedModel, open_model
from prb_jax.readouts.pairs import make_pair_score_fn
from prb_jax.readouts.score_tree import score_tree
from prb_jax.runs.progress import compiling
from prb_jax.scoring.plain import BaselineName, PlainScorer, baseline_scorer
from prb_jax.scoring.plan import ShapeOptions
from prb_jax.scoring.readable import check_readable, paper_remarks
from prb_jax.scoring.scored import ScoredBatch
from prb_jax.scoring.stream import stream_scores
from prb_jax.sharding import (
    batch_sharding,
    check_heads,
    mesh_shape,
    parameter_shardings,
    replicated,
    to_global,
)
from prb_jax.text.pair_tokenizer import PairTokenizer
from prb_jax.text.protocol import TextProtocol, parse_protocol
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ChosenView, TrainedView, View, choose_view, length_limit, read_trained_view
from prb_jax.trees.batches import TreeBatch, make_batch
from prb_jax.trees.buckets import Bucket
from prb_jax.trees.encode import encode_comparisons, encode_each
from prb_jax.trees.shorten import TooLongError
from prb_jax.trees.tree import Tree

ScoreFn = Callable[[Params, TreeBatch], jax.Array]

# Padded tokens of a batch for each part that the mesh splits it into. On CPUs larger batches only fall
# out of the cache; accelerators need some thousand tokens to be busy.
TOKENS_PER_SHARD = {"cpu": 8_192, "gpu": 65_536, "tpu": 32_768}
MULTIPLE = {"cpu": 16, "gpu": 64, "tpu": 128}


@dataclass(frozen=True, eq=False, kw_only=True)
class RewardModel:
    """A reward model. Build with :func:`load`.

    Attributes:
      name: folder or hub id it was loaded from.
      config: architecture.
      params: weights, a nested dict of arrays sharded over ``mesh``; layers stacked on axis 0, matrices
        [in, out].
      score_fn: pure jitted function of (params, batch): rewards float32 [B, K] of a
        :class:`prb_jax.trees.batches.TreeBatch`; what it gives for absent rows and responses is
        meaningless. It compiles once for each shape (B, P, K, R).
      tokenizer: tokenizer and chat template; of an encoder, which reads prompt and response as a pair of texts,
        the tokenizer of pairs.
      mesh: devices.
      dtype: of weights and activations; the head and the rewards are float32.
      quantize: the form in which the layers' matrices are held, if they are quantised: see
        :mod:`prb_jax.models.quantization`.
      readout: how logits become a reward.
      readout_named: False for a head with several labels where nobody named the one that is the reward: ``readout``
        is then the paper protocol's, and the default protocol is refused.
      report: what was read from the checkpoint.
      source: revision and file fingerprints, for ``run.json``.
      prompts: the soft prompts of its users, where the model has any; they are further rows of the
        embedding in ``params``.
      wanted_attention: which implementation of attention was asked for; :attr:`attention` says which one it is.
      trained: the view that it was trained with, where its files say; what a call does not say is taken from it,
        and a call that says otherwise is warned of (:class:`prb_jax.PrbWarning`).
    """

    name: str
    config: DecoderConfig | EncoderConfig
    params: Params = field(repr=False)
    score_fn: ScoreFn = field(repr=False)
    tokenizer: ChatTokenizer | PairTokenizer
    mesh: Mesh
    dtype: str
    readout: str
    report: LoadReport | None = field(default=None, repr=False)
    source: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prompts: UserPrompts | None = field(default=None, repr=False)
    quantize: str | None = None
    wanted_attention: str = "auto"
    readout_named: bool = True
    trained: TrainedView | None = None

    __repr__ = short_repr

    @overload
    def score(  # pyright: ignore[reportOverlappingOverload] - a mapping is one record
        self,
        comparisons: Comparison | Mapping[str, Any],
        *,
        profile_posts: int | None = None,
        protocol: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> np.ndarray: ...
    @overload
    def score(
        self,
        comparisons: Records,
        *,
        profile_posts: int | None = None,
        protocol: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> list[np.ndarray]: ...
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
          comparisons: several comparisons or records (`prb_jax.data.records.Records`), or a single one, of which
            its array [K] is returned; labels are not looked at.
          profile_posts: at most this many posts of each profile are shown; 0 shows none. If not given, as many
            as in training; of a model whose files do not say that, 10, and 0 for the paper protocol.
          protocol: "default" or "paper"; that of the training, or "default".
          max_length: longest conversation in tokens; that of the training, or the protocol's and the model's own.
          batch_tokens: padded tokens computed at a time.

        Raises:
          DataError: a comparison that cannot be shown to this model; the message names it.
          CheckpointError: nothing says which of the head's labels is the reward.
        """
        several = as_comparisons(comparisons, labelled=False)
        scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(several)
        for batch in self.stream(
            several,
            profile_posts=profile_posts,
            protocol=protocol,
            max_length=max_length,
            batch_tokens=batch_tokens,
        ):
            for index, row in zip(batch.indices, batch.scores, strict=True):
                scores[index] = row
        return scores[0] if isinstance(comparisons, Comparison | Mapping) else scores

    def reward(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        response: str,
        *,
        profile: Sequence[Mapping[str, Any]] = (),
        user_id: str | None = None,
        **options: Any,
    ) -> float:
        """Return the reward of a single response.

        Args:
          prompt: the question, or the conversation before the response.
          response: the text to be scored.
          profile, user_id: as of a `Comparison`.
          options: as of :meth:`score`.
        """
        one = Comparison(id="reward", prompt=prompt, responses=[response], profile=profile, user_id=user_id)
        return float(self.score(one, **options)[0])

    def encode(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int | None = None,
        protocol: str | None = None,
        max_length: int | None = None,
    ) -> list[Tree]:
        """What the model sees of each comparison, as trees of token ids; arguments as of :meth:`score`."""
        return self._encode(comparisons, view=self._view(profile_posts, protocol, max_length))

    def _encode(self, comparisons: Sequence[Comparison], *, view: View) -> list[Tree]:
        self._check_labels(view.protocol)
        trees = encode_comparisons(
            comparisons, self.tokenizer, view=self._limited(view), pad_token_id=self.config.pad_token_id
        )
        for comparison, tree in zip(comparisons, trees, strict=True):
            check_readable(comparison, tree, self.config, name=self.name)
        return trees if self.prompts is None else self.prompts.attach(trees, comparisons)

    def remarks(self, *, protocol: str = "default") -> list[str]:
        """Sentences about the way in which this protocol reads this model, where its files do not say it.

        Raises:
          CheckpointError: nothing says which of the head's labels is the reward.
        """
        rules = parse_protocol(protocol)
        self._check_labels(rules)
        if rules is not TextProtocol.PAPER or isinstance(self.tokenizer, PairTokenizer):
            return []
        return paper_remarks(self.tokenizer, self.decoder, named=self.readout_named)

    def _check_labels(self, protocol: TextProtocol) -> None:
        if not (self.readout_named or protocol is TextProtocol.PAPER):
            choose_readout(None, num_labels=self.config.num_labels, where=self.name)

    def choose_view(
        self, *, profile_posts: int | None = None, protocol: str | None = None, max_length: int | None = None
    ) -> ChosenView:
        """Return what the model is shown for these arguments of :meth:`score`, and where that is not as in training.

        Raises:
          DataError: an argument that cannot be.
        """
        return choose_view(
            self.trained,
            profile_posts=profile_posts,
            protocol=protocol,
            max_length=max_length,
            context=self.config.max_position_embeddings,
        )

    def accepting(self, view: View) -> RewardModel:
        """Return the same model for which `view` is no override to be warned of."""
        return self if self.trained is None else replace(self, trained=replace(self.trained, view=view))

    def _view(self, profile_posts: int | None, protocol: str | None, max_length: int | None) -> View:
        chosen = self.choose_view(profile_posts=profile_posts, protocol=protocol, max_length=max_length)
        chosen.warn(self.name)
        return chosen.view

    def _limited(self, view: View) -> View:
        """The view with the most tokens that a conversation's text may have."""
        limit = length_limit(
            view,
            context=self.config.max_position_embeddings,
            reserved=0 if self.prompts is None else self.prompts.tokens,
            where=self.name,
        )
        return replace(view, max_length=limit)

    def too_long(
        self,
        comparisons: Sequence[Comparison],
        *,
        protocol: str | None = None,
        max_length: int | None = None,
    ) -> list[TooLongError]:
        """Why each of those comparisons cannot be scored that have a response longer than the limit allows.

        Without reading profiles, which are cut before anything else.
        """
        encoded = encode_each(
            comparisons,
            self.tokenizer,
            view=replace(self._limited(self._view(None, protocol, max_length)), profile_posts=0),
            pad_token_id=self.config.pad_token_id,
        )
        return [each for each in encoded if isinstance(each, TooLongError)]

    def unknown_users(self, comparisons: Sequence[Comparison]) -> int | None:
        """How many users among those of the comparisons get the generic soft prompt because the model was
        not trained on them; None for a model without soft prompts."""
        return None if self.prompts is None else len(self.prompts.users.unknown(comparisons))

    @property
    def attention(self) -> str:
        """The implementation of attention in its programs: what was asked for, or the machine's and the dtype's."""
        if isinstance(self.config, EncoderConfig):
            return "whole, both ways"
        return choose_attention(self.mesh, jnp.dtype(self.dtype), self.wanted_attention).name

    def batch(self, trees: Sequence[Tree]) -> TreeBatch:
        """One batch that holds all the trees, for use with ``score_fn``; rows beyond ``len(trees)`` are empty.

        Raises:
          ValueError: no tree.
        """
        if not trees:
            raise ValueError("a batch needs at least one tree, found none")
        multiple = MULTIPLE.get(self._platform, 16)
        tops = [max(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True)]
        shards = mesh_shape(self.mesh).batch_shards
        prefix, responses, length = max(tops[0], 1), tops[1], tops[2]
        bucket = Bucket(-(-prefix // multiple) * multiple, responses, -(-length // multiple) * multiple)
        return self.place(make_batch(trees, bucket, batch=-(-len(trees) // shards) * shards))

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        profile_posts: int | None = None,
        protocol: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        skip: Callable[[Sequence[int]], bool] = lambda indices: False,
    ) -> Iterator[ScoredBatch]:
        """As :meth:`score`, a batch at a time, as soon as it is computed.

        Args:
          skip: tells of a batch's indices that they need no scores; the other batches stay as they are.
        """
        return stream_scores(
            comparisons,
            encode=functools.partial(self._encode, view=self._view(profile_posts, protocol, max_length)),
            dispatch=self._dispatch,
            options=self.shape_options(batch_tokens),
            skip=skip,
        )

    def _dispatch(self, batch: TreeBatch) -> jax.Array:
        with compiling(self.score_fn, batch.prefix.shape, batch.responses.shape):
            return self.score_fn(self.params, self.place(batch))

    def shape_options(self, batch_tokens: int | None = None) -> ShapeOptions:
        """How batches are shaped for this model on its devices."""
        shards = mesh_shape(self.mesh).batch_shards
        return ShapeOptions(
            tokens_per_batch=batch_tokens or shards * TOKENS_PER_SHARD.get(self._platform, 8_192),
            divisor=shards,
            multiple=MULTIPLE.get(self._platform, 16),
            attention_length=_attention_length(self.config),
        )

    def identity(self) -> dict[str, Any]:
        """Everything about the model that decides its scores, JSON-ready."""
        return {
            "name": self.name,
            **self.source,
            "architecture": self.config.architectures[0] if self.config.architectures else None,
            "dtype": self.dtype,
            **({} if self.quantize is None else {"quantize": self.quantize}),
            "readout": self.readout,
            "template": self.tokenizer.template_hash,
        }

    def bytes_of_weights(self) -> tuple[int, int] | None:
        """Of the whole model: before quantising and as held; None if it was not read from a checkpoint."""
        return None if self.report is None else (self.report.bytes_unquantized, self.report.bytes_held)

    def without_weights(self) -> RewardModel:
        """The same model without parameters, so that their memory is freed: it cannot score any more."""
        return replace(self, params={})

    @property
    def decoder(self) -> DecoderConfig:
        """The architecture of a model whose body is a decoder.

        Raises:
          TypeError: it is an encoder.
        """
        if not isinstance(self.config, DecoderConfig):
            raise TypeError(f"{self.name}: expected a decoder, found the encoder {self.config.model_type}")
        return self.config

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def place(self, batch: TreeBatch) -> TreeBatch:
        """A batch of the host, its rows dealt over the mesh."""
        return jax.tree.map(lambda x: to_global(np.asarray(x), batch_sharding(self.mesh, x.ndim)), batch)


@overload
def load(model: BaselineName) -> PlainScorer: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> RewardModel: ...
def load(
    model: str | Path,
    *,
    mesh: str | Mesh | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
    readout: str | None = None,
    tokenizer: str | Path | None = None,
    quantize: str | None = None,
    attention: str = "auto",
) -> RewardModel | PlainScorer:
    """Load a reward model from a Hugging Face folder or hub id.

    Args:
      model: folder with ``config.json``, safetensors and tokenizer files; or a hub id. The name of a baseline,
        as "baseline:length", gives a :class:`prb_jax.scoring.plain.PlainScorer`, which takes no options.
      mesh: sizes of the mesh axes, as in "fsdp=4,tensor=2" (-1: all devices that are left), or a mesh
        of :func:`prb_jax.sharding.make_mesh`; parameters split over all devices if not given.
      dtype: "float32" or "bfloat16", of weights and activations; that of the checkpoint if not given
        (bfloat16 for float16 ones).
      revision: branch, tag or commit of a hub id.
      chat_template: "plain", a Jinja file, or its text, instead of the tokenizer's own template.
      readout: a row of :data:`prb_jax.readouts.registry.REGISTRY`, if the files do not say which one, or
        ``vocabulary:ID`` for a logit of a language model; ``ROW:min`` (``product``, ``mean``, ``last``), how the
        steps of a process model become one reward; or which logit is the reward, for heads with several
        labels: see :func:`prb_jax.readouts.labels.choose_readout`; not named, such a head is scored by the paper
        protocol alone, which has a rule.
      tokenizer: folder or hub id of the tokenizer, if it is not with the model.
      quantize: "int8", "int8-weights" or "fp8": the layers' matrices in eight bits, as
        :mod:`prb_jax.models.quantization` describes them.
      attention: "auto", the machine's own choice; "blockwise", the XLA program; or "kernel", the machine's
        kernel: see :func:`prb_jax.models.attention.choice.choose_attention`.

    Raises:
      CheckpointError: what is there cannot be used as it is; the message names file, tensor or field.
      MeshError: the mesh does not fit the devices or the model.
    """
    if str(model).startswith("baseline:"):
        options = {"mesh": mesh, "dtype": dtype, "revision": revision, "chat_template": chat_template}
        options |= {"readout": readout, "tokenizer": tokenizer, "quantize": quantize}
        return baseline_scorer(str(model), **options, attention=None if attention == "auto" else attention)
    return load_opened(
        open_model(
            model,
            LoadOptions(
                mesh=mesh,
                dtype=dtype,
                revision=revision,
                chat_template=chat_template,
                readout=readout,
                tokenizer=tokenizer,
                quantize=quantize,
                attention=attention,
            ),
        )
    )


def load_opened(opened: OpenedModel) -> RewardModel:
    """Read the weights of an opened model; errors as of :func:`load`."""
    tokenizer, mesh, kind = opened.tokenizer(), opened.mesh, jnp.dtype(opened.dtype)
    quantize, attention = opened.options.quantize, opened.options.attention
    prompts = None
    if isinstance(opened.body, EncoderFolder):
        config = opened.body.config
        score_fn = make_pair_score_fn(config, mesh=mesh, dtype=kind, readout=opened.labels)
        loaded = load_encoder_params(opened.body, mesh=mesh, dtype=kind, head_dtype=jnp.float32)
        params = loaded.params
    else:
        config = opened.body.config
        check_heads(mesh, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads)
        if quantize is not None:
            quantization_form(quantize, mesh=mesh)
        shardings = parameter_shardings(abstract_params(config, quantize=quantize), mesh)
        score_fn = make_score_fn(
            config, mesh=mesh, dtype=kind, readout=opened.labels, shardings=shardings, attention=attention
        )
        path = opened.folder.path
        saved = load_prompts(path, width=config.hidden_size)
        loaded = load_params(
            path, config, dtype=kind, head_dtype=jnp.float32, shardings=shardings, quantize=quantize
        )
        params = loaded.params
        if saved is not None:
            embedding = extend_embedding(params["embed"], saved.table, sharding=shardings["embed"])
            params = {**params, "embed": embedding}
            prompts = UserPrompts(saved.users, tokens=saved.table.shape[1], first_id=config.vocab_size)
    return RewardModel(
        name=opened.name,
        config=config,
        params=params,
        score_fn=score_fn,
        tokenizer=tokenizer,
        mesh=mesh,
        dtype=opened.dtype,
        readout=opened.readout,
        report=loaded.report,
        source=opened.source,
        prompts=prompts,
        quantize=quantize,
        wanted_attention=attention,
        readout_named=opened.labels_named,
        trained=read_trained_view(opened.folder.path),
    )


def make_score_fn(
    config: DecoderConfig,
    *,
    mesh: Mesh,
    dtype: jnp.dtype,
    readout: str = "logit",
    shardings: Mapping[str, NamedSharding] | None = None,
    attention: str = "auto",
) -> ScoreFn:
    """The jitted scorer: (params, TreeBatch) -> rewards float32 [B, K], the same on every device.

    Args:
      config: architecture.
      mesh: devices.
      dtype: of activations.
      readout: see :func:`prb_jax.readouts.labels.choose_readout`.
      shardings: of the parameters; those of :func:`prb_jax.sharding.parameter_shardings` if not given.
      attention: one of :data:`prb_jax.models.ATTENTIONS`.

    Raises:
      CheckpointError, MeshError: these devices or this dtype have no such attention.
    """
    attend = wanted_attention(mesh, dtype, attention)
    if shardings is None:
        shardings = parameter_shardings(abstract_params(config), mesh)

    def score(params: Params, batch: TreeBatch) -> jax.Array:
        scores = score_tree(params, batch, config=config, dtype=dtype, mesh=mesh, attention=attend)
        return read_out(scores, readout)

    batch_shardings = TreeBatch(*(batch_sharding(mesh, rank) for rank in (2, 1, 3, 2, 2)))  # pyright: ignore[reportArgumentType]
    return jax.jit(score, in_shardings=(shardings, batch_shardings), out_shardings=replicated(mesh))


def _attention_length(config: DecoderConfig | EncoderConfig) -> int:
    """Context length at which a token's attention costs as many FLOPs as the matrices of its layer."""
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    if isinstance(config, EncoderConfig):
        matrices = width * (4 * heads + 2 * config.intermediate_size)
    else:
        kv = config.num_key_value_heads * config.head_dim
        matrices = width * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    return max(1, matrices // (2 * heads))
