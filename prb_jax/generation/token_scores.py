"""Log-probabilities and rewards of every token of given responses, and of tokens that could have stood there.

One forward pass of the policy over a tree of responses gives the log-probability of each of their tokens and the C most
likely ones in its place. One forward pass of the reward model gives the reward of every prefix of a response, and its
keys and values are then the caches on which all candidates are tried at once, as a tree of one-token responses.

Letters: B trees, K responses, R tokens of each, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prb_jax.data.comparison import Comparison
from prb_jax.errors import DataError, quote, short_repr
from prb_jax.generation.policy import Policy
from prb_jax.generation.programs import make_program, prompt_columns
from prb_jax.generation.prompts import comparison_prompts
from prb_jax.generation.steps import Program, token_rewards
from prb_jax.metrics.policy_scores import TokenFacts
from prb_jax.models.cache import PrefixCache, SuffixCache, layers_of, try_tokens
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.decoder import Params, decode_tree, decode_tree_keeping
from prb_jax.models.decoder_layer import last_norm
from prb_jax.models.head import states_before_tokens
from prb_jax.readouts.score_tree import is_pointwise
from prb_jax.runs.progress import compiling
from prb_jax.scoring.reward_model import RewardModel
from prb_jax.sharding import batch_sharding, mesh_shape, replicated, to_global
from prb_jax.text.tokenizer import ChatTokenizer
from prb_jax.text.view import ViewOptions
from prb_jax.trees.batches import Bucket, TreeBatch, make_batch
from prb_jax.trees.shapes import round_up
from prb_jax.trees.tree import Tree

STEPS_TOGETHER = 16
"""Steps whose candidates are tried in one pass; the length of responses in a batch is a multiple of it."""


@dataclass(frozen=True, eq=False)
class PolicyTokens:
    """Log-probabilities of a policy for the tokens of K responses."""

    ids: tuple[np.ndarray, ...]  # int32 [T] of each response
    logprobs: tuple[np.ndarray, ...]  # float32 [T] of each
    tried: tuple[np.ndarray, ...]  # int32 [T, C] of each, the most likely tokens
    tried_logprobs: tuple[np.ndarray, ...]  # float32 [T, C] of each

    __repr__ = short_repr

    def facts(self, whole: Sequence[float] | np.ndarray) -> list[TokenFacts]:
        """Return what is known of each response beside its reward ``whole`` where no prefix has a reward."""
        rewards = map(float, whole)
        return [
            TokenFacts(of_response, reward)
            for of_response, reward in zip(self.logprobs, rewards, strict=True)
        ]


def reward_program(model: RewardModel) -> Program:
    """Return the static settings of a reward model that is run token by token."""
    return make_program(model.decoder, mesh=model.mesh, dtype=jnp.dtype(model.dtype))


def why_not_by_token(reward: Any) -> str | None:
    """Return why a scorer gives no rewards of the prefixes of a response; None where it does."""
    if not isinstance(reward, RewardModel):
        return "it is no reward model with weights"
    if not isinstance(reward.tokenizer, ChatTokenizer) or not isinstance(reward.config, DecoderConfig):
        return "it is an encoder: it reads whole responses alone"
    if not is_pointwise(reward.config):
        return "its head looks at more than one token: it reads whole responses alone"
    return None


def why_not_token_level(reward: Any, policy: Policy) -> str | None:
    """Return why a scorer gives no rewards of prefixes for this policy's tokens; None where it does."""
    return why_not_by_token(reward) or why_other_tokenizer(policy.tokenizer, reward.tokenizer)


def why_other_tokenizer(policy: ChatTokenizer, reward: ChatTokenizer) -> str | None:
    """Return the first difference between two tokenizers' vocabularies; None where they are the same."""
    ours, theirs = policy.tokenizer.get_vocab(), reward.tokenizer.get_vocab()
    if ours == theirs:
        return None
    token = min(
        (token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, 1 << 40), token),
    )
    return (
        f"its tokenizer is another one than the policy's ({policy.name}): token {quote(token)} is {theirs.get(token)}, "
        f"expected {ours.get(token)}"
    )


def read_policy(
    policy: Policy, comparisons: Sequence[Comparison], *, profile_posts: int, candidates: int, limit: int
) -> list[PolicyTokens]:
    """Return the policy's log-probabilities of the responses of some comparisons.

    Args:
      policy: read with its own prompts, as `prb sample` shows them.
      comparisons: their responses are read as the continuation of the prompt, without a token that ends a text.
      profile_posts: at most this many posts are shown.
      candidates: C, 0 for none.
      limit: most tokens of prompt and response.

    Raises:
      DataError: a response without a token, or with one that the model has no embedding of; a prompt that does not fit.
    """
    vocab_size, trees = policy.config.vocab_size, []
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
    batch = _batch(trees, policy.mesh)
    program = _policy_program(policy.program, candidates)
    with compiling(program, batch.prefix.shape, batch.responses.shape):
        arrays = [np.asarray(x) for x in program(policy.params, batch)]
    return [
        PolicyTokens(tree.responses, *(_cut(array[row], tree.responses) for array in arrays))
        for row, tree in enumerate(trees)
    ]


def read_rewards(
    model: RewardModel,
    comparisons: Sequence[Comparison],
    tokens: Sequence[PolicyTokens],
    whole: Sequence[np.ndarray],
) -> list[list[TokenFacts]]:
    """Return all that is known of the responses, with the rewards of every prefix and of the candidates after each.

    Args:
      model: with a head that reads one token, and the policy's tokenizer.
      comparisons: with the user and the profile that the model is shown.
      tokens, whole: of the same comparisons: what the policy says of them, and the rewards [K] of whole responses.
    """
    ids, candidates = [of_policy.ids for of_policy in tokens], tokens[0].tried[0].shape[1]
    batch = _batch(reward_trees(model, comparisons, ids), model.mesh)
    tried = np.zeros((*batch.responses.shape, candidates), np.int32)
    for row, of_policy in enumerate(tokens):
        for k, listed in enumerate(of_policy.tried):
            tried[row, k, : len(listed)] = listed
    program = _reward_program(reward_program(model), model.readout)
    with compiling(program, batch.prefix.shape, tried.shape):
        placed = to_global(tried, batch_sharding(model.mesh, tried.ndim))
        start, rewards, of_tried = map(np.asarray, program(model.params, batch, placed))
    facts = []
    for row, (of_policy, of_whole) in enumerate(zip(tokens, whole, strict=True)):
        facts.append([])
        for k, token_facts in enumerate(of_policy.facts(of_whole)):
            length = len(token_facts.logprobs)
            known = replace(token_facts, rewards=rewards[row, k, :length], start=float(start[row]))
            if candidates:
                known = replace(
                    known,
                    tried_logprobs=of_policy.tried_logprobs[k],
                    tried_rewards=of_tried[row, k, :length],
                    listed=(of_policy.tried[k] == of_policy.ids[k][:, None]).any(axis=1),
                )
            facts[-1].append(known)
    return facts


def reward_trees(
    model: RewardModel,
    comparisons: Sequence[Comparison],
    ids: Sequence[tuple[np.ndarray, ...]],
    *,
    room: int | None = None,
) -> list[Tree]:
    """Return the trees of a reward model: its own prompt with the assistant's turn opened, then given token ids.

    ``room`` is for the tokens that responses may have; that of the longest one if not given.

    Raises:
      DataError: a prompt that does not fit beside them.
    """
    assert isinstance(model.tokenizer, ChatTokenizer)
    view, trees = model.reader.view(ViewOptions()), []
    for comparison, responses in zip(comparisons, ids, strict=True):
        (prompt,) = comparison_prompts(
            [comparison],
            model.tokenizer,
            profile_posts=view.profile_posts,
            limit=model.reader.limit(view) - (max(map(len, responses)) if room is None else room),
            order_claim=view.order_claim,
        )
        trees.append(_tree(prompt.ids, responses))
    return trees if model.reader.prompts is None else model.reader.prompts.encode(trees, comparisons)


def _tree(prompt: np.ndarray, responses: tuple[np.ndarray, ...]) -> Tree:
    return Tree(prompt, responses, tuple(len(ids) - 1 for ids in responses))


def _cut(array: np.ndarray, responses: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """The parts [T, ...] of an array [K, R, ...] that belong to the tokens of the responses."""
    return tuple(array[k, : len(ids)] for k, ids in enumerate(responses))


def _batch(trees: Sequence[Tree], mesh: Any) -> TreeBatch:
    prefix, responses, length = (max(sizes) for sizes in zip(*(tree.shape for tree in trees), strict=True))
    multiple = 16 if mesh.devices.flat[0].platform == "cpu" else 128
    bucket = Bucket(
        round_up(prompt_columns(prefix + 1), multiple), responses, round_up(max(length, 16), multiple)
    )
    batch = make_batch(trees, bucket, batch=round_up(len(trees), mesh_shape(mesh).batch_shards))
    return jax.tree.map(lambda x: to_global(np.asarray(x), batch_sharding(mesh, x.ndim)), batch)


@functools.lru_cache(maxsize=16)
def _policy_program(program: Program, candidates: int) -> Any:
    """(params, batch) -> logprobs [B, K, R], candidates [B, K, R, C] and their logprobs."""

    def read(params: Params, batch: TreeBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
        states = decode_tree(params, batch, attention=program.attention, **program.settings)
        before = states_before_tokens(states, batch)[:, :, :-1]

        def of_response(response: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            states, tokens = response
            normed = last_norm(params, states, program.config).astype(program.dtype)
            logits = program.head.next_token(params, normed)
            logprobs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            best, ids = lax.top_k(logprobs, candidates)
            return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0], ids, best

        responses = (before.swapaxes(0, 1), jnp.asarray(batch.responses).swapaxes(0, 1))
        arrays = lax.map(of_response, responses)  # one response at a time: the logits are [B, R, V]
        return tuple(x.swapaxes(0, 1) for x in arrays)  # pyright: ignore[reportReturnType]

    return jax.jit(read, out_shardings=replicated(program.mesh))


@functools.lru_cache(maxsize=16)
def _reward_program(program: Program, readout: str) -> Any:
    """(params, batch, candidates [B, K, R, C]) -> rewards of the prompts [B], prefixes [B, K, R], candidates."""

    def read(params: Params, batch: TreeBatch, tried: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        decoded = decode_tree_keeping(params, batch, **program.settings)
        width = batch.prefix.shape[1]
        rows, responses, length = batch.responses.shape
        values = token_rewards(program.config, readout, params, decoded.states[:, width - 1 :])
        rewards = values[:, 1:].reshape(rows, responses, length)
        if not tried.size:
            return values[:, 0], rewards, jnp.zeros(tried.shape, jnp.float32)
        depth, _, _, kv_heads, head_dim = decoded.keys.shape
        shape = (depth, rows, responses, length, kv_heads, head_dim)
        both = (decoded.keys, decoded.values)
        before = [tuple(x[:, :, :width].transpose(0, 1, 3, 2, 4)) for x in both]
        of_responses = [tuple(x[:, :, width:].reshape(shape).transpose(0, 1, 2, 4, 3, 5)) for x in both]
        prefix = PrefixCache(before[0], before[1], jnp.asarray(batch.prefix_lengths))
        suffix = SuffixCache(of_responses[0], of_responses[1], jnp.full((rows, responses), length, jnp.int32))
        layers = layers_of(params)
        candidates, parts = tried.shape[-1], length // STEPS_TOGETHER

        def of_part(ids_and_start: tuple[jax.Array, jax.Array]) -> jax.Array:
            ids, first = ids_and_start
            steps = first + jnp.arange(STEPS_TOGETHER)
            places = jnp.broadcast_to(steps[:, None], ids.shape).reshape(rows, responses, -1)
            ids = ids.reshape(places.shape)
            part = try_tokens(params, layers, ids, places, prefix, suffix, **program.settings)
            return token_rewards(program.config, readout, params, part.states)

        split = tried.reshape(rows, responses, parts, STEPS_TOGETHER, candidates)
        by_part = lax.map(of_part, (jnp.moveaxis(split, 2, 0), STEPS_TOGETHER * jnp.arange(parts)))
        return values[:, 0], rewards, jnp.moveaxis(by_part, 0, 2).reshape(tried.shape)

    return jax.jit(read, out_shardings=replicated(program.mesh))
