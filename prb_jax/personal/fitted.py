"""A fitted method in a folder: its arrays (of Orbax), its settings, and of which features it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from prb_jax.data.reading import read_object
from prb_jax.data.writing import write_json, writing
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.personal.few_shot.protocol import Fitted, Method
from prb_jax.personal.few_shot.registry import METHODS, method_named
from prb_jax.personal.folder import PERSONALISED
from prb_jax.personal.trees import check_format, read_tree, write_tree

ARRAYS: Final = "arrays"
KIND: Final = "prb_jax personalised"
FORMAT: Final = 2


@dataclass(frozen=True)
class Standard:
    """How features are made comparable: (features - mean) / scale, both float32 [D]."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def none(cls, width: int) -> Standard:
        """Return the one that leaves features of this width as they are."""
        return cls(np.zeros(width, np.float32), np.ones(width, np.float32))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return standardised features, float32."""
        return ((features - self.mean) / self.scale).astype(np.float32)


@dataclass(frozen=True)
class FittedMethod:
    """A method ready to be adapted to people.

    Attributes:
      path: its folder.
      method: the method.
      fitted: its arrays and numbers.
      standard: of the features on which it was fitted.
      items: the number of each text that was judged, by the text's digest (``post_key``).
      facts: what ``personalised.json`` holds.
    """

    path: Path
    method: Method
    fitted: Fitted
    standard: Standard
    items: Mapping[bytes, int]
    facts: Mapping[str, Any]

    __repr__ = short_repr


def save_fitted(
    folder: Path,
    method: Method,
    fitted: Fitted,
    *,
    standard: Standard,
    items: np.ndarray,
    features: Mapping[str, Any],
) -> str:
    """Write a fitted method as a folder, whole or not at all: ``personalised.json`` is written last.

    Args:
      folder: made where there is none.
      method, fitted: the method.
      standard: of the features on which it was fitted.
      items: uint8 [I, 16], the digest of each text that was judged, in the order of their numbers.
      features: what ``features.json`` holds of these features.

    Returns:
      the digest of its arrays, by which states of people know what they are of.

    Raises:
      RunError: it cannot be written.
    """
    tree = {
        "arrays": fitted.arrays,
        "numbers": fitted.numbers,
        "mean": standard.mean,
        "scale": standard.scale,
        "items": items,
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PERSONALISED).unlink(missing_ok=True)
    known = ("model", "opened_with", "width")
    facts = {
        "kind": KIND,
        "format": FORMAT,
        "method": method.name,
        "settings": asdict(fitted.settings),
        **write_tree(folder / ARRAYS, tree),
        "backbone": {name: features[name] for name in known} | {"identity": features["inputs"]["model"]},
    }
    write_json(folder / PERSONALISED, facts)
    return facts["digest"]


def read_fitted(folder: str | Path) -> FittedMethod:
    """Read a fitted method.

    Raises:
      RunError: there is none, a file is damaged, or it is of a method that there is not.
    """
    path = Path(folder)
    facts = read_object(path / PERSONALISED, error=RunError)
    check_format(facts, KIND, FORMAT, where=path / PERSONALISED)
    if facts["method"] not in METHODS:
        raise RunError(
            f"{path / PERSONALISED}: method {quote(facts['method'])}: expected one of {', '.join(METHODS)}"
        )
    method = method_named(facts["method"])
    names = {field.name for field in fields(method.settings)}
    if odd := facts["settings"].keys() ^ names:
        raise RunError(
            f"{path / PERSONALISED}: settings: {quote(min(odd))}: is not of this version of the method"
        )
    settings = method.settings(**{name: _plain(value) for name, value in facts["settings"].items()})
    tree = read_tree(path / ARRAYS, facts)
    standard = Standard(tree["mean"], tree["scale"])
    items = {row.tobytes(): number for number, row in enumerate(tree["items"])}
    return FittedMethod(
        path, method, Fitted(tree["arrays"], tree["numbers"], settings), standard, items, facts
    )


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value
