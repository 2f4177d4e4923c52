"""What a model learns about single users, by one of many methods.

This file says how the folder of a fitted method and that of the states of people are known, without reading them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PERSONALISED: Final = "personalised.json"  # the file that says what was fitted

FITTED: Final = "fitted"  # the folder of a study with a folder for each fitted method

SPLITS: Final = "splits.json"  # the file of a study that names the people of each part

STATES: Final = "states.json"
"""The file of a folder of states; it is written last, so that a folder which has it is whole."""


SOFT_PROMPTS: Final = ("users.safetensors", "users.json")
"""The files with the soft prompts of users beside a model: the table, and whose its rows are."""


def has_soft_prompts(folder: Path) -> bool:
    """Return whether a model has soft prompts of users, whole or not."""
    return any((folder / name).exists() for name in SOFT_PROMPTS)


def is_personalised(model: object) -> bool:
    """Return whether a model is named that is a folder of a fitted method."""
    return isinstance(model, str | Path) and (Path(model).expanduser() / PERSONALISED).is_file()


def fitted_methods(study: str | Path) -> list[Path]:
    """Return the folders of the fitted methods of a study; none where no study is named."""
    return sorted(path.parent for path in Path(study).expanduser().glob(f"{FITTED}/*/{PERSONALISED}"))


def holds_states(folder: object) -> bool:
    """Return whether a folder is named that holds the states of people."""
    return isinstance(folder, str | Path) and (Path(folder).expanduser() / STATES).is_file()
