"""Low-rank adapters of the backbone for groups of people, and a new person as a mixture of the groups.

    r_c(x) = the reward of the backbone with the adapter W + (alpha / rank) A_c B_c and the head of group c
    w_c = pi_c prod_i sigmoid(r_c(chosen_i) - r_c(rejected_i))^s / Z,   r_u(x) = sum_c w_c r_c(x)

First one adapter is trained on all comparisons of seen people with the Bradley-Terry loss. Then the people are divided
into groups, and each group continues the training on its own comparisons. Each person moves to the group that predicts
the person's comparisons best, and this repeats for some rounds: hard expectation maximisation of a mixture of reward
models (MaxMin-RLHF, arXiv 2402.08925, but each group has a LoRA, arXiv 2106.09685, instead of a whole model). k-means
on the directions of the people's offsets (`offset`), in the features of the frozen backbone, gives the first groups.
In ``lora_users`` each seen person is a separate group.

The state of a new person is the posterior w of the groups given the k comparisons, with the likelihood to the power s,
which the validation part chooses, as it does the number of groups (one included) and of rounds. At k = 0 it is the
prior pi, the share of the seen people in each group. No gradient is needed for a new person: a response is scored by
the backbone once for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.errors import DataError
from prb_jax.personal.few_shot import offset
from prb_jax.personal.few_shot.choices import Adapter, Backbone, Choices, Context, Responses, group
from prb_jax.personal.few_shot.fitting import FitData, define
from prb_jax.personal.few_shot.protocol import FewShotSettings, Fitted, Floats, Ints, State, adapt_users
from prb_jax.records.options import option

_MOST = 64  # comparisons of a person that decide the first group


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(FewShotSettings):
    """Settings of every method that trains adapters of the backbone."""

    rank: int = option(8, "inner size of the update of each matrix", least=1)
    alpha: float = option(16.0, "an update is multiplied by alpha / rank", above=0)
    steps: int = option(200, "updates of the adapter of everybody", least=1)
    own_steps: int = option(
        100, "updates of the adapter of a group of people, which starts as that of everybody", least=1
    )
    batch: int = option(16, "comparisons in a step", least=1)
    rate: float = option(
        0.0,
        "learning rate at its peak; 0 for that of `prb train`, which goes by the width of the model",
        least=0,
    )
    sharpness: Floats = option(
        (0.1, 0.3, 1.0),
        "factors of the log-likelihood of a person's comparisons, of which the validation part chooses one: below 1 "
        "where adapters are surer than they are right",
        above=0,
    )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class LoraSettings(AdapterSettings):
    """Settings of adapters of groups."""

    clusters: Ints = option(
        (2, 4),
        "numbers of groups, of which the validation part chooses one, or a single adapter for everybody",
        least=2,
    )
    rounds: int = option(2, "times that the groups are trained and the people dealt to them anew", least=1)


@dataclass(frozen=True, kw_only=True)
class LoraUsersSettings(AdapterSettings):
    """Settings of an adapter for each seen person, who has few comparisons to train it on."""

    own_steps: int = option(
        10, "updates of the adapter of a person, which starts as that of everybody", least=1
    )


Grouping = Callable[[FitData, np.random.Generator], Iterator[tuple[np.ndarray, int]]]
"""The first group of each person, int [P], and the rounds."""


def fit(data: FitData, *, grouping: Grouping) -> Fitted:
    """Train the adapters; the validation part chooses their number, the rounds and the sharpness."""
    best, kept = np.inf, None
    for adapters, prior, rewards, rounds in _trained(data, grouping):
        judge = replace(data, validation=replace(data.validation, features=rewards))
        numbers = {"clusters": np.int32(len(prior)), "rounds": np.int32(rounds)}
        for sharpness in data.settings.sharpness:
            arrays = {"prior": prior.astype(np.float32), "adapters": adapters}
            candidate = data.fitted(arrays, {**numbers, "sharpness": sharpness})
            if (loss := judge.loss(candidate)) < best:
                best, kept = loss, candidate
    if kept is None:
        raise DataError("lora: the loss on the validation part is not a finite number")
    return replace(kept, numbers={**kept.numbers, "validation_loss": np.float32(best)})


def _trained(data: FitData, grouping: Grouping) -> Iterator[tuple[Adapter, np.ndarray, np.ndarray, int]]:
    """Yield the adapter of everybody, then the adapters of the groups after each round. Each item has the adapters with
    a leading axis C, each group's share of people [C], the rewards of all responses [R, C], and the round."""
    seen, settings, rng = data.seen, data.settings, data.rng()
    assert seen.backbone is not None
    backbone: Backbone = seen.backbone
    pairs, person = np.stack([seen.chosen, seen.rejected], axis=1), seen.person
    seed = int(rng.integers(2**31))

    def of(adapters: list[Adapter]) -> tuple[Adapter, np.ndarray]:
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *adapters)
        return stacked, backbone.rewards(stacked, settings=settings)

    train = backbone.trainer(pairs, settings=settings, steps=settings.steps, seed=seed)
    pooled = train(np.arange(len(seen)), None)
    stacked, rewards = of([pooled])
    yield stacked, np.ones(1), rewards, 0
    train = backbone.trainer(pairs, settings=settings, steps=settings.own_steps, seed=seed)
    for groups, rounds in grouping(data, rng):
        count = int(groups.max()) + 1
        adapters = [pooled] * count
        for number in range(rounds):
            members = [np.flatnonzero(groups[person] == group) for group in range(count)]
            adapters = [
                train(group, start) if len(group) else start
                for group, start in zip(members, adapters, strict=True)
            ]
            stacked, rewards = of(adapters)
            yield (
                stacked,
                (np.bincount(groups, minlength=count) + 1) / (len(groups) + count),
                rewards,
                number + 1,
            )
            margins = rewards[seen.chosen] - rewards[seen.rejected]
            likelihoods = np.zeros((seen.people, count))
            np.add.at(likelihoods, person, -np.logaddexp(0, -margins.astype(np.float64)))
            before, groups = groups, likelihoods.argmax(axis=1)
            if (groups == before).all():
                break


def _clusters(data: FitData, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
    """Yield groups of people with similar directions of their offsets."""
    from scipy.cluster.vq import kmeans2  # scipy takes long to import

    seen, key = data.seen, jax.random.key(0)
    fitted = offset.METHOD.fit(seen, data.validation, settings=offset.OffsetSettings(), key=key)
    rows = group(seen, seed=0)
    rows = rows.first(_MOST, width=min(_MOST, rows.places.shape[1]))
    offsets = np.asarray(adapt_users(offset.METHOD, fitted, seen, rows, key=key)["offset"], np.float64)
    offsets /= np.maximum(np.linalg.norm(offsets, axis=1, keepdims=True), 1e-12)
    for count in sorted(data.settings.clusters):
        if count < len(offsets):
            yield (
                kmeans2(offsets, _far_apart(offsets, count, rng), iter=30, minit="matrix")[1],
                data.settings.rounds,
            )


def _far_apart(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows to start k-means from, each drawn in proportion to its squared distance from those before (k-means++)."""
    centres = [rows[rng.integers(len(rows))]]
    while len(centres) < count:
        apart = np.min([np.sum((rows - one) ** 2, axis=1) for one in centres], axis=0) + 1e-12
        centres.append(rows[rng.choice(len(rows), p=apart / apart.sum())])
    return np.stack(centres)


def represent(fitted: Fitted, choices: Choices) -> Choices:
    """Return the choices with the rewards under each adapter as features, [R, C]."""
    choices.require("lora", NEEDS)
    assert choices.backbone is not None
    rewards = choices.backbone.rewards(fitted.arrays["adapters"], settings=fitted.settings)
    return replace(choices, features=rewards)


def empty_state(fitted: Fitted) -> State:
    """Return the shares of the seen people."""
    return {"weights": jnp.asarray(fitted.arrays["prior"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the posterior of the groups, float32 [C]."""
    likelihood = jnp.sum(context.mask[:, None] * jax.nn.log_sigmoid(context.deltas), axis=0)
    logits = jnp.log(fitted.arrays["prior"]) + fitted.numbers["sharpness"] * likelihood
    return {"weights": jax.nn.softmax(logits)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return sum_c w_c r_c, float32 [K]."""
    return responses.features @ state["weights"]


NEEDS = ("backbone",)
METHOD, USERS = (
    define(
        name, settings, partial(fit, grouping=grouping), adapt, score, empty_state,
        needs=NEEDS, represent=represent,
    )
    for name, settings, grouping in (
        ("lora", LoraSettings, _clusters),
        # each person is a group
        ("lora_users", LoraUsersSettings, lambda data, rng: iter([(np.arange(data.seen.people), 1)])),
    )
)  # fmt: skip
