"""Open a model as a source of features, or a fitted method with the model of its features.

For a decoder, features are the state at the position where a reward would be read: its tree scorer runs with a head
that returns the state, and for a reward model also its reward. For an encoder of single texts, features are its text
vector.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError, RunError, quote
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.checkpoints.locate import ModelFolder, describe, locate
from prb_jax.models.config.decoder import read_raw_config
from prb_jax.models.config.encoder import EncoderConfig
from prb_jax.models.config.family import is_encoder
from prb_jax.models.head import Head, HeadTensor, Shapes, Sizes, States, read_out
from prb_jax.models.lora import merge_lora
from prb_jax.models.model import parameter_shardings
from prb_jax.models.readouts.heads import Pooled
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.open_model import open_model
from prb_jax.models.readouts.recognise import is_plain_language_model
from prb_jax.models.readouts.registry import REGISTRY
from prb_jax.models.readouts.score_pairs import PairFn, make_pair_fn
from prb_jax.models.readouts.score_tree import ScoreFn, make_score_fn
from prb_jax.models.readouts.text_encoder import load_text_encoder
from prb_jax.personal.embedder import Advance, Embedded, Embedder, TextFeatures
from prb_jax.personal.few_shot.choices import Adapter
from prb_jax.personal.saved import read_fitted
from prb_jax.platform.processes.agreement import differences
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.batching import stream_scores
from prb_jax.scoring.personalised import PersonalisedModel
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.text.view import TextProtocol, View, ViewOptions
from prb_jax.trees.tree import LEAST_SHARED, ScoredBatch, TooLongError, Tree, common_run, divided_at

POST_PROMPT: Final = "Write something that is typical of you."
"""Prompt that precedes a post in models that read conversations: the post takes the place of a response."""


@dataclass(frozen=True)
class ReadStates:
    """A head that returns the state at the read position, float32 [B, K, D] after the last norm. With the ``head`` of a
    model, it appends the reward from the head's values and the rule ``readout``, float32 [B, K, D + 1]."""

    head: Head | None = None
    readout: str = "logit"

    def bound(self, stored: Shapes, config: Mapping[str, Any], *, where: str, what: str) -> ReadStates:
        head = None if self.head is None else self.head.bound(stored, config, where=where, what=what)
        return replace(self, head=head)

    def tensors(self, sizes: Sizes) -> tuple[HeadTensor, ...]:
        return () if self.head is None else self.head.tensors(sizes)

    @property
    def needs(self) -> tuple[int, ...]:
        return () if self.head is None else self.head.needs

    def __call__(self, params: Mapping[str, Any], states: States) -> jax.Array:
        if self.head is None:
            return states.read()
        rewards = read_out(self.head(params, states), self.readout)
        return jnp.concatenate([states.read(), rewards[..., None].astype(jnp.float32)], axis=-1)


@dataclass(frozen=True, eq=False)
class StateFeatures:
    """The state of a conversation model at the read position, after the last norm. Implements :class:`Embedder`, and
    :class:`prb_jax.personal.embedder.RewardEmbedder` if it ``gives_rewards``.
    """

    model: RewardModel
    # returns the state at each read place or of an encoder's sequences, float32 [..., D]; D + 1 with the reward last
    states: ScoreFn | PairFn
    view: View
    gives_rewards: bool

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    def identity(self) -> dict[str, Any]:
        known = {key: value for key, value in self.model.identity().items() if key not in ("name", "readout")}
        return {
            **known,
            "reads": "the state at the read position of a conversation",
            "protocol": self.view.protocol.value,
            "max_length": self.model.reader.limit(self.view),
        }

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        rows = np.empty((len(comparisons), self.width + self.gives_rewards), np.float32)
        truncated = 0
        for batch in stream_scores(
            comparisons,
            encode=self._encode,
            dispatch=lambda batch: self.model.run(batch, self.states),
            options=self.model.batch_options(),
        ):
            for index, states in zip(batch.indices, batch.scores, strict=True):
                rows[index] = states[0]
            truncated += _count_cut(batch)
            advance(len(batch.indices), sum(batch.tokens))
        rewards = rows[:, self.width] if self.gives_rewards else None
        return Embedded(rows[:, : self.width], truncated, rewards)

    def _encode(self, comparisons: Sequence[Comparison]) -> list[Tree]:
        """Return the trees; those of one short prompt are divided at its end, so a stream computes it once."""
        trees = self.model.reader.encode(comparisons, view=self.view)
        if self.model.streams is None:
            return trees
        places = range(len(trees))
        for _, group in itertools.groupby(places, lambda place: comparisons[place].prompt):
            of_prompt = list(group)
            length = common_run([trees[place].prefix for place in of_prompt])
            for place in of_prompt if length < LEAST_SHARED else ():  # a longer prompt is shared in any case
                trees[place] = divided_at(trees[place], length)
        return trees

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        as_answers = [
            Comparison(id=f"post {text[:40]!r}", prompt=POST_PROMPT, responses=[text]) for text in texts
        ]
        limit = self.model.reader.limit(self.view)
        long = [place for place, text in enumerate(texts) if 2 * len(text.encode()) > limit]
        encoded = self.model.reader.encode_each([as_answers[place] for place in long], view=self.view)
        refused = [place for place, tree in zip(long, encoded, strict=True) if isinstance(tree, TooLongError)]
        for place in refused:
            as_answers[place] = self._cut_end(as_answers[place])
        embedded = self.answers(as_answers, advance=advance)
        return replace(embedded, truncated=embedded.truncated + len(refused))

    def _cut_end(self, post: Comparison) -> Comparison:
        """Return the longest beginning of a post that the model can read, after the whole prompt if there is room."""

        def with_length(length: int) -> Comparison:
            return replace(post, responses=(post.responses[0][:length],))

        def fits(length: int) -> bool:
            (tree,) = self.model.reader.encode_each([with_length(length)], view=self.view)
            if isinstance(tree, TooLongError):
                return False
            return cut_prompt or not tree.truncation.prompt_tokens_dropped

        cut_prompt = False
        cut_prompt = not fits(1)
        longer = range(2, len(post.responses[0]))
        return with_length(1 + bisect.bisect_left(longer, True, key=lambda length: not fits(length)))

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        rewards, truncated = np.empty(len(comparisons), np.float32), 0
        protocol, limit = self.view.protocol.value, self.view.max_length
        asked = ViewOptions(profile_posts=profile_posts, protocol=protocol, max_length=limit)
        for batch in self.model.stream(comparisons, view=self.model.reader.view(asked)):
            rewards[list(batch.indices)] = [scores[0] for scores in batch.scores]
            truncated += _count_cut(batch)
            advance(len(batch.indices), sum(batch.tokens))
        return rewards, truncated


@dataclass(frozen=True, eq=False)
class AdaptedRewards:
    """An :class:`Embedder` whose features are the rewards of C adapters, one forward pass for each.

    While an adapter's rewards are computed, it is merged into a copy of the weights, in their dtype.
    """

    base: StateFeatures = field(repr=False)  # the unmodified backbone
    # a tree with the factors under "layers" and the head under "score", all with a leading axis C
    adapters: Adapter = field(repr=False)
    scale: float  # scale of the updates, alpha / rank

    gives_rewards = False

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def width(self) -> int:
        return len(self.adapters["score"])

    def identity(self) -> dict[str, Any]:
        return self.base.identity()

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        rewards, truncated = np.empty((len(comparisons), self.width), np.float32), 0
        params = self.base.model.params
        for number in range(self.width):
            adapter = jax.tree.map(lambda leaf, number=number: leaf[number], self.adapters)
            factors = {name: jax.numpy.asarray(leaf) for name, leaf in adapter["layers"].items()}
            adapted_params = {**params, "layers": {**params["layers"], **factors}}
            merged = merge_lora(self.base.model.decoder, adapted_params, scale=self.scale)
            adapted = replace(self.base, model=replace(self.base.model, params=merged))
            last = number == self.width - 1
            embedded = adapted.answers(comparisons, advance=advance if last else lambda done, tokens: None)
            rewards[:, number] = embedded.features @ np.asarray(adapter["score"], np.float32)[:, 0]
            truncated = embedded.truncated
        return Embedded(rewards, truncated)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        # methods on adapters read no posts
        return Embedded(np.zeros((len(texts), self.width), np.float32), 0)


def check_trainable(embedder: Embedder) -> StateFeatures:
    """Return the backbone on which adapters can be trained.

    Raises:
      RunError: the model is an encoder, or its weights are quantised.
    """
    if not isinstance(embedder, StateFeatures) or not hasattr(embedder.model.config, "num_key_value_heads"):
        raise RunError(f"{embedder.name}: is an encoder; adapters of people need a decoder")
    if embedder.model.quantize is not None:
        raise RunError(
            f"{embedder.name}: quantize: adapters are trained on weights that are not quantised: leave it out"
        )
    return embedder


def open_embedder(
    model: str | Path,
    options: LoadOptions,
    *,
    view: ViewOptions,
    responses_alone: bool = False,
) -> Embedder:
    """Load a model as a source of features.

    Args:
      model: Folder or hub id of a reward model, a causal language model, or an encoder of texts.
      options: Options to open the model.
      view: Protocol and length limit; profiles are never shown.
      responses_alone: An encoder of texts reads each response without its prompt.

    Raises:
      CheckpointError, MeshError: the model cannot be loaded.
      DataError: the length limit exceeds the limit of the model.
      RunError: the model is a baseline, or an option does not apply to it.
    """
    if str(model).startswith("baseline:"):
        raise RunError(f"{model}: has no features; expected the folder or hub id of a model")
    if options.is_implicit:
        raise RunError("reference, beta, reference_free, logprobs: features have no reward: leave them out")
    folder = locate(model, revision=options.revision, base=options.base)
    raw = read_raw_config(folder.path)
    classes = set(raw.get("architectures") or ())
    # an encoder reward model reads a prompt and a response as a pair of texts
    reads_pairs = any(isinstance(row.head, Pooled) and classes & set(row.classes) for row in REGISTRY)
    if is_encoder(raw) and not reads_pairs:
        return _text_features(folder, options, view=view, responses_alone=responses_alone)
    if responses_alone:
        raise RunError(
            f"responses_alone: for encoders of single texts; {folder.name} reads a response with its prompt"
        )
    plain = options.readout is None and not is_encoder(raw)
    plain = plain and is_plain_language_model(folder.path, name=folder.name)
    opened = open_language_model(folder, options) if plain else open_model(folder, options)
    loaded = load_reward_model(opened)
    chosen = loaded.reader.choose_view(replace(view, profile_posts=0)).view
    named = opened.labels_named or chosen.protocol is TextProtocol.PAPER
    readout = opened.labels if named and not plain else None
    config, mesh = loaded.config, loaded.mesh
    head = ReadStates() if readout is None else ReadStates(config.head, readout)
    settings: dict[str, Any] = {"mesh": mesh, "dtype": jnp.dtype(loaded.dtype), "readout": None}
    if isinstance(config, EncoderConfig):
        states = make_pair_fn(replace(config, head=head), **settings)
    else:
        params = abstract_params(config, quantize=loaded.quantize)
        shardings = parameter_shardings(params, mesh, config=config)
        states = make_score_fn(replace(config, head=head), shardings=shardings, **settings)
    return StateFeatures(loaded, states, chosen, readout is not None)


def _count_cut(batch: ScoredBatch) -> int:
    """Return how many texts of a batch were cut."""
    return sum(
        bool(cut.posts_dropped or cut.prompt_tokens_dropped or cut.response_tokens_dropped)
        for cut in batch.truncation
    )


def _text_features(
    folder: ModelFolder, options: LoadOptions, *, view: ViewOptions, responses_alone: bool
) -> TextFeatures:
    unused = [name for name in options.given if name not in ("mesh", "dtype", "revision")]
    if view.protocol not in (None, TextProtocol.DEFAULT):
        unused.append("protocol")
    if unused:
        raise DataError(f"{', '.join(unused)}: not for {folder.name}, an encoder of single texts")
    encoder = load_text_encoder(
        folder.path if folder.revision is None else folder.name,
        mesh=options.mesh,
        dtype=options.dtype,
        max_length=view.max_length,
        revision=options.revision,
    )
    return TextFeatures(encoder, describe(folder), responses_alone)


SUPPORTED: Final = frozenset({"items", "posts", "posts.signs", "posts.items", "backbone"})
"""Requirements of a method that can be met for new comparisons."""


def load_personalised(folder: str | Path, *, mesh: str | Mesh | None = None) -> PersonalisedModel:
    """Load a fitted method with its backbone, opened with the same options as for fitting.

    Args:
      folder: Folder of the method, as written by ``prb personalise``.
      mesh: Same as for :func:`prb_jax.load`.

    Raises:
      RunError: the folder is damaged, the method requires something that new comparisons lack, or the backbone has
        changed since: names the field.
      CheckpointError: the backbone cannot be loaded.
    """
    fitted = read_fitted(Path(folder).expanduser())
    if lacking := set(fitted.method.needs) - SUPPORTED:
        raise RunError(
            f"{folder}: the method {fitted.method.name} needs {min(lacking)}, which new comparisons lack"
        )
    backbone = fitted.facts["backbone"]
    opened = dict(backbone["opened_with"])
    known = {"responses_alone", "protocol", "max_length", *(item.name for item in fields(LoadOptions))}
    if odd := opened.keys() - known:
        raise RunError(f"{folder}: opened_with: {quote(min(odd))}: no option of loading a model")
    alone = bool(opened.pop("responses_alone", False))
    view = ViewOptions(protocol=opened.pop("protocol", None), max_length=opened.pop("max_length", None))
    loading = LoadOptions(**opened, mesh=mesh)
    embedder = open_embedder(backbone["model"], loading, view=view, responses_alone=alone)
    if changed := differences(backbone["identity"], embedder.identity()):
        name, (before, now) = next(iter(changed.items()))
        raise RunError(
            f"{folder}: fitted on features of another model than {backbone['model']} is now: {name}: expected "
            f"{quote(before)}, found {quote(now)}"
        )
    if fitted.method.trains_backbone:
        adapters, scale = fitted.fitted.arrays["adapters"], fitted.fitted.settings.scale
        embedder = AdaptedRewards(check_trainable(embedder), adapters, scale)
    return PersonalisedModel(fitted, embedder)
