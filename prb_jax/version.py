"""The versions of this package and of the packages that it computes with."""

from collections.abc import Iterable
from importlib import metadata

__version__ = "0.1.0"


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of this package and of each named package; None if a package is not installed."""
    installed: dict[str, str | None] = {"prb_jax": __version__}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def computing_versions(*, plain: bool) -> dict[str, str | None]:
    """Return the versions of all packages that affect results; `plain` means a scorer without weights."""
    packages = ("numpy",) if plain else ("numpy", "jax", "jaxlib", "flax", "transformers", "tokenizers")
    return versions(packages)
