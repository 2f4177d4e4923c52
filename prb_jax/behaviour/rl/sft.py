"""`algorithm=sft`: the policy learns to write the preferred responses of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.rl.objective import Actor, Extras, Means, Objective, Targets, read_policy
from prb_jax.behaviour.rl.rollouts import Rollouts, ended_response
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.errors import DataError, quote
from prb_jax.models.decoder import Params
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.view import View
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree, common_run


def encode_preferred(
    comparisons: Sequence[Comparison], policy: Policy, *, profile_posts: int, max_length: int | None
) -> Iterator[Tree]:
    """Yield trees with one response each, the one with the highest label, after the same prompt as in sampling.

    The response is rendered by the template, up to its last stop token. If the template writes none, the policy's first
    stop token is appended; otherwise the policy would not learn to end.

    Raises:
      DataError: a comparison has no labels, or does not fit; names it.
    """
    limit = policy.context if max_length is None else max_length
    alone = []
    for comparison in comparisons:
        if comparison.labels is None:
            raise DataError(
                f"comparison {quote(comparison.id)}: sft expects labelled responses, found no label"
            )
        best = comparison.responses[int(np.argmax(comparison.labels))]
        alone.append(Comparison(id=comparison.id, prompt=comparison.prompt, responses=[best]))
    bare = policy.encode(alone, profile_posts=0, limit=limit)
    whole = encode_comparisons(alone, policy.tokenizer, view=View(0))
    prompts = policy.encode(comparisons, profile_posts=profile_posts, limit=limit)
    for comparison, start, conversation, prompt in zip(comparisons, bare, whole, prompts, strict=True):
        ids = conversation.sequence(0)
        shared = common_run([start.ids, ids])
        response = ended_response(ids[shared:], policy)
        if len(prompt.ids) + len(response) > limit:
            (prompt,) = policy.encode([comparison], profile_posts=profile_posts, limit=limit - len(response))
        prefix = prompt.ids[: len(prompt.ids) - len(start.ids) + shared]
        yield Tree(prefix, (response,), (len(response) - 1,))


def text_targets(batch: Rollouts, rows: np.ndarray, settings: PpoSettings) -> Targets:
    """Return the targets of :func:`text_loss` for a minibatch."""
    mask = batch.mask[rows]
    return Targets(weights=mask / mask.sum())


def text_loss(
    actor: Actor, inputs: Mapping[str, Any], frozen: Params, batch: StreamBatch, extras: Extras
) -> tuple[jax.Array, Means]:
    """Return the mean cross-entropy over the tokens of preferred responses, and its sums."""
    reads, targets = extras
    _, logprobs, entropy = read_policy(actor, inputs, frozen, batch, reads)
    weights = jnp.asarray(targets.weights)
    total = -(logprobs * weights).sum()
    return total, Means({"loss": total, "entropy": (entropy * weights).sum()})


SFT = Objective(loss=text_loss, targets=text_targets, encode=encode_preferred, has_reference=False)
