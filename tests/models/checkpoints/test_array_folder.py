"""Arrays in a folder of Orbax come back bit for bit, and a damaged folder is told apart from a good one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prb_jax.errors import RunError
from prb_jax.models.checkpoints.array_folder import bytes_on_disk, read_arrays, write_arrays
from prb_jax.personal.saved import read_tree, write_tree


def test_a_tree_of_any_dtype_comes_back_as_it_was(tmp_path):
    rng = np.random.default_rng(0)
    tree = {
        "layers": [{"w": rng.normal(size=(3, 2)).astype(np.float32)}, {"w": np.arange(4, dtype=np.int32)}],
        "half": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "keys": rng.integers(0, 256, (2, 16)).astype(np.uint8),
        "mask": np.array([True, False]),
        "number": np.float32(0.1),
        "none": {},
    }
    facts = write_tree(tmp_path / "arrays", tree)
    restored = read_tree(tmp_path / "arrays", facts)
    assert restored.keys() == tree.keys()
    assert jax.tree.map(lambda array: array.dtype, restored) == jax.tree.map(lambda array: array.dtype, tree)
    jax.tree.map(np.testing.assert_array_equal, restored, tree)
    assert bytes_on_disk(tmp_path / "arrays") > 60
    assert write_tree(tmp_path / "again", tree)["digest"] == facts["digest"]


def test_a_folder_that_was_changed_is_refused(tmp_path):
    described = write_arrays(tmp_path / "arrays", {"a": np.arange(3, dtype=np.float32)})
    other = write_arrays(tmp_path / "other", {"a": np.ones(3, np.float32)})
    with pytest.raises(RunError, match="arrays: damaged: a differs from what was saved"):
        read_arrays(tmp_path / "arrays", other)
    with pytest.raises(RunError, match="cannot be read"):
        read_arrays(tmp_path / "arrays", {"b": described["a"]})
    with pytest.raises(RunError, match="no such folder"):
        read_arrays(tmp_path / "none", described)
    with pytest.raises(RunError, match="is not described by the file beside it"):
        read_tree(tmp_path / "arrays", {"tree": "a"})
