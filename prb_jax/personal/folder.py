"""How the folder of a fitted method is known, without reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PERSONALISED: Final = "personalised.json"
"""The file that says what was fitted."""


def is_personalised(model: object) -> bool:
    """Return whether a model is named that is a folder of a fitted method."""
    return isinstance(model, str | Path) and (Path(model).expanduser() / PERSONALISED).is_file()
