"""`algorithm=dpo`: the policy learns which response of a pair is preferred, regularised towards its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.behaviour.generation.policy import Policy
from prb_jax.behaviour.rl.numbers import dpo_loss
from prb_jax.behaviour.rl.objective import Actor, Extras, Means, Objective, Targets, read_policy
from prb_jax.behaviour.rl.rollouts import Rollouts, ended_response
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.errors import DataError, quote
from prb_jax.models.decoder import Params
from prb_jax.records.comparison import Comparison
from prb_jax.scoring.reader import encode_comparisons
from prb_jax.text.view import View
from prb_jax.trees.streams import StreamBatch
from prb_jax.trees.tree import Tree


def encode_pairs(
    comparisons: Sequence[Comparison], policy: Policy, *, profile_posts: int, max_length: int | None
) -> Iterator[Tree]:
    """Yield the trees of labelled pairs, the chosen response first, each up to its last stop token.

    Text that the template writes after this token is not part of a response. If the template writes no stop token, the
    policy's first stop token is appended. Tokens that both responses begin with belong to the prefix: their log-ratios
    are equal and cancel in the loss.

    Raises:
      DataError: a comparison is not a pair with different labels, or does not fit; names it.
    """
    for comparison in comparisons:
        labels = comparison.labels
        if len(comparison.responses) != 2 or labels is None or labels[0] == labels[1]:
            raise DataError(
                f"comparison {quote(comparison.id)}: dpo expects two responses with different labels, found "
                f"{len(comparison.responses)} with the labels {quote(labels)}"
            )
    limit = policy.context if max_length is None else max_length
    whole = encode_comparisons(comparisons, policy.tokenizer, view=View(profile_posts, max_length=limit))
    for comparison, tree in zip(comparisons, whole, strict=True):
        responses = [ended_response(response, policy) for response in tree.responses]
        if len(tree.prefix) + max(map(len, responses)) > limit:  # a stop token needs room
            view = View(profile_posts, max_length=limit - 1)
            (tree,) = encode_comparisons([comparison], policy.tokenizer, view=view)
            responses = [ended_response(response, policy) for response in tree.responses]
        if not len(tree.prefix):
            raise DataError(f"comparison {quote(comparison.id)}: its prompt has no token")
        assert comparison.labels is not None
        if comparison.labels[0] < comparison.labels[1]:
            responses.reverse()
        ends = tuple(len(response) - 1 for response in responses)
        yield Tree(tree.prefix, tuple(responses), ends, tree.truncation)


def pair_targets(batch: Rollouts, rows: np.ndarray, settings: PpoSettings) -> Targets:
    """Return the targets of :func:`pair_loss` for a minibatch."""
    mask = batch.mask[rows]
    of_each = np.ones(mask.shape[:2], np.float32)
    return Targets(mask=mask, reference=batch.reference[rows], weights=of_each / len(rows))


def pair_loss(
    actor: Actor, inputs: Mapping[str, Any], frozen: Params, batch: StreamBatch, extras: Extras
) -> tuple[jax.Array, Means]:
    """Return the loss of DPO and its sums."""
    (reads, targets), loss = extras, actor.settings.loss
    _, logprobs, _ = read_policy(actor, inputs, frozen, batch, reads)
    mask, weights = jnp.asarray(targets.mask), jnp.asarray(targets.weights).reshape(-1, 2)[:, 0]
    ratios = (jnp.where(mask > 0, logprobs - jnp.asarray(targets.reference), 0.0)).sum(axis=-1)
    chosen, rejected = ratios.reshape(-1, 2).T
    losses = dpo_loss(chosen, rejected, beta=loss.dpo_beta, label_smoothing=loss.label_smoothing)
    total = (losses * weights).sum()
    sums = {
        "loss": total,
        "accuracy": ((chosen > rejected) * weights).sum(),
        "margin": (loss.dpo_beta * (chosen - rejected) * weights).sum(),
    }
    return total, Means(sums)


DPO = Objective(loss=pair_loss, targets=pair_targets, encode=encode_pairs)
