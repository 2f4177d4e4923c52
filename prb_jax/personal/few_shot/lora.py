"""Low-rank adapters of the backbone for groups of people, and a new person as a mixture of the groups.

    r_c(x) = the reward of the backbone with the adapter W + (alpha / rank) A_c B_c and the head of group c
    w_c = pi_c prod_i sigmoid(r_c(chosen_i) - r_c(rejected_i))^s / Z,   r_u(x) = sum_c w_c r_c(x)

First one adapter is trained on all comparisons of seen people with the Bradley-Terry loss. Then the people are dealt to
groups and each group trains the adapter on, on its own comparisons alone; each person goes to the group that predicts
the person's comparisons best, and so on for some rounds: hard expectation maximisation of a mixture of reward models
(MaxMin-RLHF, arXiv 2402.08925, where each group owns a LoRA, arXiv 2106.09685, instead of a whole model). The first
groups are those of k-means on the directions of the people's offsets (`offset`) in the features of the frozen backbone.
In ``lora_users`` each seen person is a group of their own.

The state of a new person is the posterior w of the groups given the k comparisons, with the likelihood to the power s,
which the validation part chooses, as it does the number of groups (one included) and of rounds. At k = 0 it is the
prior pi, the share of the seen people in each group. No gradient is needed for a new person: a response is scored by
the backbone once for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import DataError
from prb_jax.personal.few_shot import offset
from prb_jax.personal.few_shot.backbone import TRAINS, Adapter, AdapterSettings, Backbone, unstacked
from prb_jax.personal.few_shot.choices import Choices, Context, Responses, group
from prb_jax.personal.few_shot.fitting import Validation, numpy_rng
from prb_jax.personal.few_shot.protocol import Fitted, Method, State, adapt_users
from prb_jax.personal.few_shot.settings import check_numbers

_MOST = 64
"""Comparisons of a person that decide the first group."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(AdapterSettings):
    """Settings of adapters of groups.

    Attributes:
      clusters: numbers of groups, of which the validation part chooses one, or a single adapter for everybody.
      rounds: times that the groups are trained and the people dealt to them anew.
    """

    clusters: tuple[int, ...] = (2, 4)
    rounds: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, least={"clusters": 2, "rounds": 1})


@dataclass(frozen=True, kw_only=True)
class LoraUsersSettings(AdapterSettings):
    """Settings of an adapter for each seen person, who has few comparisons to train it on."""

    own_steps: int = 10


Grouping = Callable[[Choices, Choices, Any, np.random.Generator], Iterator[tuple[np.ndarray, int]]]
"""(seen, validation, settings, generator) -> the first group of each person, int [P], and the rounds."""


@dataclass(frozen=True)
class _Tried:
    """Adapters of groups, the share of the people in each, and the rewards of all responses under them."""

    adapters: Sequence[Adapter]
    prior: np.ndarray
    rewards: np.ndarray
    rounds: int


def fit(
    seen: Choices,
    validation: Choices,
    *,
    settings: AdapterSettings,
    key: jax.Array,
    mesh: Mesh | None = None,
    grouping: Grouping,
) -> Fitted:
    """Train the adapters; the validation part chooses their number, the rounds and the sharpness."""
    seen.require("lora", NEEDS)
    backbone: Backbone = seen.backbone  # pyright: ignore[reportAssignmentType] - required above
    rng = numpy_rng(key)
    best, fitted = np.inf, None
    for tried in _tried(seen, validation, backbone, settings, rng, grouping):
        judge = Validation(replace(validation, features=tried.rewards), settings.validation_shots)
        for sharpness in settings.sharpness:
            numbers = {
                "clusters": np.int32(len(tried.adapters)),
                "rounds": np.int32(tried.rounds),
                "sharpness": np.float32(sharpness),
            }
            adapters = jax.tree.map(lambda *leaves: np.stack(leaves), *tried.adapters)
            one = Fitted({"prior": tried.prior, "adapters": adapters}, numbers, settings)
            loss = judge.loss(METHOD, one, key=key, mesh=mesh)
            if loss < best:
                best, fitted = loss, one
    if fitted is None:
        raise DataError("lora: the loss on the validation part is not a finite number")
    return replace(fitted, numbers={**fitted.numbers, "validation_loss": np.float32(best)})


def _tried(
    seen: Choices,
    validation: Choices,
    backbone: Backbone,
    settings: AdapterSettings,
    rng: np.random.Generator,
    grouping: Grouping,
) -> Iterator[_Tried]:
    """The adapter of everybody, then those of the groups, round after round."""
    pairs, person = np.stack([seen.chosen, seen.rejected], axis=1), seen.person
    seed = int(rng.integers(2**31))
    pooled = backbone.trainer(pairs, settings=settings, steps=settings.steps, seed=seed)(np.arange(len(seen)))
    yield _Tried([pooled], np.ones(1, np.float32), backbone.rewards([pooled], settings=settings), 0)
    train = backbone.trainer(pairs, settings=settings, steps=settings.own_steps, seed=seed)
    for groups, rounds in grouping(seen, validation, settings, rng):
        count = int(groups.max()) + 1
        adapters = [pooled] * count
        for number in range(rounds):
            members = [np.flatnonzero(groups[person] == own) for own in range(count)]
            adapters = [
                train(own, start) if len(own) else start for own, start in zip(members, adapters, strict=True)
            ]
            rewards = backbone.rewards(adapters, settings=settings)
            shares = (np.bincount(groups, minlength=count) + 1) / (len(groups) + count)
            yield _Tried(adapters, shares.astype(np.float32), rewards, number + 1)
            margins = rewards[seen.chosen] - rewards[seen.rejected]
            told = np.zeros((seen.people, count))
            np.add.at(told, person, -np.logaddexp(0, -margins.astype(np.float64)))
            before, groups = groups, told.argmax(axis=1)
            if (groups == before).all():
                break


def _clusters(
    seen: Choices, validation: Choices, settings: LoraSettings, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, int]]:
    """Groups of people whose offsets point the same way."""
    from scipy.cluster.vq import kmeans2  # scipy takes long to import

    key = jax.random.key(0)
    fitted = offset.fit(seen, validation, settings=offset.OffsetSettings(), key=key)
    rows = group(seen, seed=0)
    rows = rows.first(_MOST, width=min(_MOST, rows.places.shape[1]))
    own = np.asarray(adapt_users(offset.METHOD, fitted, seen, rows, key=key)["offset"], np.float64)
    own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
    for count in sorted(settings.clusters):
        if count < len(own):
            yield kmeans2(own, _far_apart(own, count, rng), iter=30, minit="matrix")[1], settings.rounds


def _far_apart(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows to start k-means from, each drawn in proportion to its squared distance from those before (k-means++)."""
    found = [rows[rng.integers(len(rows))]]
    while len(found) < count:
        apart = np.min([np.sum((rows - one) ** 2, axis=1) for one in found], axis=0) + 1e-12
        found.append(rows[rng.choice(len(rows), p=apart / apart.sum())])
    return np.stack(found)


def _everyone_alone(
    seen: Choices, validation: Choices, settings: LoraUsersSettings, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, int]]:
    """Each person is a group."""
    yield np.arange(seen.people), 1


def represent(fitted: Fitted, choices: Choices) -> Choices:
    """Return the choices with the rewards under each adapter as features, [R, C]."""
    choices.require("lora", NEEDS)
    adapters = unstacked(fitted.arrays["adapters"])
    return replace(choices, features=choices.backbone.rewards(adapters, settings=fitted.settings))  # pyright: ignore[reportOptionalMemberAccess]


def empty_state(fitted: Fitted) -> State:
    """Return the shares of the seen people."""
    return {"weights": jnp.asarray(fitted.arrays["prior"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the posterior of the groups, float32 [C]."""
    told = jnp.sum(context.mask[:, None] * jax.nn.log_sigmoid(context.deltas), axis=0)
    logits = jnp.log(fitted.arrays["prior"]) + fitted.numbers["sharpness"] * told
    return {"weights": jax.nn.softmax(logits)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return sum_c w_c r_c, float32 [K]."""
    return responses.features @ state["weights"]


NEEDS = (TRAINS,)
METHOD = Method(
    "lora",
    LoraSettings,
    partial(fit, grouping=_clusters),
    adapt,
    score,
    empty_state,
    needs=NEEDS,
    represent=represent,
)
USERS = replace(
    METHOD, name="lora_users", settings=LoraUsersSettings, fit=partial(fit, grouping=_everyone_alone)
)
