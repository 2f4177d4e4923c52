"""Fingerprints: other weights are noticed without reading all of them."""

import numpy as np
from safetensors.numpy import save_file

from prb_jax.checkpoints.locate import fingerprint


def test_a_large_file_whose_head_alone_differs_is_another_one(tmp_path) -> None:
    found = []
    for value in (0.0, 0.0, 1e-3):
        tensors = {name: np.zeros(5_000_000, np.float32) for name in ("a", "z")}
        tensors["score.weight"] = np.zeros((1, 24), np.float32)
        tensors["score.weight"][0, 5] = value
        save_file(tensors, tmp_path / "model.safetensors")
        found.append(fingerprint(tmp_path)["model.safetensors"])
    same, again, other = found
    assert same == again != other
    assert same.startswith("sampled-sha256:")
