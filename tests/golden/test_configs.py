"""Every config file against its dump."""

import difflib

import pytest

from tests.golden.configs import GOLDEN, REFRESH, config_files, dump, golden_file


@pytest.mark.parametrize("config", config_files(), ids=lambda path: path.stem)
def test_a_config_is_what_its_dump_says(config):
    path = golden_file(config)
    assert path.exists(), f"{config.name} has no dump: run `{REFRESH}`"
    expected, found = path.read_text(encoding="utf-8"), dump(config)
    changes = "\n".join(
        difflib.unified_diff(
            expected.splitlines(), found.splitlines(), path.name, config.name, lineterm="", n=0
        )
    )
    assert found == expected, f"{changes}\nIf that is meant, run `{REFRESH}` and commit the dumps."


def test_no_dump_is_left_over():
    stems = {config.stem for config in config_files()}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == stems


@pytest.mark.parametrize("config", config_files(), ids=lambda path: path.stem)
def test_a_config_names_its_command_and_the_keys_of_every_config(config):
    text = config.read_text(encoding="utf-8")
    assert f"prb train configs/{config.name}" in text.partition('"""')[2].partition('"""')[0]
    keys = {line.partition(":")[0] for line in dump(config).splitlines()}
    assert {"model", "data", "steps", "seed", "dtype", "mesh"} <= keys
