"""Exit status 0 if this Python has the package, from this checkout, with all its requirements.

    python .ci/satisfied.py [EXTRA]

Needs only the standard library: it runs before anything is installed.
"""

import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(extra: str | None) -> int:
    try:  # pip brings the parser of requirement strings
        from pip._vendor.packaging.requirements import Requirement
    except ImportError:
        from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *(extras[extra] if extra else []))]
    for requirement in wanted:  # grows by the requirements of extras
        if requirement.marker and not requirement.marker.evaluate():
            continue
        if requirement.name == project["name"]:
            wanted += [Requirement(text) for name in requirement.extras for text in extras[name]]
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            return _missing(requirement, "is not installed")
        if not requirement.specifier.contains(found, prereleases=True):
            return _missing(requirement, f"has version {found}")
        for text in metadata.requires(requirement.name) or []:
            further = Requirement(text)
            marker, further.marker = further.marker, None
            if marker and not marker.evaluate({"extra": ""}):
                wanted += [further] * any(marker.evaluate({"extra": name}) for name in requirement.extras)
    try:
        scripts = metadata.distribution(project["name"]).entry_points
    except metadata.PackageNotFoundError:
        return _missing(project["name"], "is not installed")
    if {script.name for script in scripts} < set(project["scripts"]):
        return _missing(project["name"], "lacks a command")
    return _from_this_checkout(project["name"])


def _from_this_checkout(name: str) -> int:
    """An editable install of another checkout would test the wrong code."""
    package = find_spec(name.replace("-", "_"))
    origin = package.origin if package else None
    if origin is None or not Path(origin).resolve().is_relative_to(ROOT):
        return _missing(name, f"is installed from {origin or 'nowhere'}")
    return 0


def _missing(requirement: object, why: str) -> int:
    print(f"{requirement}: {why}; installing", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))
