"""Log-probabilities and rewards of every token of given responses, and of alternative tokens at each position.

One forward pass of the policy over packed streams gives the log-probability of each response token and of the C most
likely tokens at its position. The reward model reads these candidates in the same way. The candidates after the first t
tokens of a response form a tree of one-token responses, and the next step's tree extends its prefix. A stream therefore
holds prompt and responses once, with the candidates as leaves, and one forward pass gives all rewards.

Letters: S streams of N tokens, M states that are read in each, C candidates, T tokens of a response, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.generation.programs import make_program
from prb_jax.behaviour.generation.prompts import comparison_prompts
from prb_jax.behaviour.generation.reading import model_streams, place_streams
from prb_jax.behaviour.generation.steps import Program, token_rewards
from prb_jax.errors import DataError, quote, short_repr
from prb_jax.metrics.policy_scores import TokenFacts
from prb_jax.models.attention.streams import take_places
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_stream
from prb_jax.models.model import bind
from prb_jax.models.readouts.response_logprobs import map_logprobs
from prb_jax.models.readouts.score_tree import is_pointwise
from prb_jax.platform.sharding import batch_sharding, replicated, to_global
from prb_jax.records.comparison import Comparison
from prb_jax.runs.progress import compiling
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.scoring.scorer import Scorer
from prb_jax.text.prompts import why_other_tokenizer
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.in_order import length_step, pack_in_order
from prb_jax.trees.packing import SortedTrees, sort_trees
from prb_jax.trees.response_reads import response_reads
from prb_jax.trees.streams import StreamBatch, StreamOptions, make_stream_batch
from prb_jax.trees.tree import Tree, common_run


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """Log-probabilities of a policy for the tokens of K responses."""

    ids: tuple[np.ndarray, ...]  # int32 [T] for each response
    logprobs: tuple[np.ndarray, ...]  # float32 [T] for each response
    tried: tuple[np.ndarray, ...]  # int32 [T, C] for each response, the most likely tokens
    tried_logprobs: tuple[np.ndarray, ...]  # float32 [T, C] for each response

    __repr__ = short_repr

    def facts(self, whole: Sequence[float] | np.ndarray) -> list[TokenFacts]:
        """Return the facts of each response, given only the reward ``whole`` of the whole response."""
        rewards = map(float, whole)
        return [
            TokenFacts(of_response, reward)
            for of_response, reward in zip(self.logprobs, rewards, strict=True)
        ]


def reward_program(model: RewardModel) -> Program:
    """Return the static settings of a reward model that runs token by token."""
    return make_program(model.decoder, mesh=model.mesh, dtype=jnp.dtype(model.dtype))


def why_not_by_token(reward: Any) -> str | None:
    """Return why a scorer cannot reward prefixes of a response; None if it can."""
    if not isinstance(reward, RewardModel):
        weights = isinstance(reward, Scorer) and reward.has_weights
        return "it rewards only whole responses" if weights else "it is no reward model with weights"
    if not isinstance(reward.tokenizer, ChatTokenizer) or not isinstance(reward.config, DecoderConfig):
        return "it is an encoder: it reads only whole responses"
    if not is_pointwise(reward.config):
        return "its head uses more than one token: it reads only whole responses"
    return None


def why_not_token_level(reward: Any, policy: Policy) -> str | None:
    """Return why a scorer cannot reward prefixes in this policy's tokens; None if it can."""
    return why_not_by_token(reward) or why_other_tokenizer(policy.tokenizer, reward.tokenizer)


def read_policy(
    policy: Policy, comparisons: Sequence[Comparison], *, profile_posts: int, candidates: int, limit: int
) -> list[PolicyTokens]:
    """Return the policy's log-probabilities of the responses of some comparisons.

    Args:
      policy: Policy, which reads the same prompts as in `prb sample`.
      comparisons: Comparisons whose responses continue the prompt, without a token that ends a text.
      profile_posts: Maximum number of posts to show.
      candidates: C, 0 for none.
      limit: Maximum tokens of prompt and response.

    Raises:
      DataError: a response has no token or a token without embedding, or a prompt does not fit.
    """
    vocab_size = policy.config.vocab_size
    trees: list[Tree] = []
    for comparison in comparisons:
        responses = tuple(
            np.asarray(ids, np.int32) for ids in policy.tokenizer.tokenize(comparison.responses)
        )
        for number, ids in enumerate(responses):
            if not len(ids) or ids.max() >= vocab_size:
                raise DataError(
                    f"comparison {quote(comparison.id)}: response {number}: expected at least one token, all below "
                    f"{vocab_size}, found {len(ids)} tokens"
                )
        room = limit - max(map(len, responses))
        (prompt,) = policy.encode([comparison], profile_posts=profile_posts, limit=room)
        trees.append(_tree(prompt.ids, responses))
    options, program = _options(policy.program, trees), _policy_program(policy.program, candidates)
    longest = max(tree.shape[2] for tree in trees)
    found: dict[int, PolicyTokens] = {}
    for packed in pack_in_order(sort_trees(trees, options), options, most=options.tokens):
        batch, groups = make_stream_batch(trees, packed, options), [stream.members for stream in packed]
        of_streams = [[trees[member] for member in members] for members in groups]
        reads = response_reads(batch, of_streams, columns=longest, room=lambda count: length_step(count, 16))
        with compiling(program, batch.tokens.shape, reads.places.shape):
            split = batch_sharding(policy.mesh, 2)
            where = (to_global(np.asarray(x), split) for x in (reads.places, reads.tokens))
            arrays = list(map(np.asarray, program(policy.params, place_streams(batch, policy.mesh), *where)))
        for row, members in enumerate(groups):
            indices = iter(np.asarray(reads.index)[row])
            for member in members:
                ids = trees[member].responses
                of_each = [index[: len(one)] for one, index in zip(ids, indices, strict=False)]
                found[member] = PolicyTokens(ids, *(tuple(x[row, at] for at in of_each) for x in arrays))
    return [found[number] for number in range(len(trees))]


def read_rewards(
    model: RewardModel,
    comparisons: Sequence[Comparison],
    tokens: Sequence[PolicyTokens],
    whole: Sequence[np.ndarray],
) -> list[list[TokenFacts]]:
    """Return the facts of the responses, with rewards of every prefix and of the candidates after each prefix.

    Args:
      model: Reward model with a head that reads one token, and the policy's tokenizer.
      comparisons: Comparisons with the user and the profile that the model reads.
      tokens, whole: The policy's tokens, and the rewards [K] of whole responses, for the same comparisons.
    """
    trees = reward_trees(model, comparisons, [of_policy.ids for of_policy in tokens])
    steps = [
        _Step.of(number, k, t, tree, of_policy.tried[k][t])
        for number, (tree, of_policy) in enumerate(zip(trees, tokens, strict=True))
        for k, ids in enumerate(tree.responses)
        for t in range(len(ids))
        if of_policy.tried[k].size or t == len(ids) - 1
    ]
    tried = [[np.zeros(listed.shape, np.float32) for listed in of_policy.tried] for of_policy in tokens]
    along = [[np.zeros(0, np.float32)] * len(tree.responses) for tree in trees]
    for step, rewards, path in _read_steps(model, steps):
        of_step = tried[step.comparison][step.response][step.t]
        of_step[:] = rewards[: len(of_step)]
        if step.is_last:
            along[step.comparison][step.response] = path
    facts: list[list[TokenFacts]] = []
    for number, (of_policy, of_whole) in enumerate(zip(tokens, whole, strict=True)):
        facts.append([])
        for k, token_facts in enumerate(of_policy.facts(of_whole)):
            start, *rewards = along[number][k][-len(of_policy.ids[k]) - 1 :]
            known = replace(token_facts, rewards=np.asarray(rewards, np.float32), start=float(start))
            if of_policy.tried[k].size:
                known = replace(
                    known,
                    tried_logprobs=of_policy.tried_logprobs[k],
                    tried_rewards=tried[number][k],
                    listed=(of_policy.tried[k] == of_policy.ids[k][:, None]).any(axis=1),
                )
            facts[-1].append(known)
    return facts


@dataclass(frozen=True)
class _Step:
    """Candidate tokens after the first t tokens of a response."""

    # comparison, response, t: indices
    comparison: int
    response: int
    t: int
    is_last: bool  # t + 1 tokens are the whole response; its own token is then the last response of the tree
    tree: Tree  # one response for each token

    @staticmethod
    def of(comparison: int, response: int, t: int, tree: Tree, tried: np.ndarray) -> _Step:
        """Return the step for these candidates; the last step adds the response's own token."""
        ids = tree.responses[response]
        is_last = t == len(ids) - 1
        leaves = [tried[c : c + 1] for c in range(len(tried))] + ([ids[t:]] if is_last else [])
        prefix = np.concatenate([tree.prefix, ids[:t]])
        return _Step(comparison, response, t, is_last, Tree(prefix, tuple(leaves), (0,) * len(leaves)))


def _read_steps(model: RewardModel, steps: Sequence[_Step]) -> Iterator[tuple[_Step, np.ndarray, np.ndarray]]:
    """Yield every step with the rewards of its tokens, and the rewards along the path to its last token."""
    program, trees = reward_program(model), [step.tree for step in steps]
    run, options = _reward_program(program, model.readout), _options(program, trees)
    # Sort by prefix, longest first, so common prefixes are neighbours: a response is one run of tokens, followed by the
    # candidates after its prefixes.
    order = sorted(
        range(len(trees)), key=lambda index: trees[index].prefix.astype(">i4").tobytes(), reverse=True
    )
    shared = [common_run([trees[index].prefix for index in pair]) for pair in pairwise(order)]
    ordered = SortedTrees(
        order=np.asarray(order),
        tokens=np.asarray([trees[index].tokens for index in order]),
        reads=np.asarray([len(trees[index].responses) for index in order]),
        shared=np.asarray([0, *shared]),
        kept=np.zeros(len(order), np.int64),
    )
    for packed in pack_in_order(ordered, options, most=options.tokens):
        batch = make_stream_batch(trees, packed, options)
        reads, until = np.asarray(batch.reads), np.asarray(batch.until)
        with compiling(run, batch.tokens.shape):
            rewards = np.asarray(run(model.params, place_streams(batch, model.mesh)))
        for row, stream in enumerate(packed):
            at = 0
            for member in stream.members:
                leaves = reads[row, at : at + len(trees[member].responses)]
                at += len(leaves)
                path = np.flatnonzero(until[row, : leaves[-1] + 1] > leaves[-1])
                yield steps[member], rewards[row, leaves], rewards[row, path]


def reward_trees(
    model: RewardModel,
    comparisons: Sequence[Comparison],
    ids: Sequence[tuple[np.ndarray, ...]],
    *,
    room: int | None = None,
) -> list[Tree]:
    """Return the trees of a reward model: its own prompt with the assistant's turn opened, then given token ids.

    ``room`` is the number of tokens to reserve for responses; by default the length of the longest one.

    Raises:
      DataError: a prompt does not fit into the remaining context.
    """
    assert isinstance(model.tokenizer, ChatTokenizer)
    view, trees = model.reader.view(ViewOptions()), []
    limit = model.reader.limit(view)
    if (most := model.decoder.rope_switch) is not None:  # keys in a cache keep the angles of a shorter text
        limit = min(limit, most)
    for comparison, responses in zip(comparisons, ids, strict=True):
        (prompt,) = comparison_prompts(
            [comparison],
            model.tokenizer,
            profile_posts=view.profile_posts,
            limit=limit - (max(map(len, responses)) if room is None else room),
            order_claim=view.order_claim,
        )
        trees.append(_tree(prompt.ids, responses))
    return trees if model.reader.prompts is None else model.reader.prompts.encode(trees, comparisons)


def _tree(prompt: np.ndarray, responses: tuple[np.ndarray, ...]) -> Tree:
    return Tree(prompt, responses, tuple(len(ids) - 1 for ids in responses))


def _options(program: Program, trees: Sequence[Tree]) -> StreamOptions:
    """Return the stream options for these trees."""
    prefix, _, response = (max(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True))
    return model_streams(
        program, longest=length_step(prefix + response, 64), response=length_step(response, 64)
    )


@functools.lru_cache(maxsize=16)
def _policy_program(program: Program, candidates: int) -> Any:
    """(params, batch, places [S, M], tokens [S, M]) -> logprobs [S, M], candidates [S, M, C] and their logprobs."""

    def read(
        params: Params, batch: StreamBatch, places: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        decoder = bind(program.config, params)
        states = take_places(decode_stream(decoder, batch, reads_only=False, **program.forward), places)

        def of_run(logprobs: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            best, ids = lax.top_k(logprobs, candidates)
            return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], ids, best

        return map_logprobs(decoder, params, states, tokens, of_run, dtype=program.dtype)

    return jax.jit(read, out_shardings=replicated(program.mesh))


@functools.lru_cache(maxsize=16)
def _reward_program(program: Program, readout: str) -> Any:
    """(params, batch) -> the reward of the conversation up to each token, float32 [S, N]."""

    def read(params: Params, batch: StreamBatch) -> jax.Array:
        decoder = bind(program.config, params)
        states = decode_stream(decoder, batch, reads_only=False, **program.forward)
        return token_rewards(program.config, readout, params, states)

    return jax.jit(read, out_shardings=replicated(program.mesh))
