"""The methods by name; a method's module is imported when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from prb_jax.errors import DataError, quote
from prb_jax.plugins import get_plugin, plugin_names

if TYPE_CHECKING:
    from prb_jax.personal.few_shot.protocol import Method

METHODS = {
    "pooled": "pooled Bradley-Terry: one direction for everybody",
    "offset": "pooled Bradley-Terry and an offset for each person, the fair strong baseline",
    "bayes": "a prior of tastes estimated from the seen people, and each person's posterior under it",
    "individual": "a direction for each person, of their comparisons alone",
    "nearest": "people who judged the same texts alike (needs shared texts)",
    "attention": "learned similarity of candidates to a person's posts and choices",
    "lore": "a low-rank basis of rewards that each person mixes (softmax weights)",
    "lore_free": "the same basis with free weights, so that a person may dislike a direction",
    "pref": "factors that start from a singular value decomposition, and an active choice of questions",
    "vpl": "a latent variable for each person, from an encoder of their comparisons",
    "pal": "an ideal point for each person, a mixture of prototypes",
    "gpo": "a transformer that reads a person's comparisons in context",
    "mrm": "mixing weights that are meta-learned for a few gradient steps",
    "sparse": "weights on a few sparse directions that can be read",
    "user_embedding": "an embedding of each person that conditions a shared network",
    "user_clusters": "the same with embeddings that mix a few clusters",
    "lora": "low-rank adapters of the backbone for groups of people (trains the backbone)",
    "lora_users": "an adapter for each seen person (trains the backbone)",
    "profile_in_context": "the backbone's own reward when it saw the profile",
}
"""Each method's name and one line about it, in the order of tables."""

_ATTRIBUTES = {
    "lore": ("lore", "LORE"),
    "lore_free": ("lore", "LORE_FREE"),
    "lora_users": ("lora", "USERS"),
    "user_embedding": ("user_embedding", "INDIVIDUAL"),
    "user_clusters": ("user_embedding", "CLUSTER"),
}
"""Module and attribute of the methods that are not ``METHOD`` of the module of their own name."""


def method_names() -> dict[str, str]:
    """Return the names of all methods with a line about each: those of ``METHODS``, and behind them plug-ins."""
    plugins = (name for name in plugin_names("few_shot") if name not in METHODS)
    return {**METHODS, **dict.fromkeys(plugins, "a plug-in")}


def method_named(name: str) -> Method:
    """Return a method by its name.

    Raises:
      DataError: no method has this name.
      RunError: the package of a plug-in fails, or offers something else.
    """
    if name not in (names := method_names()):
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DataError(f"unknown method {quote(name)}: expected one of {', '.join(names)}{hint}")
    if name not in METHODS:
        from prb_jax.personal.few_shot.protocol import Method

        return replace(get_plugin("few_shot", name, Method).value, name=name)
    module, attribute = _ATTRIBUTES.get(name, (name, "METHOD"))
    return getattr(import_module(f"prb_jax.personal.few_shot.{module}"), attribute)
