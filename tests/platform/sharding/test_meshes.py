"""The same scores on one, four and eight devices, whatever the mesh; parameters really are split."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plain_process import ROOT, plain_environment
from tests.platform.sharding.mesh_scores import (
    CALLERS,
    MESHES,
    comparisons,
    scores_and_codes,
    sha256_of_layers,
)
from tests.tiny_models import write_model_without_torch
from tests.tiny_tokenizer import write_tokenizer

REFUSED = {
    "tensor=4": "mesh axis tensor=4 does not divide num_key_value_heads=2",
    "data=3": "mesh 'data=3' takes 3 devices, but 4 are present: write -1 for one axis to use all of them",
}


# Rows, parameters, heads and tokens are split, and parameters with their quantised weights.
FEW = ("fsdp=2,tensor=2", "fsdp=2,sequence=4", "int8@fsdp=4")
# Gemma 3: windows and two ropes under lax.cond; Qwen 3: norms of queries and keys.
ALL = [pytest.param((family, ()), id=family, marks=pytest.mark.slow) for family in ("qwen3", "gemma3")]
ALL.append(pytest.param(("qwen3_5", FEW), id="qwen3_5", marks=pytest.mark.slow))


def run(folder: Path, out: Path, scored: tuple[str, ...]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.platform.sharding.mesh_scores", folder, out, *scored],
        capture_output=True, text=True, cwd=ROOT, env=plain_environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module", params=[pytest.param(("qwen3", FEW), id="few"), *ALL])
def results(request, tmp_path_factory) -> dict[str, Any]:
    """By mesh, and "alone": one device, in this process. The scores are those of some meshes, or of all."""
    import jax

    import prb_jax as prb
    from prb_jax.platform.meshes import make_mesh

    family, scored = request.param
    place = tmp_path_factory.mktemp(family)
    # Head dimension 24: tensor=2 splits between heads, fsdp=8 divides the width.
    folder = write_model_without_torch(place / "model", family, vocab_size=400)
    write_tokenizer(folder)
    by_mesh = run(folder, place / "found.json", scored)
    by_mesh["scored"] = scored or [
        mesh for meshes in MESHES.values() for mesh in meshes.split() if mesh not in REFUSED
    ]
    by_mesh["rounded"] = [mesh for mesh in by_mesh["scored"] if by_mesh[mesh]["recorded"]]
    for name, form in (("alone", None), ("int8@alone", "int8"), ("int8-weights@alone", "int8-weights")):
        alone = prb.load(folder, mesh=make_mesh(devices=jax.devices()[:1]), quantize=form)
        by_mesh[name] = {"sha256": sha256_of_layers(alone.params)}
        if not scored or form != "int8-weights":
            by_mesh[name]["scores"] = [row.tolist() for row in alone.score(comparisons(), batch_tokens=512)]
        if by_mesh["rounded"] and form == "int8":
            by_mesh[name]["recorded"] = scores_and_codes(alone)
    return by_mesh


def test_scores_do_not_depend_on_the_mesh(results: dict[str, Any]) -> None:
    for mesh in set(results["scored"]).difference(results["rounded"]):
        alone = results[f"{''.join(mesh.rpartition('@')[:2])}alone"]["scores"]
        assert np.std([row[0] for row in alone]) > 0.1
        for row, expected in zip(results[mesh]["scores"], alone, strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-5, rtol=0, err_msg=mesh)


def test_a_program_on_a_mesh_of_its_own_gets_the_same_scores(results: dict[str, Any]) -> None:
    """One with explicit axes over the same devices, which may split tokens too."""
    for mesh in {mesh for mesh in CALLERS if results[mesh].get("callers")}:
        for row, expected in zip(results[mesh]["callers"], results["alone"]["scores"][:3], strict=True):
            np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5, rtol=0, err_msg=mesh)


def test_parameters_are_split(results: dict[str, Any]) -> None:
    """Each device holds its part only: shapes, and the number of distinct parts."""
    for mesh, parts, whole in (("fsdp=4", 4, 1), ("fsdp=2,tensor=2", 4, 1), ("fsdp=4,tensor=2", 8, 1)):
        shards = results[mesh]["shards"]
        for name in ("layers/q", "layers/o", "layers/gate", "layers/down", "embed"):
            indices, shape, local = shards[name]
            assert len(indices) == parts, (mesh, name)
            assert np.prod(shape) == parts * np.prod(local), (mesh, name)
        for name in ("layers/input_norm", "final_norm", "score"):
            assert len(shards[name][0]) == whole
    assert all(len(indices) == 1 for indices, *_ in results["data=4"]["shards"].values())
    _, shape, local = results["fsdp=2,tensor=2"]["shards"]["layers/q"]
    assert (shape[1:], local[1:]) == ([64, 96], [32, 48])


def test_quantised_weights_are_split_and_do_not_depend_on_the_mesh(results: dict[str, Any]) -> None:
    """The same integers and scales, though a shard has a part of a channel's inputs only."""
    for form, mesh, suffix, parts in (
        ("int8", "fsdp=2,tensor=2", "scale", 2),
        ("int8-weights", "fsdp=4,tensor=2", "weight_scale", 4),
    ):
        mesh = f"{form}@{mesh}"
        assert results[mesh]["sha256"] == results[f"{form}@alone"]["sha256"] != results["alone"]["sha256"]
        shards = results[mesh]["shards"]
        for name, scale_parts in (("q", 2), ("gate", 2), ("o", parts), ("down", parts)):
            indices, shape, local = shards[f"layers/{name}"]
            assert len(indices) == 2 * parts
            assert np.prod(shape) == 2 * parts * np.prod(local)
            indices, scales, local_scales = shards[f"layers/{name}_{suffix}"]
            assert len(indices) == scale_parts
            assert (scales, local_scales) == ([shape[0], shape[2]], [local[0], local[2]])


def test_quantised_products_are_exact_on_any_mesh(results: dict[str, Any]) -> None:
    for mesh in {"int8@fsdp=4", *results["rounded"]}:
        assert results[mesh]["inexact"] == {"q": 0, "o": 0, "gate": 0, "down": 0}


@pytest.mark.parametrize("results", ALL, indirect=True)
def test_only_rounding_moves_scores_of_int8(results: dict[str, Any]) -> None:
    """Attention over a part of the heads is compiled to another order of float32 sums, and so are recurrent layers over
    a part of the streams. An activation that this moves by 1e-7, over the middle between two integers, goes to the
    other one. Where no activation that a score depends on did so, in any matrix of any layer, the score is that of one
    device."""
    alone = results["int8@alone"]["recorded"]
    assert len(results["rounded"]) == 1
    for mesh in (results[mesh]["recorded"] for mesh in results["rounded"]):
        same = [
            (on_mesh, expected)
            for rows in zip(mesh["scores"], alone["scores"], mesh["codes"], alone["codes"], strict=True)
            for on_mesh, expected, *codes in zip(*rows, strict=True)
            if codes[0] == codes[1]
        ]
        assert same
        for on_mesh, expected in same:
            np.testing.assert_allclose(on_mesh, expected, atol=1e-5, rtol=0)


def test_rows_are_dealt_over_data_and_fsdp(results: dict[str, Any]) -> None:
    for mesh, parts in (("data=4", 4), ("fsdp=4", 4), ("fsdp=2,tensor=2", 2), ("data=2,fsdp=2,tensor=2", 4)):
        whole, local = results[mesh]["batch"]
        assert whole[0] == parts
        assert local == [1, whole[1]]


def test_without_a_mesh_parameters_are_split_over_all_devices(results: dict[str, Any]) -> None:
    assert results["default"]["axes"] == {"data": 1, "fsdp": 8, "sequence": 1, "tensor": 1}


@pytest.mark.parametrize("mesh", REFUSED)
def test_a_mesh_that_does_not_fit_is_one_message(results: dict[str, Any], mesh: str) -> None:
    assert results[mesh] == {"error": REFUSED[mesh]}
