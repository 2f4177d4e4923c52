"""A read-out and a method of personalisation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.models.readouts.registry import ModelRow
from prb_jax.models.vocabulary_heads import Vocabulary
from prb_jax.personal.few_shot.choices import Choices, Context, Responses
from prb_jax.personal.few_shot.protocol import Fitted, Method, State

# The logit of token 7 behind the response is the reward: `--readout last-logit`.
LAST_LOGIT = ModelRow(name="last-logit", models=(), head=Vocabulary(tokens=(7,)), by_name=True)


@dataclass(frozen=True, kw_only=True)
class MeanChoiceSettings:
    """Settings: `shrink` comparisons' worth of everybody's direction is mixed into a person's own."""

    shrink: float = 4.0


def fit(
    seen: Choices, validation: Choices, *, settings: MeanChoiceSettings, key: jax.Array, mesh=None
) -> Fitted:
    """Remember the mean difference of chosen and rejected states over everybody."""
    seen.require("mean_choice", ())
    features = np.asarray(seen.table.features)
    everybody = (features[seen.chosen] - features[seen.rejected]).mean(axis=0)
    return Fitted({"direction": everybody}, {}, settings)


def empty_state(fitted: Fitted) -> State:
    """Return everybody's direction."""
    return {"direction": jnp.asarray(fitted.arrays["direction"])}


def adapt(fitted: Fitted, context: Context, key: jax.Array) -> State:
    """Return the mean difference over a person's comparisons and the prior ones."""
    mask = context.mask[:, None]
    own = ((context.chosen.features - context.rejected.features) * mask).sum(axis=0)
    weight = fitted.settings.shrink
    return {"direction": (own + weight * fitted.arrays["direction"]) / (mask.sum() + weight)}


def score(fitted: Fitted, state: State, responses: Responses) -> jax.Array:
    """Return float32 [K]: the states along the person's direction."""
    return responses.features @ state["direction"]


MEAN_CHOICE = Method("mean_choice", MeanChoiceSettings, fit, adapt, score, empty_state)
