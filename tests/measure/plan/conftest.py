"""A tiny model that is planned, and one device to trace its programs for."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from jax.sharding import Mesh

from prb_jax.platform.meshes import make_mesh
from tests.measure.plan.tiny import TINY


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh(devices=jax.devices()[:1])
