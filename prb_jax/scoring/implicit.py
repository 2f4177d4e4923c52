"""The implicit reward of a policy: beta * (log p_policy - log p_reference) of a response (Rafailov et al., 2023).

Both models read the same packed streams once. The prompt ends with the tokens that open the assistant's turn. The
response is every token after the prompt, including the end of the turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import CheckpointError, DataError, RunError, quote, short_repr
from prb_jax.models import Together
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.readouts.language_model import open_language_model
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.readouts.response_logprobs import make_logprob_fn
from prb_jax.records.comparison import Comparison
from prb_jax.records.conversation import conversations
from prb_jax.records.intake import Records
from prb_jax.scoring.batching import Batch, lanes, stream_scores
from prb_jax.scoring.reader import CHUNK_ROWS, Reader
from prb_jax.scoring.reward_model import RewardModel, load_reward_model
from prb_jax.scoring.scorer import GivesRewards
from prb_jax.text.prompts import encode_prompts, why_other_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer, RenderError
from prb_jax.text.view import TextProtocol, View, ViewOptions, visible
from prb_jax.trees.tree import ScoredBatch, Skip, Tree, build_tree, common_run, skip_nothing


@dataclass(frozen=True)
class ResponseReader(Reader):
    """A reader of trees that are read from the first token of each response."""

    def encode(self, comparisons: Sequence[Any], *, view: View) -> list[Tree]:
        """Like :meth:`Reader.encode`.

        Raises:
          DataError: Errors of :meth:`Reader.encode`; also, tokens were prepared, or the tokens of a response depend on
            the profile.
        """
        trees = super().encode(comparisons, view=view)
        if other := next((one for one in comparisons if not isinstance(one, Comparison)), None):
            raise DataError(
                f"comparison {quote(other.id)}: its prepared tokens do not record where a response begins: "
                "name the data themselves"
            )
        read: list[Tree] = []
        for start in range(0, len(trees), CHUNK_ROWS):
            part = comparisons[start : start + CHUNK_ROWS]
            for comparison, tree, tails in zip(
                part, trees[start:], self._responses(part, view), strict=False
            ):
                sequences = [tree.sequence(k) for k in range(len(tails))]
                for number, (ids, tail) in enumerate(zip(sequences, tails, strict=True)):
                    if not len(tail) or not np.array_equal(ids[-len(tail) :], tail):
                        raise DataError(
                            f"comparison {quote(comparison.id)}: response {number}: the chat template of {self.name} "
                            "writes it differently after other prompts, so its start is unknown"
                        )
                places = [len(ids) - len(tail) for ids, tail in zip(sequences, tails, strict=True)]
                read.append(build_tree(sequences, read=places, truncation=tree.truncation))
        return read

    def _responses(self, comparisons: Sequence[Comparison], view: View) -> list[list[np.ndarray]]:
        """Return the tokens of each response after its prompt, which is rendered without a profile."""
        assert isinstance(self.tokenizer, ChatTokenizer)
        seen = [
            visible(one, profile_posts=0, protocol=view.protocol, order_claim=view.order_claim)
            for one in comparisons
        ]
        try:
            prompts = encode_prompts(self.tokenizer, [one.prefix_messages for one in seen])
        except RenderError as error:
            name = comparisons[error.conversation].id
            raise DataError(f"comparison {quote(name)}: {error.reason}") from error
        whole = self.tokenizer.encode_together(
            [conversations(one.prefix_messages, one.responses) for one in seen]
        )
        return [
            [ids[common_run([prompt, ids]) :] for ids in sequences]
            for prompt, sequences in zip(prompts, whole, strict=True)
        ]

    def check_labels(self, protocol: TextProtocol) -> None:
        if protocol is TextProtocol.PAPER:
            raise DataError(
                f"protocol paper: reads reward models with a head, not the implicit reward of {self.name}; expected "
                "the default protocol"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class ImplicitRewards(GivesRewards):
    """The implicit reward of a policy. Build with :func:`prb_jax.load` and `reference` or `reference_free`.

    Attributes:
      policy: Language model; its `score_fn` computes log-probabilities of responses.
      reference: Model from which the policy was trained, in the same form; None if reference-free.
      beta: Factor of the rewards.
      together: How log-probabilities of tokens become one number: see `logprobs` of :func:`prb_jax.load`.
    """

    policy: RewardModel = field(repr=False)
    reference: RewardModel | None = field(repr=False)
    beta: float
    together: Together

    has_prompt: ClassVar[bool] = True
    has_heading: ClassVar[bool] = True

    __repr__ = short_repr

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self.policy.name

    @property
    def reader(self) -> Reader:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The reader of the policy, which both models share."""
        return self.policy.reader

    @property
    def mesh(self) -> Mesh:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The devices."""
        return self.policy.mesh

    @property
    def attention(self) -> str:
        """Name of the policy's attention implementation."""
        return self.policy.attention

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the policy."""
        return self.policy.tokenizer

    def identity(self) -> Mapping[str, Any]:
        """Return everything about both models that decides the rewards, JSON-ready."""
        reference = None if self.reference is None else dict(self.reference.source)
        return {
            **self.policy.identity(),
            "readout": "implicit",
            "reference": reference,
            "beta": self.beta,
            "logprobs": self.together,
        }

    def score(
        self,
        comparisons: Records,
        *,
        profile_posts: int | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
    ) -> np.ndarray | list[np.ndarray]:
        """Return the rewards of every response; arguments and errors as in :meth:`RewardModel.score`."""
        view = self.reader.view(ViewOptions(profile_posts=profile_posts, max_length=max_length))
        return self._in_order(comparisons, view=view, batch_tokens=batch_tokens)

    def stream(
        self,
        comparisons: Sequence[Comparison],
        *,
        view: View | None = None,
        batch_tokens: int | None = None,
        skip: Skip = skip_nothing,
    ) -> Iterator[ScoredBatch]:
        """Yield the rewards of one batch at a time; arguments as in `Scorer.stream`."""
        view = view or self.reader.view(ViewOptions())
        return stream_scores(
            comparisons,
            encode=functools.partial(self.reader.encode, view=view),
            dispatch=self.dispatch,
            options=self.policy.batch_options(batch_tokens),
            skip=skip,
            lanes=lanes(self.mesh),
        )

    def dispatch(self, batch: Batch) -> jax.Array:
        """Start scoring a host batch with both models and return its pending rewards."""
        rewards = self.policy.run(batch)
        if self.reference is not None:
            rewards = rewards - self.reference.run(batch)
        return self.beta * rewards

    def sees_users(self, comparisons: Sequence[Comparison], view: View) -> bool:
        """Return whether a post is in a prompt."""
        return view.profile_posts > 0 and any(one.profile for one in comparisons)

    def explain_scores(self) -> str:
        """Return a sentence on the weights that may explain unusable rewards."""
        models = [self.policy] if self.reference is None else [self.policy, self.reference]
        return " ".join(filter(None, (model.explain_scores() for model in models)))

    def own_figures(self, comparisons: Sequence[Comparison]) -> dict[str, Any]:
        """Return the bytes of the weights of both models, as they are held."""
        models = {"policy": self.policy, "reference": self.reference}
        held = {name: one.report.bytes_held for name, one in models.items() if one and one.report}
        return {"implicit": {"bytes_held": held, "beta": self.beta}}


def load_implicit(model: str, options: LoadOptions) -> ImplicitRewards:
    """Load a policy and its reference.

    Raises:
      RunError: Options contradict each other.
      CheckpointError: A model is not a language model, or the reference cannot read the policy's tokens.
      MeshError: The mesh does not fit the devices or the models.
    """
    together = options.logprobs
    if options.reference is None and not options.reference_free:
        raise RunError("beta, logprobs: require --reference BASE or --reference-free")
    if options.reference is not None and options.reference_free:
        raise RunError("reference_free: expected only one of --reference and --reference-free")
    if options.reference is not None and together != "sum":
        raise RunError(f"logprobs: {together} is for --reference-free: leave it out beside a reference")
    if options.readout is not None:
        raise RunError("readout: an implicit reward has no head to read: leave it out")
    if isinstance(options.beta, str) or not 0 < options.beta < math.inf:
        raise RunError(f"beta: expected a number above 0, found {options.beta!r}")
    policy = _load(model, options)
    if options.reference is None:
        return ImplicitRewards(policy=policy, reference=None, beta=options.beta, together=together)
    alike = replace(options, dtype=policy.dtype, revision=None, base=None, tokenizer=None)
    reference = _load(options.reference, alike)
    _check_alike(policy, reference)
    shorter = min(one.reader.config.max_position_embeddings for one in (policy, reference))
    config = replace(policy.reader.config, max_position_embeddings=shorter)
    policy = replace(policy, reader=replace(policy.reader, config=config))
    return ImplicitRewards(policy=policy, reference=reference, beta=options.beta, together=together)


def _load(model: Any, options: LoadOptions) -> RewardModel:
    opened = open_language_model(model, options)
    loaded = load_reward_model(opened)
    program = make_logprob_fn(
        loaded.decoder,
        mesh=loaded.mesh,
        dtype=jnp.dtype(loaded.dtype),
        together=options.logprobs,
        shardings=jax.tree.map(lambda leaf: leaf.sharding, loaded.params),
    )
    return replace(loaded, score_fn=program, reader=ResponseReader(**vars(loaded.reader)))


def _check_alike(policy: RewardModel, reference: RewardModel) -> None:
    """Raise CheckpointError for a reference that cannot read the streams of the policy."""
    assert isinstance(policy.tokenizer, ChatTokenizer)
    assert isinstance(reference.tokenizer, ChatTokenizer)
    if reason := why_other_tokenizer(policy.tokenizer, reference.tokenizer):
        raise CheckpointError(f"--reference {reference.name}: {reason}")

    def shaped(config: DecoderConfig) -> tuple[Any, ...]:
        return config.sliding_window, config.taps, config.num_attention_heads, config.head_dim

    if policy.streams != reference.streams or shaped(policy.decoder) != shaped(reference.decoder):
        raise CheckpointError(
            f"--reference {reference.name}: its attention has another shape than that of {policy.name}: expected the "
            "model from which the policy was trained"
        )
