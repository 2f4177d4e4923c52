"""Plans: the roofline's arithmetic, refusals, and real programs compiled for TPUs."""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from prb_jax import cli
from prb_jax.errors import CheckpointError, MeshError, RunError
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.named_shapes import read_model, shape_config
from prb_jax.plan.chips import CHIPS, PlanOptions, Slice, describe_slice, parse_topology
from prb_jax.plan.costs import Collective
from prb_jax.plan.planner import Plan, _nothing_kept, needed_bytes, plan, roofline, sweep
from prb_jax.plan.program import executed_flops, forward_flops, scoring_program, training_program
from prb_jax.plan.streams import (
    BatchShape,
    drawn_trees,
    scored_stream,
    stream_flops,
    tokens_in_buckets,
    trained_streams,
)
from prb_jax.plan.tables import plan_table, sweep_table
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
    message = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required " \
        "for HLO temporaries (16.50G) exceeds available HBM (15.75G). HLO module: jit_score."  # fmt: skip
    assert needed_bytes(message) == round(16.5 * GIB)
    assert needed_bytes("something else") == 0


def test_forward_flops_by_hand():
    config = parse_config(TINY, where="tiny")
    shape = BatchShape(batch=3, prefix=4, responses=2, response_length=2)
    matrices = 256 * (2 * 256 + 2 * 128 + 3 * 512)
    pairs = (1 + 2 + 3 + 4) + 2 * (5 + 6)
    by_hand = 3 * 3 * (2 * matrices * 8 + 4 * pairs * 4 * 64)
    assert forward_flops(config, shape) == by_hand


def test_streams_by_hand():
    """Two people with two questions: a profile of 128 tokens and 40 of each question, then two responses of 64."""
    config, mesh = parse_config(TINY, where="tiny"), make_mesh(devices=jax.devices()[:1])
    shape = BatchShape(batch=4, prefix=168, responses=2, response_length=64, questions_per_user=2)
    batch, steps, read = scored_stream(config, shape, mesh=mesh)
    assert (batch.tokens.shape, batch.reads.shape) == ((1, 1024), (1, 8))  # 928 real ones
    # two blocks of 512, and the second person begins in the first of them
    assert steps == 3
    assert read == 2 * 3 * 512 * (2 * 4 * 64) * 3
    matrices = 256 * (2 * 256 + 2 * 128 + 3 * 512)
    tree = 168 * 169 // 2 + 2 * sum(168 + j for j in range(1, 65))
    pairs = 4 * tree - 2 * (128 * 129 // 2)
    by_hand = 2 * (2 * matrices * 928 + 4 * pairs * 4 * 64)
    assert stream_flops(config, shape, mesh=mesh, reads_only=False) == by_hand * 3 / 2
    last = 2 * 256 * (2 * 128 * 928 + (2 * 256 + 3 * 512) * 8) + 4 * 8 * 232 * 4 * 64
    assert stream_flops(config, shape, mesh=mesh, reads_only=True) == by_hand + last


def test_trained_streams_by_hand():
    """Four trees of 200 tokens in one stream of two blocks; the third tree lies in both."""
    config, mesh = parse_config(TINY, where="tiny"), make_mesh(devices=jax.devices()[:1])
    shape = BatchShape(batch=4, prefix=100, responses=2, response_length=50)
    trees = drawn_trees(shape, longest=1024)
    found = trained_streams(config, trees, mesh=mesh)
    assert (found.batch.tokens.shape, found.batch.reads.shape) == ((1, 1024), (1, 16))
    assert found.extras.labels.shape == (1, 16, 2)
    assert (found.computed, found.steps) == (1024, 3)
    assert tokens_in_buckets(config, trees, mesh=mesh) == 4 * (112 + 2 * 64)
    uneven = drawn_trees(
        BatchShape(batch=999, prefix=100, responses=2, response_length=50, spread=0.4), longest=300
    )
    prefixes = np.log([len(tree.prefix) for tree in uneven])
    assert np.median(prefixes) == pytest.approx(math.log(100), abs=0.05)
    assert np.std(prefixes) == pytest.approx(0.4, rel=0.1)
    assert max(len(tree.sequence(0)) for tree in uneven) == 300
    with pytest.raises(MeshError, match="spread: is for training over packed streams"):
        training_program(
            config, BatchShape(batch=4, spread=0.4, **SHAPE), mesh=mesh, dtype="bfloat16", tuning="full", remat="none"
        )  # fmt: skip


def test_products_of_the_traced_programs():
    """Blocks of queries against all earlier keys cost a little more than the visible pairs; a trained
    model costs three forward passes, and four with all of it computed again. At this width the products
    of adapters are an eighth of the matrices'."""
    config = parse_config(TINY, where="tiny")
    shape = BatchShape(batch=2, **SHAPE)
    mesh = make_mesh(devices=jax.devices()[:1])

    def products(program: Any) -> float:
        return executed_flops(program.function.trace(*program.arguments).jaxpr) / forward_flops(config, shape)

    train: Any = {"mesh": mesh, "dtype": "bfloat16", "remat": "none"}
    assert 1.0 < products(scoring_program(config, shape, mesh=mesh, dtype="bfloat16")) < 1.1
    assert 3.0 < products(training_program(config, shape, tuning="full", **train)) < 3.3
    assert 2.0 < products(training_program(config, shape, tuning="lora", **train)) < 2.7
    again = training_program(config, shape, tuning="full", **{**train, "remat": "full"})
    assert 4.0 < products(again) < 4.4


def compiled_costs(program: Any) -> np.ndarray:
    """[3]: products of the traced program; FLOPs and bytes by the compiler's own count."""
    traced = program.function.trace(*program.arguments)
    counted = traced.lower().compile().cost_analysis()
    return np.array([executed_flops(traced.jaxpr), counted["flops"], counted["bytes accessed"]])


def test_work_grows_linearly_with_comparisons():
    """What ten comparisons cost more than five, twenty cost twice as much more: weights are read once."""
    config = parse_config(TINY, where="tiny")
    mesh = make_mesh(devices=jax.devices()[:1])

    def of(batch: int) -> np.ndarray:
        shape = BatchShape(batch=batch, **SHAPE)
        return compiled_costs(scoring_program(config, shape, mesh=mesh, dtype="float32"))

    few, more, most = of(5), of(10), of(20)
    added, twice = more - few, most - more
    np.testing.assert_allclose(twice[:2], 2 * added[:2], rtol=1e-3)
    # The compiler fuses a few operations in another way at another size.
    np.testing.assert_allclose(twice[2], 2 * added[2], rtol=0.1)
    products, flops, read = most / more
    assert products == 2
    assert flops <= 2
    assert read < 2


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_twice_the_responses_are_less_than_twice_the_work(train: bool):
    """A prefix is computed once: of trees with P = 128 and R = 16, P + 8 R is 4/3 of P + 4 R."""
    config = parse_config(TINY, where="tiny")
    mesh = make_mesh(devices=jax.devices()[:1])

    def of(responses: int) -> np.ndarray:
        shape = BatchShape(batch=4, prefix=128, responses=responses, response_length=16)
        if not train:
            return compiled_costs(scoring_program(config, shape, mesh=mesh, dtype="float32"))
        options: Any = {"tuning": "full", "remat": "none"}
        return compiled_costs(training_program(config, shape, mesh=mesh, dtype="float32", **options))

    products, flops, read = of(8) / of(4)
    assert products == pytest.approx(4 / 3, rel=0.03)
    assert flops < 1.5
    assert read < 1.6


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
        plan("qwen3-40m", PlanOptions(topology="v5e:2x2"))
    assert cli.main(["plan", "qwen3-40m", "--topology", "v5e:2x2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_models_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a config.json, a folder that holds one, or a shape"):
        read_model(tmp_path / "none")
    (tmp_path / "bad.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"bad.json: not valid JSON"):
        read_model(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object, found list"):
        read_model(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tuning", "lora"], "--tuning is for training only: it needs --train"),
        (["--remat", "full"], "--remat is for training only: it needs --train"),
        (["--sweep", "--mesh", "fsdp=4"], "--mesh does not go with --sweep, which tries meshes itself"),
        (["--spread", "0.4"], "--spread is for training only: it needs --train"),
        (["--train", "--questions-per-user", "2"], "--questions-per-user is for scoring only"),
        (
            ["--questions-per-user", "2"],
            "--questions-per-user is for packed streams: it needs --attention streams",
        ),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str, capsys):
    assert cli.main(["plan", "qwen3-40m", "--topology", "v5e:2x2", *flags]) == 2
    assert message in capsys.readouterr().err


def made(mesh: str, batch: int, *, fits: bool, seconds: float | None, peak: int) -> Plan:
    return Plan(
        fits=fits, chips=4, peak_bytes_per_chip=peak, argument_bytes_per_chip=1, temp_bytes_per_chip=1,
        hbm_bytes_per_chip=16 * GIB, flops=100.0 * batch, estimated_seconds=seconds, estimated_mfu=0.5,
        collectives={"all-gather": Collective(2, 3.0)}, compile_seconds=1.0, mesh=mesh, batch=batch,
    )  # fmt: skip


def test_a_sweep_orders_what_fits_by_speed(monkeypatch):
    """Of 4 chips: fsdp=4 up to a batch that does not fit; tensor=2 slower; tensor=4 refused."""
    asked: list[tuple[str, int]] = []

    def planned(config: Any, options: PlanOptions) -> Plan:
        mesh, batch = str(options.mesh), options.batch or 0
        asked.append((mesh, batch))
        if mesh == "fsdp=1,tensor=4":
            raise MeshError("heads")
        slow = 2.0 if "tensor=2" in mesh else 1.0
        fits = not (mesh == "fsdp=4,tensor=1" and batch > 4)
        return made(mesh, batch, fits=fits, seconds=slow if fits else None, peak=batch)

    monkeypatch.setattr("prb_jax.plan.planner.plan", planned)
    seen: list[Plan] = []
    place = Slice("v5e:2x2", CHIPS["v5e"], [None] * 4)
    plans = sweep("qwen3-40m", PlanOptions(topology=place), report=seen.append)
    assert [(each.mesh, each.batch, each.fits) for each in plans] == [
        ("fsdp=4,tensor=1", 4, True),
        ("fsdp=2,tensor=2", 8, True),
        ("fsdp=2,tensor=2", 4, True),
        ("fsdp=2,tensor=2", 2, True),
        ("fsdp=4,tensor=1", 8, False),
    ]
    assert ("fsdp=4,tensor=1", 16) not in asked
    assert len(seen) == 5
    asked.clear()
    sweep("qwen3-40m", PlanOptions(topology=place, prefix=16_000), batches=(4,))
    assert [mesh for mesh, _ in asked] == [
        "fsdp=4,sequence=1,tensor=1", "fsdp=2,sequence=2,tensor=1", "fsdp=1,sequence=4,tensor=1",
        "fsdp=2,sequence=1,tensor=2", "fsdp=1,sequence=2,tensor=2", "fsdp=1,sequence=1,tensor=4",
    ]  # fmt: skip


def test_a_sweep_without_any_mesh():
    place = Slice("v5e:1x1", CHIPS["v5e"], jax.devices()[:1])
    with pytest.raises(MeshError, match=r"no mesh of v5e:1x1 can be: .*max_position_embeddings"):
        sweep("qwen3-40m", PlanOptions(topology=place, prefix=100_000))


def test_nothing_is_kept_in_the_compilation_cache():
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    with _nothing_kept():
        assert getattr(jax.config, name) == math.inf
    assert getattr(jax.config, name) == before


def test_tables():
    fitting = made("fsdp=4", 8, fits=True, seconds=0.5, peak=2 * GIB)
    refused = made("fsdp=2,tensor=2", 8, fits=False, seconds=None, peak=20 * GIB)
    console = Console(width=120, file=io.StringIO())
    console.print(plan_table(fitting, title="one"))
    console.print(sweep_table((fitting, refused), title="two"))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "2.00 GiB of 16.00 GiB" in text
    assert "50.0 %" in text
    assert "all-gather" in text
    assert "20.00 GiB" in text


class TestOnTpus:
    """Compiled by libtpu."""

    @pytest.fixture(autouse=True)
    def _libtpu(self):
        pytest.importorskip("libtpu")

    @pytest.mark.slow
    def test_two_slices_exchange_scores_alone(self, config_file, capsys):
        """Between slices scoring sends the scores of its trees, float32, and nothing else."""
        options: dict[str, Any] = {**SHAPE, "topology": "v5e:2x2", "slices": 2, "batch": 16}
        found = plan(config_file, PlanOptions(**options))
        assert (found.chips, found.mesh) == (8, "data=2,fsdp=4")
        between = {kind: each for kind, each in found.collectives.items() if kind.startswith("dcn ")}
        assert sum(each.count for each in between.values()) == 1
        assert sum(each.bytes for each in between.values()) < 16 * 1024
        inside = sum(each.bytes for kind, each in found.collectives.items() if kind not in between)
        assert found.seconds_by["links"] == pytest.approx(inside / CHIPS["v5e"].link_bandwidth)
        asked = plan(config_file, PlanOptions(mesh="fsdp=8,dcn=fsdp", **options))
        assert asked.mesh == "fsdp=8,dcn=fsdp"
        # now every layer's matrices cross: an eighth of each chip's to the one beside it in the other slice
        layers = 3 * 256 * (2 * 256 + 2 * 128 + 3 * 512) * 2
        crossing = sum(each.bytes for kind, each in asked.collectives.items() if kind.startswith("dcn "))
        assert crossing > layers / 8
        command = ["plan", str(config_file), "--topology", "v5e:2x2", "--slices", "2", "--mesh", "fsdp=8"]
        assert cli.main(command) == 2
        assert "axis data=1 crosses the 2 slices of 4 devices" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mesh": "fsdp=2"}, "mesh 'fsdp=2' takes 2 devices, but 4 are present"),
            ({"mesh": "tensor=4"}, "mesh axis tensor=4 does not divide num_key_value_heads=2"),
            ({"mesh": "fsdp=4", "batch": 6}, "mesh axis data=1 x fsdp=4 does not divide a batch of 6"),
            (
                {"mesh": "fsdp=4", "batch": 8, "attention": "streams", "questions_per_user": 3},
                "batch: expected at least 12 trees, 3 questions of a user in each of 4 streams, found 8",
            ),
            ({"prefix": 4096}, r"the model was made for 1024 \(max_position_embeddings\)"),
        ],
    )
    def test_what_does_not_divide(self, config_file, options: dict[str, Any], message: str):
        with pytest.raises(MeshError, match=message):
            plan(config_file, PlanOptions(topology="v5e:2x2", **{**SHAPE, **options}))

    def test_a_slice_that_does_not_exist(self):
        with pytest.raises(MeshError, match="topology 'v5e:3x7': libtpu knows no such slice"):
            describe_slice("v5e:3x7")

    @pytest.mark.slow
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_attention_is_a_kernel_forward_and_backward(self, head_dim: int):
        """In the compiled program, with windows and soft caps; and nothing in it is of the size T x T."""
        config = parse_config(
            {**shape_config("gemma2-27b"), "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": 512,
             "sliding_window": 256}, where="small",
        )  # fmt: skip
        mesh = make_mesh("fsdp=2,tensor=2", devices=describe_slice("v5e:2x2").devices)
        shape = BatchShape(batch=2, prefix=1664, responses=3, response_length=128)  # T = 2,048
        scoring = scoring_program(config, shape, mesh=mesh, dtype="bfloat16")
        training = training_program(config, shape, mesh=mesh, dtype="bfloat16", tuning="full", remat="none")
        splash, ours = {"splash_mha_fwd"}, {"stream_forward", "stream_by_query", "stream_by_key"}
        for program, kernels in ((scoring, splash), (training, ours)):
            text = program.function.trace(*program.arguments).lower().compile().as_text()
            assert set(re.findall(r"splash_mha_[a-z]+|stream_(?:forward|by_[a-z]+)", text)) == kernels
            assert 'custom_call_target="tpu_custom_call"' in text
            assert not re.search(r"\[(\d+,)*2048,2048\]", text)

    @pytest.mark.slow
    def test_packing_moves_nothing_between_chips(self, config_file):
        """A training step over streams holds the collectives of one over padded trees, and no other ones; its attention
        is the kernel, and nothing in it is of the size N x N."""
        mesh = make_mesh("data=2,fsdp=4,tensor=2", devices=describe_slice("v5e:4x4").devices)
        options: dict[str, Any] = {"mesh": mesh, "dtype": "bfloat16", "tuning": "full", "remat": "none"}
        config = read_model(config_file)
        packed = training_program(
            config, BatchShape(batch=16, prefix=500, responses=2, response_length=64, spread=0.3), **options
        )
        padded = training_program(
            config,
            BatchShape(batch=16, prefix=640, responses=2, response_length=64),
            attention="kernel",
            **options,
        )
        assert packed.arguments[2].tokens.shape == (8, 1536)
        assert packed.tokens < packed.computed_tokens < packed.bucket_tokens
        found = []
        for program, kernels in (
            (packed, {"stream_forward", "stream_by_query", "stream_by_key"}),
            (padded, {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}),
        ):
            text = program.function.trace(*program.arguments).lower().compile().as_text()
            assert set(re.findall(r"splash_mha_[a-z]+|stream_(?:forward|by_[a-z]+)", text)) == kernels
            assert not re.search(r"\[(\d+,)*1536,1536\]", text)
            kinds = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
            found.append(Counter(re.findall(rf" {kinds}", text)))
        assert found[0] == found[1]
        assert found[0]["all-gather"] > 0

    @pytest.mark.slow
    def test_scoring_over_streams(self, config_file, capsys):
        """Three questions a person, one person a chip; the kernel is in it, and no array of tokens by tokens."""
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--prefix", "128",
            "--response-length", "64", "--attention", "streams", "--questions-per-user", "3",
        ]  # fmt: skip
        assert cli.main(command) == 0
        words = " ".join(capsys.readouterr().out.split())  # a long path of the model breaks the line
        assert "2 responses of 64, 3 questions a user, bfloat16" in words
        assert cli.main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        mesh = make_mesh("fsdp=4", devices=describe_slice("v5e:2x2").devices)
        shape = BatchShape(batch=12, questions_per_user=3, **SHAPE)
        config = parse_config(TINY, where="tiny")
        assert found["flops"] == stream_flops(config, shape, mesh=mesh, reads_only=True)
        assert found["fits"]
        assert found["compile_seconds"] > 0
        program = scoring_program(config, shape, mesh=mesh, dtype="bfloat16", attention="streams")
        text = program.function.trace(*program.arguments).lower().compile().as_text()
        assert "stream_forward" in text
        assert "splash_mha" not in text
        assert not re.search(r"\[(\d+,)*512,512\]", text)

    @pytest.mark.slow
    def test_eight_bits_take_half_the_arguments_and_products(self):
        """Of the layers' matrices: int8 factors are multiplied as such."""
        asked = PlanOptions(topology="v5e:2x2", mesh="fsdp=4", batch=4, prefix=128)
        found = {form: plan("qwen3-0.6b", replace(asked, quantize=form)) for form in (None, "int8")}
        layers = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) * 2 / 4  # bytes a chip in bfloat16
        saved = found[None].argument_bytes_per_chip - found["int8"].argument_bytes_per_chip
        assert saved == pytest.approx(layers / 2, rel=0.02)
        seconds = {form: each.seconds_by["matrix products"] for form, each in found.items()}
        assert seconds["int8"] == pytest.approx(seconds[None] / 2, rel=0.1)
        with pytest.raises(MeshError, match="quantize: int8 is for scoring"):
            plan("qwen3-0.6b", replace(asked, train=True, quantize="int8"))
        with pytest.raises(CheckpointError, match="fp8 needs matrix units"):
            plan("qwen3-0.6b", replace(asked, quantize="fp8"))

    def test_a_model_that_does_not_fit(self, tmp_path, capsys):
        """An embedding of 24 GiB a chip."""
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**TINY, "vocab_size": 200_000_000}))
        command = ["plan", str(path), "--topology", "v5e:2x2", "--prefix", "128", "--json"]
        assert cli.main(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert set(found) == KEYS
        assert found["fits"] is False
        assert found["peak_bytes_per_chip"] >= found["argument_bytes_per_chip"] > 23 * GIB
        assert found["estimated_seconds"] is None
        assert found["collectives"] == {}

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


@pytest.mark.slow
class TestLargeModels:
    """Real sizes: minutes each."""

    @pytest.fixture(autouse=True)
    def _libtpu(self):
        pytest.importorskip("libtpu")

    weights = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) * 2  # bytes of the 8B shape's layers

    def test_8b_scoring_on_v5e(self):
        found = plan("qwen3-8b", PlanOptions(topology="v5e:4x4", mesh="fsdp=16", batch=32))
        check(found, below=2.0)
        # Nothing but weights and the embedded tokens moves, and each layer's seven matrices once.
        assert found.collectives["all-gather"].count <= 36 * 7 + 2
        assert set(found.collectives) == {"all-gather", "all-to-all"}
        moved = sum(each.bytes for each in found.collectives.values())
        assert 0.9 < moved / self.weights < 1.1
        assert found.attention == "splash kernel (Pallas)"
        assert found.estimated_mfu is not None
        assert found.estimated_mfu > 0.9

    def test_70b_scoring_on_v5e(self):
        found = plan("llama3.1-70b", PlanOptions(topology="v5e:4x4", mesh="fsdp=16", batch=16))
        check(found, below=12.0)
        weights = 80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672) * 2
        assert 0.9 < sum(each.bytes for each in found.collectives.values()) / weights < 1.1

    def test_long_profiles_are_split_over_the_sequence_axis(self):
        long = PlanOptions(topology="v5e:4x4", batch=4, prefix=32_512)
        split = plan("qwen3-8b", replace(long, mesh="fsdp=4,sequence=4"))
        check(split, below=2.5)
        whole = plan("qwen3-8b", replace(long, mesh="fsdp=4,tensor=4"))
        assert split.temp_bytes_per_chip < whole.temp_bytes_per_chip

    def test_27b_full_training_on_v5p(self):
        options: Any = {"mesh": "fsdp=64", "train": True, "batch": 64, "remat": "full"}
        check(plan("gemma2-27b", PlanOptions(topology="v5p:4x4x4", **options)), below=32)

    def test_8b_lora_training_on_v5e(self):
        options: Any = {"mesh": "fsdp=16", "train": True, "tuning": "lora", "batch": 16, "remat": "full"}
        found = plan("qwen3-8b", PlanOptions(topology="v5e:4x4", **options))
        check(found, below=5.0)
        # The weights move in the forward pass, and once more for the backward pass and what it computes again.
        moved = sum(each.bytes for each in found.collectives.values())
        assert 1.8 < moved / self.weights < 2.2


def test_slices_that_cannot_be():
    with pytest.raises(MeshError, match="slices: expected at least 1, found 0"):
        describe_slice("v5e:2x2", slices=0)
