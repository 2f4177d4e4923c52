"""Nearest users by common votes: people who judged the same texts alike will judge the next one alike.

    x_u,i  in [-1, 1]: the mean vote of person u on text i (1 chosen or agreed with, -1 rejected or disagreed with)
    s_u,n  = x_u.x_n / sqrt((|x_u|^2 + c) (|x_n|^2 + c))
    r_u(i) = (lambda p_i + sum_n s_u,n x_n,i) / (lambda + sum_n |s_u,n| [n voted on i])

over the N people of the largest |s|; p is the mean vote of everybody (popularity, which is the vote at k = 0).
Texts match only if they are identical, so people must judge the same texts. With ``mix`` the score is a r_u(i) + b v.e,
where v is pooled Bradley-Terry and a and b are fitted on the validation part; without it no features are read.
Neighbourhood collaborative filtering (Resnick and others 1994).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import DataError
from prb_jax.personal.few_shot.choices import Array, Choices, Context, Responses
from prb_jax.personal.few_shot.fitting import FitData, define, two_weights
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints, State
from prb_jax.records.options import option


@dataclass(frozen=True, kw_only=True)
class NearestSettings(FewShotSettings):
    """Settings of nearest users; of each tuple the validation part chooses one entry."""

    neighbours: Ints = option((20, 200), "N; everybody where there are fewer seen people", least=1)
    shrink: Floats = option(
        (1.0, 8.0), "c, which keeps people with few common texts from being near", above=0
    )
    prior: Floats = option(
        (0.3, 1.0, 3.0), "lambda, how many votes the popularity of a text counts for", above=0
    )
    mix: bool = option(True, "the pooled direction is added")
    l2: Floats = option((1e-3, 1e-2, 1e-1, 1.0), "penalties of the pooled direction", above=0)


def fit(data: FitData) -> Fitted:
    """Count the votes of the seen people, those in their profiles too.

    Raises:
      DataError: no text was judged by two people.
    """
    settings, (votes, counts) = data.settings, _votes(data.seen)
    judges = np.sum(counts > 0, axis=0)
    if (judges < 2).all():
        raise DataError("nearest needs responses that several people judged: every text has one judge")
    mean = np.where(counts > 0, votes / np.maximum(counts, 1), 0)[np.sum(counts, axis=1) > 0]
    arrays = {
        "votes": mean.astype(np.float32),
        "popularity": (mean.sum(0) / (judges + 1.0)).astype(np.float32),
        "direction": np.zeros(data.seen.features.shape[1], np.float32),
    }
    alone = {"vote_weight": 1.0, "pooled_weight": 0.0}
    best = data.best(
        data.fitted(arrays, {"neighbours": np.int32(count), "shrink": shrink, "prior": prior, **alone})
        for count, shrink, prior in product(settings.neighbours, settings.shrink, settings.prior)
    )
    if not settings.mix:
        return best
    pooled, l2 = data.pooled()
    margins, places = data.margins(best)
    vote_weight, common = two_weights(margins, data.validation.deltas[places] @ pooled)
    numbers = {**best.numbers, "vote_weight": vote_weight, "pooled_weight": common, "l2": l2}
    return data.best([data.fitted({**arrays, "direction": pooled}, numbers)])


def judgements(choices: Choices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the users, texts and signs of all votes: 1 for a chosen text, -1 for a rejected one, and the votes in the
    profiles of the people who made the choices."""
    voters, voted, signs = choices.profile_votes()
    users = np.concatenate([choices.users, choices.users, voters])
    texts = np.concatenate([*choices.texts.T, voted])
    return users, texts, np.concatenate([np.ones(len(choices)), -np.ones(len(choices)), signs])


def _votes(choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the votes [U, I] and their counts."""
    users, texts, signs = judgements(choices)
    size = (choices.number_of_users, 1 + int(max(np.asarray(choices.items).max(), texts.max())))
    votes, counts = np.zeros(size, np.float32), np.zeros(size, np.float32)
    np.add.at(votes, (users, texts), signs)
    np.add.at(counts, (users, texts), 1)
    return votes, counts


def _places(fitted: Fitted) -> int:
    """Neighbours for which a state has room, the same for all numbers that are tried."""
    return min(max(fitted.settings.neighbours), len(fitted.arrays["votes"]))


def empty_state(fitted: Fitted) -> State:
    """Return neighbours without weight."""
    count = _places(fitted)
    return {"users": jnp.zeros(count, jnp.int32), "weights": jnp.zeros(count, jnp.float32)}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the nearest seen people, int32 [N], and their similarities, float32 [N]."""
    assert context.chosen.items is not None
    assert context.rejected.items is not None
    known = context.mask.astype(jnp.float32)
    items, signs = [context.chosen.items, context.rejected.items], [known, -known]
    posts = context.posts
    if posts is not None and posts.items is not None and posts.signs is not None:
        items.append(posts.items)
        signs.append(posts.signs * posts.mask * (posts.items >= 0))
    votes = fitted.arrays["votes"]
    places, sign = jnp.concatenate(items), jnp.concatenate(signs)
    mean_votes = jnp.zeros(votes.shape[1], jnp.float32).at[places].add(sign, mode="drop")
    counts = jnp.zeros(votes.shape[1], jnp.float32).at[places].add(jnp.abs(sign), mode="drop")
    mean_votes = mean_votes / jnp.maximum(counts, 1)
    shrink = fitted.numbers["shrink"]
    norms = (jnp.sum(mean_votes * mean_votes) + shrink) * (jnp.sum(votes * votes, axis=1) + shrink)
    similar = votes @ mean_votes / jnp.sqrt(norms)
    _, users = jax.lax.top_k(jnp.abs(similar), _places(fitted))
    near = jnp.arange(len(users)) < fitted.numbers["neighbours"]
    return {"users": users.astype(jnp.int32), "weights": similar[users] * near}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return the weighted mean vote of the neighbours and of everybody (0 for a text without votes) and the pooled
    reward, each with its weight, float32 [K]."""
    assert responses.items is not None
    votes, numbers = fitted.arrays["votes"], fitted.numbers
    known = responses.items < votes.shape[1]
    items = jnp.where(known, responses.items, 0)
    of_neighbours = votes[state["users"][:, None], items]
    total = numbers["prior"] * fitted.arrays["popularity"][items] + state["weights"] @ of_neighbours
    weight = jnp.abs(state["weights"]) @ (of_neighbours != 0)
    vote: Array = total / (numbers["prior"] + weight)
    pooled = responses.features @ fitted.arrays["direction"]
    return numbers["vote_weight"] * jnp.where(known, vote, 0.0) + numbers["pooled_weight"] * pooled


METHOD = define("nearest", NearestSettings, fit, adapt, score, empty_state, needs=("items",))
