"""What every config in `configs/` changes of the defaults, and the defaults, so that any change shows in a review.

python -m tests.golden.configs

writes the dumps again; commit what it changes together with the change that caused it.
"""

import json
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DUMPS = Path(__file__).resolve().parent / "configs.txt"
REFRESH = "python -m tests.golden.configs"


def config_files() -> list[Path]:
    return sorted(CONFIGS.glob("*.py"))


def flat(config: Path) -> dict[str, object]:
    """The settings of a config; what it leaves for the command line stands as PATH and FILE."""
    from prb_jax.records.config_files import read_config
    from prb_jax.records.options import flat_settings
    from prb_jax.training.config import load_settings

    read = read_config(config)
    given = [
        f"{key}={word}" for key, word in (("model", "PATH"), ("data", "FILE")) if getattr(read, key) is None
    ]
    return flat_settings(load_settings(read, given))


def dump() -> str:
    """`a.b.c: value` lines below the name of each config, but for what is as by default."""
    from prb_jax.records.options import flat_settings
    from prb_jax.training.config import TrainSettings

    defaults = flat_settings(TrainSettings())
    parts = {"defaults": defaults}
    for config in config_files():
        parts[config.name] = {key: value for key, value in flat(config).items() if value != defaults[key]}
    return "\n".join(
        "".join([f"# {name}\n", *(f"{key}: {json.dumps(value)}\n" for key, value in values.items())])
        for name, values in parts.items()
    )


if __name__ == "__main__":
    DUMPS.write_text(dump(), encoding="utf-8")
