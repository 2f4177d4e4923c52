"""A store in memory, local copies in a folder of the test, and no waiting between tries."""

from collections.abc import Iterator

import pytest

from prb_jax.platform import paths
from prb_jax.platform.storage import objects
from tests.platform.storage.stores import UnreliableStore, store_in_memory


@pytest.fixture
def store(tmp_path, monkeypatch) -> Iterator[type[UnreliableStore]]:
    monkeypatch.setenv("PRB_JAX_STORAGE", str(tmp_path / "copies"))
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    paths.copies.clear()
    with store_in_memory() as stand_in:
        yield stand_in
