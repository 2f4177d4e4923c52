"""Text dumps of every config in `configs/`, so that any change of a default shows in a review.

python -m tests.golden.configs

writes them again; commit what it changes together with the change that caused it.
"""

from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GOLDEN = Path(__file__).resolve().parent
REFRESH = "python -m tests.golden.configs"


def config_files() -> list[Path]:
    return sorted(CONFIGS.glob("*.py"))


def golden_file(config: Path) -> Path:
    return GOLDEN / f"{config.stem}.txt"


def dump(config: Path) -> str:
    """Flat `a.b.c: value` lines; what a config leaves for the command line stands as PATH and FILE."""
    from prb_jax.training.config import flat_settings, load_settings, read_config, value_text

    read = read_config(config)
    given = [
        f"{key}={word}" for key, word in (("model", "PATH"), ("data", "FILE")) if getattr(read, key) is None
    ]
    values = flat_settings(load_settings(read, given))
    return "".join(f"{key}: {value_text(value)}\n" for key, value in values.items())


def main() -> None:
    for config in config_files():
        golden_file(config).write_text(dump(config), encoding="utf-8")


if __name__ == "__main__":
    main()
