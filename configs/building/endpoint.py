"""A benchmark whose pairs a model behind an endpoint writes, and another one judges.

    prb build configs/building/endpoint.py data=FILE generator.endpoint=URL generator.name=NAME --out runs/built

with `judge.endpoint=URL judge.name=NAME gates.known=SOURCE gates.reward_models=MODEL` for the gates that need them.

As in Personalised RewardBench (arXiv 2604.07343): first a plan and then an answer, ten posts of the user's profile, and
at most 100 words. Four answers are written for each side, and the two that are most alike are kept. A model on this
machine writes instead with `generator.model=PATH`. A record takes 11 requests to the generator, more where an answer
cannot be used, and four to the judge.
"""

from ml_collections import ConfigDict

from prb_jax.building.settings import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.writing.candidates = 4
    config.writing.rounds = 3
    config.writing.least_words = 60
    config.writing.most_words = 100
    config.writing.profile_posts = 10
    config.writing.temperature = 0.8
    config.gates.level = 0.99
    config.gates.least_yield = 0.5
    config.product.private_share = 0.2
    return config
