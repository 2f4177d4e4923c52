"""Leaves that are some rows of a tensor: InternLM2's q, k, v, and rows of a vocabulary, whole and in shards."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from prb_jax.models.checkpoints.fill import reads_of_shard
from prb_jax.models.checkpoints.hf_map import leaf_maps
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.checkpoints.weight_index import SliceReader, index_folder
from prb_jax.models.quantization import FORMS, quantize_params
from prb_jax.models.readouts.open_model import resolve_model
from tests.models.readouts.checkpoints import case_of
from tests.parity.reward_models import write_case

HEADS, KV_HEADS, SIZE, WIDTH = 4, 2, 8, 32


def rows_of(name: str) -> list[int]:
    """The rows of the fused matrix that hold q, k or v, one by one."""
    groups = HEADS // KV_HEADS  # of each key-value head its queries, then k, then v
    parts = {"q": range(groups), "k": [groups], "v": [groups + 1]}[name]
    return [
        (kv * (groups + 2) + part) * SIZE + i for kv in range(KV_HEADS) for part in parts for i in range(SIZE)
    ]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_every_part_of_a_fused_matrix(name: str, tmp_path: Path) -> None:
    folder, _ = write_case(case_of("internlm2"), tmp_path)
    config = resolve_model(folder).config
    leaf = next(leaf for leaf in leaf_maps(config) if leaf.path == ("layers", name))
    tensors = load_file(folder / "model.safetensors")
    fused = [tensors[f"model.layers.{layer}.attention.wqkv.weight"] for layer in range(2)]
    whole = np.stack([matrix[rows_of(name)].T for matrix in fused])
    assert leaf.shape == whole.shape
    columns = whole.shape[2]
    parts = [(0, columns), (0, columns // 2), (columns // 2, columns), (3, columns - 5), (7, 9)]
    with SliceReader(index_folder(folder)) as reader:
        for bounds in itertools.product(((0, 2), (1, 2)), ((0, WIDTH), (5, 21)), parts):
            region = tuple(slice(*ends) for ends in bounds)
            buffer = np.full([stop - start for start, stop in bounds], np.nan, np.float32)
            for read in reads_of_shard(buffer, leaf, region):
                reader.read_into(*read)
            np.testing.assert_array_equal(buffer, whole[region])


def test_fused_matrices_are_quantised_one_by_one(tmp_path: Path) -> None:
    folder, _ = write_case(case_of("internlm2"), tmp_path)
    config = resolve_model(folder).config
    narrow = load_params(folder, config, quantize="int8").params
    expected = quantize_params(config, load_params(folder, config).params, FORMS["int8"])
    assert narrow["layers"]["k"].dtype == np.int8
    jax.tree.map(np.testing.assert_array_equal, narrow, expected)


def test_rows_of_a_vocabulary(tmp_path: Path) -> None:
    folder, _ = write_case(case_of("nemotron-vocabulary"), tmp_path)
    config = resolve_model(folder, readout="vocabulary:17,4").config
    (leaf,) = [leaf for leaf in leaf_maps(config) if leaf.path == ("score",)]
    matrix = load_file(folder / "model.safetensors")["lm_head.weight"]
    with SliceReader(index_folder(folder)) as reader:
        buffer = np.zeros((WIDTH, 2), np.float32)
        for read in reads_of_shard(buffer, leaf, (slice(0, WIDTH), slice(0, 2))):
            reader.read_into(*read)
        assert reader.bytes_read == 2 * WIDTH * 4
    np.testing.assert_array_equal(buffer, matrix[[17, 4]].T)
