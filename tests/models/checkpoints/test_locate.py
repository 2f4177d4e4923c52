"""Fingerprints: other weights are noticed without reading all of them."""

import numpy as np
from safetensors.numpy import save_file

from prb_jax.models.checkpoints.locate import fingerprint


def test_a_large_file_whose_head_alone_differs_is_another_one(tmp_path) -> None:
    fingerprints = []
    for value in (0.0, 0.0, 1e-3):
        large, head = np.zeros(5_000_000, np.float32), np.zeros((1, 24), np.float32)
        head[0, 5] = value
        save_file({"a": large, "score.weight": head, "z": large.copy()}, tmp_path / "model.safetensors")
        fingerprints.append(fingerprint(tmp_path)["model.safetensors"])
    same, again, other = fingerprints
    assert same == again != other
    assert same.startswith("sampled-sha256:")
