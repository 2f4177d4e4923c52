"""Plans: the roofline's arithmetic, refusals, and real programs compiled for TPUs."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import pytest

from prb_jax import cli
from prb_jax.errors import CheckpointError, MeshError, RunError
from prb_jax.models.config import parse_config
from prb_jax.plan import plan
from prb_jax.plan.chips import CHIPS, describe_slice, parse_topology
from prb_jax.plan.planner import needed_bytes, read_model, roofline
from prb_jax.plan.program import BatchShape, executed_flops, forward_flops, scoring_program, training_program
from prb_jax.sharding import make_mesh

GIB = 1024**3
TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "num_labels": 1,
    "pad_token_id": 0,
}
SHAPE: dict[str, Any] = {"prefix": 128, "responses": 2, "response_length": 64}
KEYS = {
    "fits", "chips", "peak_bytes_per_chip", "argument_bytes_per_chip", "temp_bytes_per_chip", "hbm_bytes_per_chip",
    "flops", "estimated_seconds", "estimated_mfu", "collectives", "compile_seconds",
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_roofline():
    chip = CHIPS["v5e"]
    sides = roofline(chip, chips=4, matmul_flops=4 * 197e12, memory_bytes=819e9 / 2, link_bytes=200e9 / 4)
    assert sides == pytest.approx({"matrix products": 1.0, "memory": 0.5, "links": 0.25})


def test_what_the_compiler_says_it_needs():
    message = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. " \
        "Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."  # fmt: skip
    assert needed_bytes(message) == round(20.5 * GIB)
    assert needed_bytes("something else") == 0


def test_forward_flops_by_hand():
    config = parse_config(TINY, where="tiny")
    shape = BatchShape(batch=3, prefix=4, responses=2, response_length=2)
    matrices = 256 * (2 * 256 + 2 * 128 + 3 * 512)
    pairs = (1 + 2 + 3 + 4) + 2 * (5 + 6)
    by_hand = 3 * 3 * (2 * matrices * 8 + 4 * pairs * 4 * 64)
    assert forward_flops(config, shape) == by_hand


def test_products_of_the_traced_programs():
    """Blocks of queries against all earlier keys cost a little more than the visible pairs; a trained
    model costs three forward passes, and four with all of it computed again."""
    config = parse_config(TINY, where="tiny")
    shape = BatchShape(batch=2, **SHAPE)
    mesh = make_mesh(devices=jax.devices()[:1])

    def products(program: Any) -> float:
        return executed_flops(program.function.trace(*program.arguments).jaxpr) / forward_flops(config, shape)

    train: Any = {"mesh": mesh, "dtype": "bfloat16", "remat": "none"}
    assert 1.0 < products(scoring_program(config, shape, mesh=mesh, dtype="bfloat16")) < 1.1
    assert 3.0 < products(training_program(config, shape, tuning="full", **train)) < 3.3
    assert 2.0 < products(training_program(config, shape, tuning="lora", **train)) < 2.4
    again = training_program(config, shape, tuning="full", **{**train, "remat": "full"})
    assert 4.0 < products(again) < 4.4


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:4", "v9:2x2", "v5e:4x0", "v5e:4x4x4x4", "4x4"])
def test_topologies_that_cannot_be(name: str):
    with pytest.raises(MeshError, match=r"expected GENERATION:SHAPE as in v5e:4x4.*v4, v5e, v5p, v6e"):
        parse_topology(name)


def test_chips_of_a_topology():
    assert parse_topology("v5p:2x2x4") == (CHIPS["v5p"], 16)


def test_without_libtpu(monkeypatch, capsys):
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("no libtpu")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(RunError, match=r"planning needs libtpu.*pip install 'prb-jax\[plan\]'"):
        plan("qwen3-40m", topology="v5e:2x2")
    assert cli.main(["plan", "qwen3-40m", "--topology", "v5e:2x2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_models_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a config.json, a folder that holds one, or a shape"):
        read_model(tmp_path / "none")
    (tmp_path / "bad.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"bad.json: cannot be read as JSON"):
        read_model(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object, found list"):
        read_model(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tuning", "lora"], "--tuning is for training only: it needs --train"),
        (["--remat", "full"], "--remat is for training only: it needs --train"),
        (["--sweep", "--mesh", "fsdp=4"], "--sweep tries meshes itself"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str, capsys):
    assert cli.main(["plan", "qwen3-40m", "--topology", "v5e:2x2", *flags]) == 2
    assert message in capsys.readouterr().err


class TestOnTpus:
    """Compiled by libtpu."""

    @pytest.fixture(autouse=True)
    def _libtpu(self):
        pytest.importorskip("libtpu")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mesh": "fsdp=2"}, "mesh 'fsdp=2' takes 2 devices, but 4 are present"),
            ({"mesh": "tensor=4"}, "mesh axis tensor=4 does not divide num_key_value_heads=2"),
            ({"mesh": "fsdp=4", "batch": 6}, "mesh axis data=1 x fsdp=4 does not divide a batch of 6"),
            ({"prefix": 4096}, r"the model was made for 1024 \(max_position_embeddings\)"),
        ],
    )
    def test_what_does_not_divide(self, config_file, options: dict[str, Any], message: str):
        with pytest.raises(MeshError, match=message):
            plan(config_file, topology="v5e:2x2", **{**SHAPE, **options})

    def test_a_slice_that_does_not_exist(self):
        with pytest.raises(MeshError, match="topology 'v5e:3x7': libtpu knows no such slice"):
            describe_slice("v5e:3x7")

    def test_a_tiny_model(self, config_file, capsys):
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--prefix", "128",
            "--response-length", "64", "--batch", "8", "--json",
        ]  # fmt: skip
        assert cli.main(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) == KEYS
        assert found["fits"] is True
        assert found["chips"] == 4
        assert found["hbm_bytes_per_chip"] == 16 * GIB
        weights = 2 * (512 * 256 + 3 * 256 * (2 * 256 + 2 * 128 + 3 * 512)) / 4
        assert weights < found["argument_bytes_per_chip"] < 1.1 * weights
        assert found["peak_bytes_per_chip"] >= found["argument_bytes_per_chip"] + found["temp_bytes_per_chip"]
        assert found["flops"] == forward_flops(parse_config(TINY, where="tiny"), BatchShape(batch=8, **SHAPE))
        assert 0 < found["estimated_mfu"] < 1
        used = found["flops"] / (found["estimated_seconds"] * 4 * CHIPS["v5e"].bf16_flops)
        assert found["estimated_mfu"] == pytest.approx(used)
        # Each layer's matrices are gathered once, whole or piece by piece round a ring.
        layers = 3 * 256 * (2 * 256 + 2 * 128 + 3 * 512) * 2
        sent = sum(
            found["collectives"].get(kind, {"bytes": 0})["bytes"]
            for kind in ("all-gather", "collective-permute")
        )
        assert 0.7 * layers < sent < 1.3 * layers


def check(found: Any, *, below: float) -> None:
    assert found.fits
    assert found.peak_bytes_per_chip < below * GIB
    assert found.unknown_loops == 0
    assert found.estimated_seconds is not None
    assert math.isfinite(found.estimated_seconds)
