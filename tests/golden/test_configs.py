"""Every config file against what it changes."""

import difflib

import pytest

from tests.golden.configs import DUMPS, REFRESH, config_files, dump, flat


def test_the_configs_are_what_their_dump_says():
    expected, dumped = DUMPS.read_text(encoding="utf-8"), dump()
    changes = "\n".join(
        difflib.unified_diff(
            expected.splitlines(), dumped.splitlines(), DUMPS.name, "configs", lineterm="", n=3
        )
    )
    assert dumped == expected, f"{changes}\nIf that is meant, run `{REFRESH}` and commit the dump."


@pytest.mark.parametrize("config", config_files(), ids=lambda path: path.stem)
def test_a_config_names_its_command_and_the_keys_of_every_config(config):
    text = config.read_text(encoding="utf-8")
    assert f"prb train configs/{config.name}" in text.partition('"""')[2].partition('"""')[0]
    assert {"model", "data", "steps", "seed", "dtype", "mesh"} <= flat(config).keys()
