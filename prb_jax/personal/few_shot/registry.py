"""The methods by name, and with their settings as the command line names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from prb_jax.errors import DataError, RunError, quote
from prb_jax.plugins import guarded, usable_plugins
from prb_jax.seams import get, names

if TYPE_CHECKING:
    from prb_jax.personal.few_shot.protocol import Method

METHODS = {
    "pooled": "pooled Bradley-Terry: one direction for everybody",
    "offset": "pooled Bradley-Terry and an offset for each person, the fair strong baseline",
    "bayes": "a prior of tastes estimated from the seen people, and each person's posterior under it",
    "stacked": "a mean of bayes, of a simple prior without directions, and of nothing personal, recalibrated",
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

POOLED: Final = "pooled"
STRONG: Final = "offset"  # pooled and an offset of each user: the fair baseline of every personal method

ALL: Final = "all"


def method_names() -> dict[str, str]:
    """Return the names of all methods with a line about each: first ``METHODS``, then plug-ins."""
    return {**METHODS, **{name: "a plug-in" for name in names("few_shot") if name not in METHODS}}


def method_named(name: str) -> Method:
    """Return a method by its name.

    Raises:
      DataError: no method has this name.
      RunError: the package of a plug-in fails, or offers something else.
    """
    if name not in (known := method_names()):
        raise DataError(
            f"unknown method {quote(name)}: expected one of {', '.join(known)}{_nearest(name, known)}"
        )
    found = get("few_shot", name)
    return _guarded(found.value, name, found.origin) if found.origin else found.value


@dataclass(frozen=True)
class StudyMethods:
    """The methods of a study."""

    methods: list[Method]  # in the order of its tables
    # methods that must run; other methods are left out if the data lack a field that they need
    named: frozenset[str]
    left_out: dict[str, str]  # of "all", with the reason


def choose_methods(names: str | Sequence[str]) -> StudyMethods:
    """Return the methods of a study: those that are named, or "all"; pooled and offset are always among them.

    "all" leaves out the methods that train the backbone, unless they are named beside it.

    Raises:
      RunError: a name is given twice.
      DataError: there is no such method.
    """
    parts = [part for name in ([names] if isinstance(names, str) else names) for part in name.split(",")]
    if twice := [name for place, name in enumerate(parts) if name in parts[:place]]:
        raise RunError(f"methods: {twice[0]} is given twice")
    named = [method_named(name).name for name in parts if name != ALL]
    every = _every_method() if ALL in parts else []
    slow = {name for name in every if method_named(name).trains_backbone} - set(named)
    return StudyMethods(
        methods=[
            method_named(name) for name in dict.fromkeys([POOLED, STRONG, *named, *every]) if name not in slow
        ],
        named=frozenset(named),
        left_out={
            name: f"trains the backbone, which takes long; name it to have it: --methods {ALL},{name}"
            for name in sorted(slow)
        },
    )


def _every_method() -> list[str]:
    """The names of all methods, without plug-ins that fail."""
    usable = {plugin.name for plugin in usable_plugins("few_shot")}
    return [name for name in method_names() if name in METHODS or name in usable]


@cache  # equal methods stay equal
def _guarded(method: Method, name: str, origin: str) -> Method:
    return replace(method, name=name, fit=guarded(method.fit, origin))


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return the settings of each method that is named.

    Args:
      texts: Settings, e.g. "lore.bases=4,8". A value is a number or a word; a setting with several values separates
        them by commas.

    Raises:
      DataError: a text of another form, no such method or field, or a value that the method refuses.
    """
    settings: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        name, dot, field = place.partition(".")
        if not (equals and dot and value):
            raise DataError(f"settings: expected METHOD.FIELD=VALUE, found {quote(text)}")
        default = {setting.name: setting.default for setting in fields(method_named(name).settings)}
        if field not in default:
            raise DataError(
                f"settings: {name} has no {quote(field)}: expected one of {', '.join(default)}"
                f"{_nearest(field, default)}"
            )
        if field in settings.setdefault(name, {}):
            raise DataError(f"settings: {place} is given twice")
        values = [_value(part) for part in value.split(",")]
        several = isinstance(default[field], tuple)
        if not several and len(values) > 1:
            raise DataError(f"settings: {place}: expected one value, found {quote(value)}")
        settings[name][field] = tuple(values) if several else values[0]
    return {name: method_named(name).settings(**chosen) for name, chosen in settings.items()}


def _nearest(name: str, names: Iterable[str]) -> str:
    return "".join(f"; did you mean {close}?" for close in get_close_matches(name, names, n=1))


def _value(text: str) -> Any:
    """A number, true or false, or else the word itself."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | str | bool) else text
