"""Optional packages, which an extra of `pyproject.toml` brings."""

import sys
import warnings
from importlib.util import find_spec

from prb_jax.errors import PrbWarning, RunError

EXTRAS = {
    "report": ("matplotlib",),
    "texts": ("rouge_score", "sacrebleu"),
    "build": ("datasketch",),
    "serve": ("starlette", "uvicorn", "prometheus_client"),
    "redact": ("scrubadub",),
    "inspect": ("inspect_ai",),
}
"""The modules that an extra of `pyproject.toml` brings, which a plain `pip install prb-jax` does not."""


def lacking_extra(extra: str) -> str | None:
    """Return the missing packages of an extra with the command that installs them; None if all are installed."""
    missing = [module for module in EXTRAS[extra] if not _installed(module)]
    if not missing:
        return None
    lacks = "which is not installed" if len(missing) == 1 else "which are not installed"
    return f"needs {' and '.join(missing)}, {lacks}: pip install 'prb-jax[{extra}]'"


def need_extra(extra: str, what: str) -> None:
    """Check that the packages of an extra are installed.

    Raises:
      RunError: If a package is missing; the message names it, its purpose and the command that installs it.
    """
    if lacking := lacking_extra(extra):
        raise RunError(f"{what}: {lacking}")


def _installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def has_extra(extra: str, what: str) -> bool:
    """Return whether the packages of an extra are installed; if not, warn that ``what`` is left out."""
    if lacking := lacking_extra(extra):
        warnings.warn(f"left out: {what}: {lacking}", PrbWarning, stacklevel=2)
    return lacking is None
