"""The algorithms of `prb ppo`, and which options each of them uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from prb_jax.errors import DataError, quote

Algorithm = Literal["ppo", "grpo", "rloo", "reinforce++", "dpo", "sft"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
GROUPED: tuple[Algorithm, ...] = ("grpo", "rloo")
"""Algorithms that compare the responses of a prompt with each other."""
LABELLED: tuple[Algorithm, ...] = ("dpo", "sft")
"""Algorithms that learn from the labelled responses of the data, draw nothing and ask no reward."""
DRAWING = tuple(name for name in ALGORITHMS if name not in LABELLED)
"""Algorithms that learn from rollouts."""

USED_BY: Mapping[str, tuple[str, ...]] = {
    "rollout.": DRAWING,
    "scoring.": DRAWING,
    "kl.": DRAWING,
    "watch.every": DRAWING,
    "watch.window": DRAWING,
    "watch.most_kl": DRAWING,
    "advantage.gamma": ("ppo", "reinforce++"),
    "advantage.lam": ("ppo",),
    "advantage.whiten": ("ppo",),
    "advantage.whiten_rewards": ("ppo",),
    "advantage.scale_groups": ("grpo",),
    "advantage.value_at_end": ("ppo",),
    "loss.clip": DRAWING,
    "loss.ratio": DRAWING,
    "loss.aggregation": DRAWING,
    "loss.entropy_coefficient": DRAWING,
    "loss.value_coefficient": ("ppo",),
    "loss.value_clip": ("ppo",),
    "loss.dpo_beta": ("dpo",),
    "loss.label_smoothing": ("dpo",),
    "value.": ("ppo",),
}
"""The algorithms that use a key, or all keys of a section; a key that is not here is used by every algorithm."""

_WRITES_TEXTS = (
    "rollout.n", "rollout.temperature", "rollout.max_new_tokens", "rollout.rows",
    "scoring.scale", "scoring.empty", "scoring.failed", "scoring.history", "scoring.profile_posts", "scoring.protocol",
    "scoring.max_length", "scoring.dtype", "scoring.mesh", "scoring.judge.",
)  # fmt: skip
"""Keys, and sections with a dot at the end, that decide the texts for `watch.data` and their scores: with it every
algorithm uses them."""

_NEEDED: tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool]], ...] = (
    ("lora.", "tuning=lora", lambda flat: flat["tuning"] == "lora"),
    ("kl.horizon", "kl.target", lambda flat: flat["kl.target"] is not None),
    ("kl.target", "a kl.coefficient above 0, which it multiplies", lambda flat: flat["kl.coefficient"] > 0),
    ("scoring.no_end_value", "scoring.no_end", lambda flat: flat["scoring.no_end"] != "none"),
    ("scoring.free_tokens", "scoring.token_penalty", lambda flat: flat["scoring.token_penalty"] != 0),
)
"""Keys without effect unless another one is given: the key or section, the other one, and whether that is given."""


def algorithms_of(key: str) -> tuple[str, ...]:
    """Return the algorithms that use an option."""
    section = key.partition(".")[0] + "."
    return USED_BY.get(key, USED_BY.get(section, ALGORITHMS))


def check_used(algorithm: str, flat: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options without effect: each of them must have its default.

    Args:
      algorithm: of the run.
      flat: options by dotted key.
      defaults: of the same keys.

    Raises:
      DataError: an option that the algorithm does not use; names it, and the algorithms that do.
    """
    for key, value in flat.items():
        if value == defaults[key]:
            continue
        users = algorithms_of(key)
        if algorithm not in users and not (flat["watch.data"] is not None and key.startswith(_WRITES_TEXTS)):
            raise DataError(
                f"{key}: expected nothing but its default {quote(defaults[key])} with algorithm={algorithm}, which "
                f"does not use it ({', '.join(users)} {'do' if len(users) > 1 else 'does'}), found {quote(value)}"
            )
        for prefix, needed, given in _NEEDED:
            if key.startswith(prefix) and not given(flat):
                raise DataError(
                    f"{key}: needs {needed}: without it expected nothing but the default {quote(defaults[key])}, "
                    f"found {quote(value)}"
                )
