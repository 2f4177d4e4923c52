"""Methods of personalisation: how a model learns about individual users.

This file recognises the folders of fitted methods and of user states without reading their contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

PERSONALISED: Final = "personalised.json"  # file that describes the fitted method

FITTED: Final = "fitted"  # the folder of a study with a folder for each fitted method

SPLITS: Final = "splits.json"  # the file of a study that names the people of each part

STATES: Final = "states.json"
"""The file of a folder of states; it is written last, so that a folder which has it is whole."""


SOFT_PROMPTS: Final = ("users.safetensors", "users.json")
"""The files with the soft prompts of users beside a model: the table, and whose its rows are."""


def has_soft_prompts(folder: Path) -> bool:
    """Return whether a model folder contains soft prompts of users, complete or not."""
    return any((folder / name).exists() for name in SOFT_PROMPTS)


def is_personalised(model: object) -> bool:
    """Return whether the model is a folder of a fitted method."""
    return isinstance(model, str | Path) and (Path(model).expanduser() / PERSONALISED).is_file()


def fitted_methods(study: str | Path) -> list[Path]:
    """Return the folders of the fitted methods of a study; empty if the folder is not a study."""
    return sorted(path.parent for path in Path(study).expanduser().glob(f"{FITTED}/*/{PERSONALISED}"))


def holds_states(folder: object) -> bool:
    """Return whether the argument is a folder with user states."""
    return isinstance(folder, str | Path) and (Path(folder).expanduser() / STATES).is_file()
