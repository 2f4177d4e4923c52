"""PersonalLLM (arXiv 2409.20296): eight responses to a prompt, scored by ten reward models. Its people are simulated.

A person is a mixture of the ten models, drawn from a Dirichlet distribution; the labels are the person's mixed rewards.
Each prompt is asked of one person, prompts going round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from prb_jax.records import fields
from prb_jax.records.benchmarks import people
from prb_jax.records.benchmarks.benchmark import Benchmark, Published

RESPONSES: Final = 8
PEOPLE: Final = 100
CONCENTRATION: Final = 0.1
_SEED: Final = 0

SPREADS: Final[Mapping[str, float]] = {
    "gemma_2b": 2.039,
    "gemma_7b": 2.610,
    "mistral_raft": 3.073,
    "mistral_ray": 1.690,
    "mistral_weqweasdas": 2.579,
    "llama3_sfairx": 2.953,
    "oasst_deberta_v3": 1.721,
    "beaver_7b": 3.013,
    "oasst_pythia_7b": 1.366,
    "oasst_pythia_1b": 2.302,
}
"""Standard deviation of each model's rewards, as the authors of the data measured it: rewards are divided by it."""


def tastes() -> np.ndarray:
    """Return the weights of the models for each simulated person, float64 [PEOPLE, 10]; rows sum to 1."""
    return np.random.default_rng(_SEED).dirichlet([CONCENTRATION] * len(SPREADS), size=PEOPLE)


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a comparison of eight responses for each prompt, with the mixed rewards of one person as labels."""
    histories, weights = people.Histories(), tastes()
    for place, row in published.rows:
        where, person = place.where, (place.number - 1) % PEOPLE
        user = f"simulated-{person}"
        asked = fields.text(row.get("prompt"), where, "prompt")
        names = [f"response_{number}" for number in range(1, RESPONSES + 1)]
        texts = [fields.text(row.get(name), where, name) for name in names]
        rewards = [
            [people.number(row.get(f"{name}_{model}"), where, f"{name}_{model}") for model in SPREADS]
            for name in names
        ]
        labels = (np.array(rewards) / np.array([*SPREADS.values()])) @ weights[person]
        if len(set(texts)) < RESPONSES or not all(texts):
            published.left_out["prompts with an empty response, or one that is given twice"] += 1
            continue
        if labels.min() == labels.max():
            published.left_out["prompts with one reward for all responses"] += 1
            continue
        yield (
            where,
            {
                "id": people.row_name(place),
                "user_id": user,
                "question": asked,
                "responses": texts,
                "labels": labels.tolist(),
                "profile": histories.posts(user, texts),
            },
        )
        histories.add(user, texts, people.posts_of_choice(asked, texts[int(labels.argmax())]))


BENCHMARK = Benchmark(
    name="personalllm",
    rule=f"simulated people: {people.RULE}",
    score=people.score,
    won=people.is_won,
    repository="namkoong-lab/PersonalLLM",
    licence="not stated in its code; its card is said to name CC BY 4.0: check it",
    columns=("response_1", "response_8"),
    records=records,
)
