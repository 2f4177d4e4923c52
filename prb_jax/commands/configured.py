"""Arguments of the verbs that train: a config, keys that change it, and a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from prb_jax.commands.arguments import Parser, add_no_progress


def add_configured(sub: Parser, *, config: str, overrides: str, out: str) -> None:
    """Add the arguments; `given_config` returns the first two.

    Args:
      sub: the parser of the verb.
      config: the name of a config, for the help.
      overrides: some keys with values, for the help.
      out: names of files in the run folder, for the help.
    """
    sub.needed = ("config", "out")
    sub.option(
        "[CONFIG]", f"Python, YAML or TOML file; or the name of a config that prb_jax brings, as {config}"
    )
    sub.option("[KEY=VALUE ...]", f"as {overrides}", dest="overrides")
    sub.option("--out DIR", f"run folder: {out}")
    add_no_progress(sub)
    sub.option("--show-config", "print a YAML config of every option with its meaning, and train nothing")


def given_config(options: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the config, None where there is none, and the keys with values.

    Without `--show-config` a config and `--out` are required: their absence ends the process with status 2.
    """
    given = [word for word in (options.config, *options.overrides) if word is not None]
    is_config = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    config, overrides = given[0] if is_config else None, given[is_config:]
    wanted = () if options.show_config else (("CONFIG", config), ("--out", options.out))
    options.parser.require([name for name, value in wanted if value is None])
    return config, overrides
