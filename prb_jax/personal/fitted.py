"""A fitted method in a folder: its arrays, its settings, and of which features it is; read back without any pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from prb_jax.data.files import file_digest
from prb_jax.data.reading import read_object
from prb_jax.data.writing import whole_file, write_json, writing
from prb_jax.errors import RunError, quote, short_repr
from prb_jax.personal.few_shot.protocol import Fitted, Method
from prb_jax.personal.few_shot.registry import METHODS, method_named
from prb_jax.personal.folder import PERSONALISED

ARRAYS: Final = "arrays.npz"
KIND: Final = "prb_jax personalised"
FORMAT: Final = 1


@dataclass(frozen=True)
class Standard:
    """How features are made comparable: (features - mean) / scale, both float32 [D]."""

    mean: np.ndarray
    scale: np.ndarray

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
) -> None:
    """Write a fitted method as a folder, whole or not at all: ``personalised.json`` is written last.

    Args:
      folder: made where there is none.
      method, fitted: the method.
      standard: of the features on which it was fitted.
      items: uint8 [I, 16], the digest of each text that was judged, in the order of their numbers.
      features: what ``features.json`` holds of these features.

    Raises:
      RunError: it cannot be written.
    """
    leaves = {"mean": standard.mean, "scale": standard.scale, "items": items}
    for group, tree in (("arrays", fitted.arrays), ("numbers", fitted.numbers)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            leaves["/".join([group, *(_name(key) for key in path)])] = np.asarray(leaf)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PERSONALISED).unlink(missing_ok=True)
        with whole_file(folder / ARRAYS) as file:
            np.savez(file, **leaves)  # pyright: ignore[reportArgumentType]
    known = ("model", "opened_with", "width")
    facts = {
        "kind": KIND,
        "format": FORMAT,
        "method": method.name,
        "settings": asdict(fitted.settings),
        "arrays": file_digest(folder / ARRAYS),
        "backbone": {name: features[name] for name in known} | {"identity": features["inputs"]["model"]},
    }
    write_json(folder / PERSONALISED, facts)


def read_fitted(folder: str | Path) -> FittedMethod:
    """Read a fitted method.

    Raises:
      RunError: there is none, a file is damaged, or it is of a method that there is not.
    """
    path = Path(folder)
    facts = read_object(path / PERSONALISED, error=RunError)
    if facts.get("kind") != KIND or facts.get("format") != FORMAT:
        raise RunError(f"{path / PERSONALISED}: expected {quote(KIND)} of format {FORMAT}")
    if facts["method"] not in METHODS:
        raise RunError(
            f"{path / PERSONALISED}: method {quote(facts['method'])}: expected one of {', '.join(METHODS)}"
        )
    method = method_named(facts["method"])
    try:
        with np.load(path / ARRAYS, allow_pickle=False) as found:
            leaves = {name: found[name] for name in found.files}
        trees: dict[str, Any] = {"arrays": {}, "numbers": {}}
        for name, leaf in leaves.items():
            *inner, last = name.split("/")
            here = trees
            for part in inner:
                here = here.setdefault(part, {})
            here[last] = leaf
        names = {field.name for field in fields(method.settings)}
        if odd := facts["settings"].keys() ^ names:
            raise RunError(
                f"{path / PERSONALISED}: settings: {quote(min(odd))}: is not of this version of the method"
            )
        settings = method.settings(**{name: _plain(value) for name, value in facts["settings"].items()})
        standard = Standard(trees["mean"], trees["scale"])
        items = {row.tobytes(): number for number, row in enumerate(trees["items"])}
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path / ARRAYS}: cannot be read: {error}") from error
    found_now = file_digest(path / ARRAYS)
    if found_now != facts["arrays"]:
        raise RunError(f"{path / ARRAYS}: is not the file that {PERSONALISED} was written with")
    return FittedMethod(
        path, method, Fitted(trees["arrays"], trees["numbers"], settings), standard, items, facts
    )


def _name(key: Any) -> str:
    if not isinstance(key, jax.tree_util.DictKey) or not isinstance(key.key, str) or "/" in key.key:
        raise TypeError(f"arrays of a fitted method: expected nested dicts with names, found the key {key}")
    return key.key


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value
