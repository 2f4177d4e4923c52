"""The task file of SkyPilot: its own schemas take it, and its shell starts the command on every node."""

import subprocess

import pytest
import yaml

from tests.launch.conftest import LAUNCH, ROOT, Stubs

TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())


def test_the_schemas_of_sky_take_it():
    schemas = pytest.importorskip("sky.utils.schemas", reason="needs skypilot")
    import jsonschema

    jsonschema.validate(TASK, schemas.get_task_schema())
    jsonschema.validate(TASK["resources"], schemas.get_resources_schema())
    jsonschema.validate(TASK["file_mounts"]["/mnt/prb"], schemas.get_storage_schema())


def test_the_command_is_started_on_each_node(stubs: Stubs):
    (stubs.home / "launch").symlink_to(ROOT / "launch")
    command = """printf '%s ' "a b" "$JAX_COORDINATOR_ADDRESS" "$JAX_NUM_PROCESSES" "$JAX_PROCESS_ID\""""
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    for extra, expected in (("cuda", "a b 10.0.0.1:8476 2 1 "), ("tpu", "a b    ")):
        environment = stubs.environment() | nodes | {"EXTRA": extra, "COMMAND": command}
        shell = ["bash", "-c", TASK["run"]]
        done = subprocess.run(
            shell, cwd=stubs.home, env=environment, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
