"""Folders of fitted methods and of user states: Orbax arrays, and a JSON file that describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict, get_type_hints

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from prb_jax.errors import DataError, RunError, quote, short_repr
from prb_jax.models.checkpoints.array_folder import bytes_on_disk, flat_arrays, read_arrays, write_arrays
from prb_jax.personal import PERSONALISED, STATES
from prb_jax.personal.few_shot.protocol import Fitted, Method
from prb_jax.personal.few_shot.registry import method_named, method_names
from prb_jax.platform.paths import shown
from prb_jax.platform.sharding import batch_sharding, mesh_shape, replicated
from prb_jax.records.reading import read_object
from prb_jax.records.schema import check_schema
from prb_jax.records.writing import write_json, writing

ARRAYS: Final = "arrays"
FITTED_FORMAT: Final = {"kind": "prb_jax personalised", "format": 3}
STATES_FORMAT: Final = {"kind": "prb_jax states", "format": 2}
"""The newest format of each file, which has a digest of all that it says; the one before has none."""


class _Array(TypedDict):
    shape: list[int]
    dtype: str
    checksum: int


class _Backbone(TypedDict):
    model: str
    opened_with: dict[str, str | int | bool]
    width: int
    identity: dict[str, Any]


class _FittedFile(TypedDict):
    kind: str
    format: int
    method: str
    settings: dict[str, Any]
    backbone: _Backbone
    tree: dict[str, Any]
    arrays: dict[str, _Array]
    digest: str
    facts_digest: NotRequired[str]


class _StatesFile(TypedDict):
    kind: str
    format: int
    method: str
    fitted: str
    users: list[str]
    tree: Any
    arrays: dict[str, _Array]
    digest: str
    facts_digest: NotRequired[str]


@dataclass(frozen=True)
class Standard:
    """Standardisation of features: (features - mean) / scale, both float32 [D]."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def none(cls, width: int) -> Standard:
        """Return the standardisation that leaves features of this width unchanged."""
        return cls(np.zeros(width, np.float32), np.ones(width, np.float32))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return standardised features, float32."""
        return ((features - self.mean) / self.scale).astype(np.float32)


@dataclass(frozen=True)
class FittedMethod:
    """A method ready to be adapted to people."""

    path: Path  # its folder
    method: Method  # the method
    fitted: Fitted  # its arrays and numbers
    standard: Standard  # standardises by the features of the fit
    items: Mapping[bytes, int]  # number of each judged text, by the text's digest (``post_key``)
    facts: Mapping[str, Any]  # contents of ``personalised.json``

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
    """Write a fitted method as a folder. ``personalised.json`` is written last and marks the folder as complete.

    Args:
      standard: Standardisation of the features of the fit.
      items: Digest of each judged text, in the order of their numbers, uint8 [I, 16].
      features: Contents of ``features.json`` for these features.

    Returns:
      Digest of the arrays; user states store it to identify their fitted method.
    """
    tree = {"arrays": fitted.arrays, "numbers": fitted.numbers, "items": items, **asdict(standard)}
    backbone = {name: features[name] for name in ("model", "opened_with", "width")}
    facts = {
        **FITTED_FORMAT,
        "method": method.name,
        "settings": asdict(fitted.settings),
        "backbone": backbone | {"identity": features["inputs"]["model"]},
    }
    return _write(folder, PERSONALISED, facts, tree)


def read_fitted(folder: str | Path) -> FittedMethod:
    """Read a fitted method.

    Raises:
      RunError: If the folder contains no fitted method, a file is damaged, or the method is unknown.
    """
    path = Path(folder)
    facts = _read(path / PERSONALISED, _FittedFile, FITTED_FORMAT)
    if facts["method"] not in method_names():
        raise RunError(
            f"{path / PERSONALISED}: method {quote(facts['method'])}: expected one of {', '.join(method_names())}"
        )
    method = method_named(facts["method"])
    if odd := facts["settings"].keys() ^ {setting.name for setting in fields(method.settings)}:
        raise RunError(
            f"{path / PERSONALISED}: settings: {quote(min(odd))}: does not exist in this version of the method"
        )
    where = f"{path / PERSONALISED}: settings"
    hints = get_type_hints(method.settings)
    for name, value in facts["settings"].items():
        check_schema(value, hints[name], where=f"{where}: {name}", error=RunError)
    try:
        settings = method.settings(**{name: _plain(value) for name, value in facts["settings"].items()})
    except DataError as error:
        raise RunError(f"{where}: {error}") from error
    tree = read_tree(path / ARRAYS, facts)
    if lacking := {"arrays", "numbers", "items", "mean", "scale"} - tree.keys():
        raise RunError(f"{path / PERSONALISED}: tree: expected {quote(min(lacking))} in it, found none")
    fitted = Fitted(tree["arrays"], tree["numbers"], settings)
    items = {row.tobytes(): number for number, row in enumerate(tree["items"])}
    return FittedMethod(path, method, fitted, Standard(tree["mean"], tree["scale"]), items, facts)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class UserStates:
    """The states of U people."""

    users: tuple[str, ...]  # their names, in the order of the rows
    states: Any  # a tree whose arrays have the leading axis U
    digest: str | None = None  # of the arrays, if they were read from a folder
    rows: Mapping[str, int] = field(init=False)  # the row of each person

    __repr__ = short_repr

    def __post_init__(self) -> None:
        rows = {user: row for row, user in enumerate(self.users)}
        if len(rows) < len(self.users):
            twice = next(user for row, user in enumerate(self.users) if rows[user] != row)
            raise DataError(f"states: user {quote(twice)} is given twice")
        for leaf in jax.tree.leaves(self.states):
            if len(leaf) != len(self.users):
                raise DataError(f"states: expected {len(self.users)} rows, found {len(leaf)}")
        object.__setattr__(self, "rows", rows)

    def of(self, users: Sequence[str]) -> Any:
        """Return the states of these users; their number is the leading axis of each array."""
        rows = np.array([self.rows[user] for user in users], np.int64)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.states)


def save_states(folder: str | Path, states: UserStates, *, method: str, fitted: str) -> int:
    """Write the states of people as a folder of Orbax, replacing its contents. Device arrays are written shard by
    shard. The states are valid only for the fitted method of this name and digest (``personalised.json``).

    Returns:
      Bytes on disk.
    """
    facts = STATES_FORMAT | {"method": method, "fitted": fitted, "users": list(states.users)}
    _write(Path(folder), STATES, facts, states.states, indent=0)
    return bytes_on_disk(Path(folder))


def read_states(
    folder: str | Path, *, method: str, fitted: str | None = None, mesh: Mesh | None = None
) -> UserStates:
    """Read states that :func:`save_states` wrote for a method of this name, and for this digest unless it is None.

    With a mesh, the people are split over its devices if the mesh divides their number. Without a mesh, the arrays are
    NumPy arrays.

    Raises:
      RunError: If the folder contains no states, they belong to another method or fit, or a file is damaged.
    """
    path = Path(folder)
    facts = _read(path / STATES, _StatesFile, STATES_FORMAT)
    for name, expected in (("method", method), ("fitted", fitted)):
        if expected is not None and facts.get(name) != expected:
            raise RunError(
                f"{path / STATES}: {name}: expected {quote(expected)}, found {quote(facts.get(name))}: these are "
                f"states of another {'method' if name == 'method' else f'fit of {method}'}"
            )

    def split(shape: tuple[int, ...]) -> NamedSharding:
        assert mesh is not None
        even = shape[0] % mesh_shape(mesh).batch_shards == 0
        return batch_sharding(mesh, len(shape)) if even else replicated(mesh)

    states = read_tree(path / ARRAYS, facts, sharding=None if mesh is None else split)
    return UserStates(tuple(facts["users"]), states, facts["digest"])


def _write(folder: Path, file: str, facts: Mapping[str, Any], tree: Any, **style: Any) -> str:
    """Write arrays, then the file that describes them; return the digest of the arrays."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).unlink(missing_ok=True)
    described = write_tree(folder / ARRAYS, tree)
    whole = shown({**facts, **described})
    write_json(folder / file, {**whole, "facts_digest": _facts_digest(whole)}, **style)
    return described["digest"]


def _facts_digest(facts: Mapping[str, Any]) -> str:
    """Return the digest of all other entries of the file."""
    rest = {name: value for name, value in facts.items() if name != "facts_digest"}
    return f"sha256:{sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}"


def _read(path: Path, schema: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a folder's file; refuse another kind of folder, another format, and a changed file."""
    facts = read_object(path, error=RunError)
    formats = (wanted["format"] - 1, wanted["format"])
    if (value := facts.get("kind")) != wanted["kind"]:
        raise RunError(f"{path}: kind: expected {quote(wanted['kind'])}, found {quote(value)}")
    if (value := facts.get("format")) not in formats:
        raise RunError(f"{path}: format: expected {formats[0]} or {formats[1]}, found {quote(value)}")
    check_schema(facts, schema, where=str(path), error=RunError)
    digest = facts.get("facts_digest") if value == formats[1] else _facts_digest(facts)
    if digest != _facts_digest(facts):
        raise RunError(f"{path}: differs from the file that was written; restore it")
    return facts


def write_tree(folder: Path, tree: Any) -> dict[str, Any]:
    """Write a tree of nested dicts and lists of arrays.

    Returns:
      Facts for `read_tree`, JSON-ready: "tree", the array names in the structure of the tree; "arrays", the shape,
      dtype and checksum of each array; "digest", the digest of all arrays.
    """
    flat = flat_arrays(tree)
    names = jax.tree.unflatten(jax.tree.structure(tree), list(flat))
    return {"tree": names, "arrays": write_arrays(folder, flat), "digest": _digest(flat)}


def _digest(arrays: Mapping[str, Any]) -> str:
    """Return the digest of named arrays."""
    digest = sha256()
    for name, leaf in sorted(arrays.items()):
        held = np.asarray(leaf)
        digest.update(f"{name} {held.dtype} {held.shape}\n".encode())
        digest.update(np.ascontiguousarray(held).tobytes())
    return f"sha256:{digest.hexdigest()}"


def read_tree(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    sharding: Callable[[tuple[int, ...]], NamedSharding] | None = None,
) -> Any:
    """Read a tree of `write_tree`, from the facts that it returned. The result has NumPy arrays, or JAX arrays with
    the ``sharding`` of each shape.

    Raises:
      RunError: If the tree is missing, damaged, or differs from the facts.
    """
    try:
        shapes = {name: tuple(one["shape"]) for name, one in facts["arrays"].items()}
        shardings = sharding and {name: sharding(shape) for name, shape in shapes.items()}
        arrays = read_arrays(folder, facts["arrays"], shardings=shardings)
        # The checksums of `read_arrays` work for any sharding, but do not detect exchanged values.
        if sharding is None and _digest(arrays) != facts["digest"]:
            raise RunError(f"{folder}: damaged: the arrays are not those that were saved")
        return jax.tree.map(lambda name: arrays[name], facts["tree"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{folder}: is not described by the file beside it: {error}") from error
