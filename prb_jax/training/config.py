"""Configs of training runs.

The keys are those of `prb_jax.training.settings`. A YAML or TOML file has them dotted or nested; a Python file has a
function that gives an ml_collections `ConfigDict`:

    from prb_jax.training.config import default_config

    def get_config():
        config = default_config()
        config.method = "profile_context"
        config.optimizer.learning_rate = 3e-4
        return config
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from prb_jax.data.config_files import build_settings, to_config_dict
from prb_jax.errors import RunError
from prb_jax.training.settings import TrainSettings

Config = str | Path | ConfigDict | Mapping[str, Any] | TrainSettings


def default_config() -> ConfigDict:
    """Every option with its default. Keys cannot be added, and values keep their types."""
    return to_config_dict(TrainSettings())


def load_settings(
    config: Config | None, overrides: Sequence[str] = (), *, complete: bool = True, data_given: bool = False
) -> TrainSettings:
    """Return the checked settings of a config with overrides applied.

    Args:
      config, overrides: as of :func:`prb_jax.data.config_files.build_settings`.
      complete: a model and data must be given.
      data_given: the caller has the training data, so that the settings need not name any.

    Raises:
      RunError: an unknown key (naming the nearest one) or a wrong type.
      DataError: a value out of range.
    """
    settings = build_settings(TrainSettings, config, overrides)
    if not settings.model and complete:
        raise RunError(
            "config key 'model': expected a folder, a hub id or 'scratch', found none: add model=PATH"
        )
    if not settings.data and complete and not data_given:
        raise RunError("config key 'data': expected a file, folder or data set, found none: add data=PATH")
    return settings
