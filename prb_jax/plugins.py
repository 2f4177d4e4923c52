"""Plug-ins: values from other packages, by kind and name. :func:`prb_jax.seams.get` looks here after its own table.

A package offers a plug-in by an entry point in its `pyproject.toml`; each kind has a group (`KINDS`):

    [project.entry-points."prb_jax.rewards"]
    short = "my_package.rewards:short"

A module of `--import` offers a plug-in by calling :func:`register_plugin`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, wraps
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prb_jax.errors import PrbError, PrbWarning, RunError, quote
from prb_jax.seams import BUILTIN, KINDS, Plugin, names, value_at

Given = ParamSpec("Given")


Result = TypeVar("Result")


_registered: dict[tuple[str, str], Plugin] = {}


_broken: set[tuple[str, str]] = set()  # kinds and names whose failure was already reported


_imported: set[Path] = set()  # files of `--import`


def register_plugin(kind: str, name: str, value: Any) -> None:
    """Offer a plug-in under a name, for a module of `--import`, or from Python.

    Args:
      kind: One of "backbones", "benchmarks", "readouts", "few_shot", "gates", "rewards".
      name: Name of the plug-in for users.
      value: Plug-in itself; `docs/plugins.md` describes the type for each kind.

    Raises:
      RunError: If the kind is unknown.
    """
    if kind not in KINDS:
        raise RunError(f"plug-in {quote(name)}: no kind {quote(kind)}; expected one of {', '.join(KINDS)}")
    module = getattr(value, "__module__", None) or type(value).__module__
    _registered[kind, name] = Plugin(name, value, f"registered, of module {module}")


def _group(kind: str) -> str:
    return ".".join(("prb_jax", kind))


@cache
def _entry_points(kind: str, _path: tuple[str, ...]) -> metadata.EntryPoints:
    return metadata.entry_points(group=_group(kind))


def offered_names(kind: str) -> set[str]:
    """Return the names of a kind that packages and `--import` offer, without importing the values."""
    offered = {entry.name for entry in _entry_points(kind, tuple(sys.path))}
    return offered | {name for of, name in _registered if of == kind}


def find(kind: str, name: str) -> Plugin:
    """Return the plug-in of a kind and name: registered, else from an entry point.

    It has the type of its kind. An exception of a plug-in function becomes a RunError that names its package.

    Raises:
      RunError: If no package or more than one offers this name, or if the package fails or offers another type.
    """
    if (plugin := _registered.get((kind, name))) is None:
        group = _group(kind)
        entries = list(_entry_points(kind, tuple(sys.path)).select(name=name))
        if not entries:
            offered = ", ".join(names(kind)) or "none is installed"
            raise RunError(
                f"no plug-in {quote(name)} among the entry points {group}: expected one of: {offered}"
            )
        origins = [f"{entry.dist.name} {entry.dist.version}" if entry.dist else "?" for entry in entries]
        if len({entry.value for entry in entries}) > 1:
            raise RunError(f"entry point {group}: {name}: offered by {' and by '.join(origins)}: remove one")
        try:
            value = entries[0].load()
        except (Exception, SystemExit) as error:
            raise RunError(
                f"{origins[0]}: its entry point {group}: {name} = {entries[0].value} fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        plugin = Plugin(name, value, origins[0])
    expected = value_at(KINDS[kind])
    if not isinstance(plugin.value, expected):
        raise RunError(
            f"{plugin.origin}: {kind} {quote(name)}: expected a "
            f"{'function' if expected is Callable else expected.__name__}, found {type(plugin.value).__name__}"
        )
    return replace(plugin, value=guarded(plugin.value, plugin.origin)) if expected is Callable else plugin


def usable_plugins(kind: str) -> list[Plugin]:
    """Return all plug-ins of a kind, not requested by name; leave out a failing one and warn of it once."""
    plugins = []
    for name in names(kind)[len(BUILTIN.get(kind, {})) :]:
        if (kind, name) in _broken and (kind, name) not in _registered:
            continue
        try:
            plugins.append(find(kind, name))
        except RunError as error:
            _broken.add((kind, name))
            warnings.warn(f"left out: {error}", PrbWarning, stacklevel=2)
    return plugins


@contextlib.contextmanager
def errors_of(origin: str) -> Iterator[None]:
    """Turn an error in a plug-in's code into a RunError that names its package; without an origin, re-raise it."""
    try:
        yield
    except PrbError:
        raise
    except (Exception, SystemExit) as error:
        if not origin:
            raise
        raise RunError(f"{origin}: fails: {type(error).__name__}: {error}") from error


def guarded(function: Callable[Given, Result], origin: str) -> Callable[Given, Result]:
    """Return a plug-in's function wrapped in :func:`errors_of`."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with errors_of(origin):
            return function(*args, **kwargs)

    return call


def import_plugins(modules: list[str]) -> None:
    """Import the modules of `--import`, which register plug-ins: files, or module names (also in the working
    directory).

    Raises:
      RunError: If a module does not exist or fails.
    """
    for module in modules:
        if module.endswith(".py"):
            _run(module)
            _imported.add(Path(module).resolve())
            continue
        sys.path.append(os.getcwd())
        try:
            import_module(module)
        except PrbError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(f"--import {module}: {type(error).__name__}: {error}") from error
        finally:
            sys.path.remove(os.getcwd())


def is_imported(text: str) -> bool:
    """Return whether the user passed the file of FILE.py:NAME to `--import`, and so allows it to run."""
    return Path(text.rpartition(":")[0]).resolve() in _imported


def python_value(text: str) -> Plugin:
    """Return the value of FILE.py:NAME; its origin contains the digest of the file.

    Raises:
      RunError: If the file or name does not exist, or the file fails.
    """
    file, _, name = text.rpartition(":")
    namespace = _run(file)
    if name not in namespace:
        raise RunError(f"{file}: expected {quote(name)} in it, found none")
    return Plugin(
        name, namespace[name], f"{Path(file).name}, sha256 {sha256(Path(file).read_bytes()).hexdigest()}"
    )


def _run(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise RunError(f"{file}: no such file; expected a Python file")
    try:
        return runpy.run_path(file)
    except PrbError:
        raise
    except (Exception, SystemExit) as error:
        raise RunError(f"{file}: the file fails: {type(error).__name__}: {error}") from error
