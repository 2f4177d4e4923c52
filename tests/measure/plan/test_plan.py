"""Plans: the roofline's arithmetic, refusals, and real programs compiled for TPUs."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console

from prb_jax import cli
from prb_jax.errors import CheckpointError, MeshError, RunError
from prb_jax.measure.plan.chips import CHIPS, PlanOptions, Slice, describe_slice, parse_topology
from prb_jax.measure.plan.costs import Collective
from prb_jax.measure.plan.planner import (
    Plan,
    _nothing_kept,
    first_that_fits,
    needed_bytes,
    plan,
    roofline,
    sweep,
)
from prb_jax.measure.plan.program import executed_flops, scoring_program, training_program
from prb_jax.measure.plan.streams import BatchShape, PlannedStreams, drawn_trees, planned_streams
from prb_jax.measure.plan.tables import plan_table, sweep_table
from prb_jax.models import decoder
from prb_jax.models.attention import streams
from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.named_shapes import read_model, shape_config
from prb_jax.platform.meshes import make_mesh
from prb_jax.training import step_flops
from tests.measure.plan.tiny import CONFIG, GIB, MATRICES, TINY, needs_libtpu

SHAPE: dict[str, Any] = {"prefix": 128, "responses": 2, "response_length": 64}
FULL: Any = {"tuning": "full", "remat": "none"}
STREAM_KERNELS = {"stream_forward", "stream_by_query", "stream_by_key"}
KEYS = {
    "fits", "chips", "peak_bytes_per_chip", "argument_bytes_per_chip", "temp_bytes_per_chip", "hbm_bytes_per_chip",
    "flops", "estimated_seconds", "estimated_mfu", "collectives", "compile_seconds", "tokens", "computed_tokens",
    "vain_pairs",
}  # fmt: skip
KERNEL = StreamAttention("kernel", "steps")


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


def packed(shape: BatchShape, mesh: Mesh, *, reads_only: bool = False, parts: int = 1) -> PlannedStreams:
    return planned_streams(
        CONFIG, shape, mesh=mesh, attention=replace(KERNEL, parts=parts), reads_only=reads_only
    )


def test_forward_flops_by_hand(mesh: Mesh):
    shape = BatchShape(batch=3, prefix=4, responses=2, response_length=2)
    pairs = (1 + 2 + 3 + 4) + 2 * (5 + 6)
    assert packed(shape, mesh).flops == 3 * 3 * (2 * MATRICES * 8 + 4 * pairs * 4 * 64)


def test_streams_by_hand(mesh: Mesh):
    """Two people with two questions: a profile of 128 tokens and 40 of each question, then two responses of 64."""
    shape = BatchShape(batch=4, prefix=168, responses=2, response_length=64, questions_per_user=2)
    planned = packed(shape, mesh)
    assert (planned.batch.tokens.shape, planned.batch.reads.shape) == ((1, 1024), (1, 16))
    assert (planned.tokens, planned.computed) == (928, 1024)
    # Two blocks of 512, and the second person begins in the last tile of the first of them: two triangles of ten tiles,
    # and four tiles of queries that see this one.
    assert planned.steps == (10 + 10 + 4) / 16
    assert planned.kernel_bytes == 2 * 3 * 512 * (2 * 4 * 64) * 3
    tree = 168 * 169 // 2 + 2 * sum(168 + j for j in range(1, 65))
    pairs = 4 * tree - 2 * (128 * 129 // 2)
    by_hand = 2 * (2 * MATRICES * 928 + 4 * pairs * 4 * 64)
    assert planned.flops == by_hand * 3 / 2
    assert planned.mixing_flops == 3 * 4 * pairs * 4 * 64
    # of the tiles of three pairs of blocks; nothing else sees each other
    assert planned.vain_pairs == pytest.approx(1 - pairs / (24 * 128**2))
    assert (
        step_flops(planned.flops, planned.mixing_flops, tuning="lora") == by_hand * 3 + planned.mixing_flops
    )
    last = 2 * 256 * (2 * 128 * 928 + (2 * 256 + 3 * 512) * 8) + 4 * 8 * 232 * 4 * 64
    assert packed(shape, mesh, reads_only=True).flops == by_hand + last


def test_trained_streams_by_hand(mesh: Mesh):
    """Four trees of 200 tokens in one stream of two blocks; the third tree lies in both."""
    shape = BatchShape(batch=4, prefix=100, responses=2, response_length=50)
    planned = packed(shape, mesh)
    assert (planned.batch.tokens.shape, planned.batch.reads.shape) == ((1, 1024), (1, 16))
    assert planned.extras(mesh).labels.shape == (1, 16, 2)
    assert (planned.computed, planned.steps) == (1024, (10 + 10 + 4) / 16)
    uneven = drawn_trees(replace(shape, batch=999, spread=0.4), longest=300)
    prefixes = np.log([len(tree.prefix) for tree in uneven])
    assert np.median(prefixes) == pytest.approx(math.log(100), abs=0.05)
    assert np.std(prefixes) == pytest.approx(0.4, rel=0.1)
    assert max(len(tree.sequence(0)) for tree in uneven) == 300


def test_the_steps_are_those_of_the_device_with_the_most_of_them(mesh: Mesh):
    """A conversation of 32 blocks in 4 parts: each has some of the last blocks, and a quarter of the work. Of a block
    with itself ten tiles of sixteen are computed."""
    long = BatchShape(batch=1, prefix=16_360, responses=1, response_length=24)
    config = replace(CONFIG, max_position_embeddings=20_000)
    alone, split = (
        planned_streams(config, long, mesh=mesh, attention=replace(KERNEL, parts=parts), reads_only=False)
        for parts in (1, 4)
    )
    assert alone.batch.tokens.shape == split.batch.tokens.shape == (1, 16_384)
    assert alone.steps == 32 * 31 / 2 + 32 * 10 / 16 == 4 * split.steps


@pytest.mark.parametrize(
    ("asked", "fitting", "planned"),
    [(None, "dots full", ["dots"]), ("auto", "full", ["dots", "full"]), ("none", "", ["none"])],
)
def test_products_are_recomputed_only_if_a_step_does_not_fit(asked: Any, fitting: str, planned: list[str]):
    tried: list[str] = []

    def compiled(remat: str) -> Any:
        tried.append(remat)
        return SimpleNamespace(fits=remat in fitting.split(), remat=remat)

    assert first_that_fits(compiled, asked).remat == planned[-1]
    assert tried == planned


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The XLA program for accelerators, whose loops of unknown length a plan counts, on this machine."""
    for module in (streams, decoder):
        monkeypatch.setattr(module, "walks", lambda batch, mesh: False)


@pytest.mark.usefixtures("batched")
def test_products_of_the_traced_programs(mesh: Mesh):
    """A stream of 512 tokens, each of which meets four blocks of 128 keys in one step; 16 read places. Scoring computes
    the last layer at these alone. A trained model costs three products for each one forward; for the two of attention
    nine, as a backward pass computes the scores again, by queries and by keys. With all of it computed again, nothing
    needs the last product of a layer."""
    shape, on = BatchShape(batch=2, **SHAPE), {"mesh": mesh, "dtype": "bfloat16"}
    tokens, reads, queries = 512, 16, 4 * 64
    matrices, attention, head = 2 * MATRICES * tokens, 4 * tokens**2 * queries, 2 * 256 * reads
    widths = 7 * 256 + 2 * 256 + 2 * 128 + 3 * 512  # of the two sides of all matrices
    adapters, down = 2 * tokens * LoraConfig().rank * widths, 2 * tokens * 256 * 512

    def products(program: Any) -> float:
        traced = program.function.trace(*program.arguments).jaxpr
        found = executed_flops(traced, steps=program.steps)
        assert found > program.flops  # blocks also meet keys that a token does not see
        return found

    of_last = 2 * 256 * (2 * 128 * tokens + (2 * 256 + 3 * 512) * reads) + 4 * reads * tokens * queries
    assert products(scoring_program(CONFIG, shape, **on)) == 2 * (matrices + attention) + of_last + head
    trained = 3 * (3 * matrices + 9 / 2 * attention + head)
    assert products(training_program(CONFIG, shape, **on, **FULL)) == trained
    frozen = trained + 3 * (3 * adapters - matrices)  # no gradients of matrices, but of their adapters
    assert products(training_program(CONFIG, shape, **on, **FULL | {"tuning": "lora"})) == frozen
    again = trained + 3 * (matrices + attention - down)
    assert products(training_program(CONFIG, shape, **on, **FULL | {"remat": "full"})) == again


def compiled_costs(shape: BatchShape, mesh: Mesh, *, train: bool = False) -> np.ndarray:
    """[3]: products of the traced program; FLOPs and bytes by the compiler's own count."""
    make = partial(training_program, **FULL) if train else scoring_program
    program = make(CONFIG, shape, mesh=mesh, dtype="float32")
    traced = program.function.trace(*program.arguments)
    counted = traced.lower().compile().cost_analysis()
    products = executed_flops(traced.jaxpr, steps=program.steps)
    return np.array([products, counted["flops"], counted["bytes accessed"]])


@pytest.mark.usefixtures("batched")
def test_work_grows_linearly_with_comparisons(mesh: Mesh):
    """What four comparisons cost more than two, eight cost twice as much more, where their responses fit the same 16
    read places: weights are read once, and the matrices of these places are computed once."""
    few, more, most = (compiled_costs(BatchShape(batch=batch, **SHAPE), mesh) for batch in (2, 4, 8))
    added, twice = more - few, most - more
    assert twice[0] == 2 * added[0]
    np.testing.assert_allclose(twice[1], 2 * added[1], rtol=1e-3)
    # The compiler fuses a few operations in another way at another size.
    np.testing.assert_allclose(twice[2], 2 * added[2], rtol=0.1)
    products, flops, read = most / more
    assert most[0] == 2 * more[0] - 2 * 16 * 256 * (2 * 256 + 3 * 512 + 1)
    assert products < 2
    assert flops <= 2
    assert read < 2


@pytest.mark.usefixtures("batched")
@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_twice_the_responses_are_less_than_twice_the_work(train: bool, mesh: Mesh):
    """A prefix is computed once: of trees with P = 128 and R = 16, P + 8 R is 4/3 of P + 4 R."""
    shape = BatchShape(batch=4, prefix=128, responses=4, response_length=16)
    four, eight = (compiled_costs(replace(shape, responses=k), mesh, train=train) for k in (4, 8))
    products, flops, read = eight / four
    assert products == pytest.approx(4 / 3, rel=0.03)
    assert flops < 1.5
    assert read < 1.6


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:4", "v9:2x2", "v5e:4x0", "v5e:4x4x4x4", "4x4"])
def test_topologies_that_cannot_be(name: str):
    with pytest.raises(MeshError, match=r"expected GENERATION:SHAPE, e.g. v5e:4x4.*v4, v5e, v5p, v6e"):
        parse_topology(name)
    with pytest.raises(MeshError, match="slices: expected at least 1, found 0"):
        describe_slice("v5e:2x2", slices=0)
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
    path = tmp_path / "bad.json"
    for text, message in (
        (None, r"expected a config.json, a folder with one, or a shape"),
        ("[1", r"bad.json: not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_model(path)


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

    monkeypatch.setattr("prb_jax.measure.plan.planner.plan", planned)
    seen: list[Plan] = []
    place = Slice("v5e:2x2", CHIPS["v5e"], [None] * 4)
    plans = sweep("qwen3-40m", PlanOptions(topology=place), report=seen.append)
    assert [(option.mesh, option.batch, option.fits) for option in plans] == [
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
    with pytest.raises(MeshError, match=r"no mesh of v5e:1x1 is possible: .*max_position_embeddings"):
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


def compiled_text(program: Any) -> str:
    return program.function.trace(*program.arguments).lower().compile().as_text()


def kernels_in(text: str) -> set[str]:
    return set(re.findall(r"stream_(?:forward|by_[a-z]+)", text))


@needs_libtpu
class TestOnTpus:
    @pytest.mark.slow
    def test_two_slices_exchange_scores_alone(self, config_file, capsys):
        """Between slices scoring sends the scores of its trees, float32, and nothing else."""
        options: dict[str, Any] = {**SHAPE, "topology": "v5e:2x2", "slices": 2, "batch": 16}
        copies = plan(config_file, PlanOptions(**options))
        assert (copies.chips, copies.mesh) == (8, "data=2,fsdp=4")
        between = {kind: sent for kind, sent in copies.collectives.items() if kind.startswith("dcn ")}
        assert sum(sent.count for sent in between.values()) == 1
        assert sum(sent.bytes for sent in between.values()) < 16 * 1024
        inside = sum(sent.bytes for kind, sent in copies.collectives.items() if kind not in between)
        assert copies.seconds_by["links"] == pytest.approx(inside / CHIPS["v5e"].link_bandwidth)
        split = plan(config_file, PlanOptions(mesh="fsdp=8,dcn=fsdp", **options))
        assert split.mesh == "fsdp=8,dcn=fsdp"
        # now every layer's matrices cross: an eighth of each chip's to the one beside it in the other slice
        crossing = sum(sent.bytes for kind, sent in split.collectives.items() if kind.startswith("dcn "))
        assert crossing > 3 * MATRICES * 2 / 8
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
                {"mesh": "fsdp=4", "batch": 8, "questions_per_user": 3},
                "batch: expected at least 12 trees, 3 questions of a user in each of 4 streams, found 8",
            ),
            ({"prefix": 4096}, r"the model's limit is 1024 \(max_position_embeddings\)"),
        ],
    )
    def test_what_does_not_divide(self, config_file, options: dict[str, Any], message: str):
        with pytest.raises(MeshError, match=message):
            plan(config_file, PlanOptions(topology="v5e:2x2", **{**SHAPE, **options}))

    def test_a_slice_that_does_not_exist(self):
        with pytest.raises(MeshError, match="topology 'v5e:3x7': libtpu does not know this slice"):
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
        training = training_program(config, shape, mesh=mesh, dtype="bfloat16", **FULL)
        for program, kernels in ((scoring, {"stream_forward"}), (training, STREAM_KERNELS)):
            text = compiled_text(program)
            assert kernels_in(text) == kernels
            assert 'custom_call_target="tpu_custom_call"' in text
            assert not re.search(r"\[(\d+,)*2048,2048\]", text)

    @pytest.mark.slow
    @pytest.mark.parametrize("attention", ["auto", "xla"])
    def test_a_split_stream_is_gathered_layer_by_layer(self, attention: str):
        """Scoring and training with queries split over chips: keys and values are gathered, queries exchanged;
        nothing is of the size N x N. By the kernel, and by the XLA program."""
        mesh = make_mesh("fsdp=2,sequence=2", devices=describe_slice("v5e:2x2").devices)
        config = replace(CONFIG, max_position_embeddings=4096)
        options: dict[str, Any] = {"mesh": mesh, "dtype": "bfloat16", "attention": attention}
        shape = BatchShape(batch=2, prefix=1950, responses=2, response_length=48)
        for program in (
            scoring_program(config, shape, **options), training_program(config, shape, **options, **FULL),
        ):  # fmt: skip
            batch = next(given for given in program.arguments if hasattr(given, "tokens"))
            assert batch.tokens.shape == (2, 2048)
            text = compiled_text(program)
            assert bool(kernels_in(text)) == (attention == "auto")
            assert not re.search(r"\[(\d+,)*2048,2048\]", text)
            assert "collective-permute" in text
            assert "all-gather" in text

    @pytest.mark.slow
    def test_scoring_over_streams(self, config_file, capsys):
        """Three questions a person, one person a chip; the kernel is in it, and no array of tokens by tokens."""
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--prefix", "128",
            "--response-length", "64", "--questions-per-user", "3",
        ]  # fmt: skip
        assert cli.main(command) == 0
        words = " ".join(capsys.readouterr().out.split())  # a long path of the model breaks the line
        assert "2 responses of 64, 3 questions a user, bfloat16" in words
        assert cli.main([*command, "--json"]) == 0
        figures = json.loads(capsys.readouterr().out)
        mesh = make_mesh("fsdp=4", devices=describe_slice("v5e:2x2").devices)
        shape = BatchShape(batch=12, questions_per_user=3, **SHAPE)
        planned = packed(shape, mesh, reads_only=True)
        assert (figures["flops"], figures["tokens"]) == (planned.flops, planned.tokens)
        assert figures["fits"]
        assert figures["compile_seconds"] > 0
        text = compiled_text(scoring_program(CONFIG, shape, mesh=mesh, dtype="bfloat16"))
        assert kernels_in(text) == {"stream_forward"}
        assert not re.search(r"\[(\d+,)*512,512\]", text)

    @pytest.mark.slow
    def test_eight_bits_take_half_the_arguments_and_products(self):
        """Of the layers' matrices: int8 factors are multiplied as such."""
        asked = PlanOptions(topology="v5e:2x2", mesh="fsdp=4", batch=4, prefix=128)
        wide, narrow = (plan("qwen3-0.6b", replace(asked, quantize=form)) for form in (None, "int8"))
        layers = 28 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) * 2 / 4  # bytes a chip in bfloat16
        saved = wide.argument_bytes_per_chip - narrow.argument_bytes_per_chip
        assert saved == pytest.approx(layers / 2, rel=0.02)
        seconds = wide.seconds_by["matrix products"]
        assert narrow.seconds_by["matrix products"] == pytest.approx(seconds / 2, rel=0.1)
        with pytest.raises(MeshError, match="quantize: int8 is only for scoring"):
            plan("qwen3-0.6b", replace(asked, train=True, quantize="int8"))
        with pytest.raises(CheckpointError, match="fp8 needs matrix units"):
            plan("qwen3-0.6b", replace(asked, quantize="fp8"))

    def test_a_model_that_does_not_fit(self, config_file, capsys):
        """An embedding of 24 GiB a chip."""
        config_file.write_text(json.dumps({**TINY, "vocab_size": 200_000_000}))
        command = ["plan", str(config_file), "--topology", "v5e:2x2", "--prefix", "128", "--json"]
        assert cli.main(command) == 0
        figures = json.loads(capsys.readouterr().out)
        assert set(figures) == KEYS
        assert figures["fits"] is False
        assert figures["peak_bytes_per_chip"] >= figures["argument_bytes_per_chip"] > 23 * GIB
        assert figures["estimated_seconds"] is None
        assert figures["collectives"] == {}

    def test_a_tiny_model(self, config_file, capsys):
        command = [
            "plan", str(config_file), "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--prefix", "128",
            "--response-length", "64", "--batch", "8", "--json",
        ]  # fmt: skip
        assert cli.main(command) == 0
        figures = json.loads(capsys.readouterr().out)
        assert set(figures) == KEYS
        assert figures["fits"] is True
        assert figures["chips"] == 4
        assert figures["hbm_bytes_per_chip"] == 16 * GIB
        weights = 2 * (512 * 256 + 3 * MATRICES) / 4
        assert weights < figures["argument_bytes_per_chip"] < 1.1 * weights
        within = figures["argument_bytes_per_chip"] + figures["temp_bytes_per_chip"]
        assert figures["peak_bytes_per_chip"] >= within
        mesh = make_mesh("fsdp=4", devices=describe_slice("v5e:2x2").devices)
        assert figures["flops"] == packed(BatchShape(batch=8, **SHAPE), mesh, reads_only=True).flops
        assert 0 < figures["estimated_mfu"] < 1
        used = figures["flops"] / (figures["estimated_seconds"] * 4 * CHIPS["v5e"].bf16_flops)
        assert figures["estimated_mfu"] == pytest.approx(used)
        # Each layer's matrices are gathered once, whole or piece by piece round a ring.
        layers = 3 * MATRICES * 2
        moved = [figures["collectives"].get(kind) for kind in ("all-gather", "collective-permute")]
        sent = sum(collective["bytes"] for collective in moved if collective)
        assert 0.7 * layers < sent < 1.3 * layers


def large(model: str, *, below: float, topology: str = "v5e:4x4", **options: Any) -> tuple[Plan, float]:
    """The plan of a real size, which fits below so many GiB a chip, and the bytes that a chip sends."""
    planned = plan(model, PlanOptions(topology=topology, **options))
    assert planned.fits
    assert planned.peak_bytes_per_chip < below * GIB
    assert planned.unknown_loops == 0
    assert planned.estimated_seconds is not None
    assert math.isfinite(planned.estimated_seconds)
    return planned, sum(sent.bytes for sent in planned.collectives.values())


@needs_libtpu
@pytest.mark.slow
class TestLargeModels:
    """Real sizes: minutes each."""

    weights = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) * 2  # bytes of the 8B shape's layers

    def test_8b_scoring_on_v5e(self):
        planned, moved = large("qwen3-8b", below=2.0, mesh="fsdp=16", batch=32)
        # Nothing but weights and the embedded tokens moves, and each layer's seven matrices once.
        assert planned.collectives["all-gather"].count <= 36 * 7 + 2
        assert set(planned.collectives) == {"all-gather", "all-to-all", "all-reduce"}
        assert planned.collectives["all-reduce"].bytes < 1e4
        assert 0.9 < moved / self.weights < 1.1
        assert planned.attention == "kernel (Pallas) over packed streams"
        assert planned.estimated_mfu is not None
        assert planned.estimated_mfu > 0.9

    def test_70b_scoring_on_v5e(self):
        _, moved = large("llama3.1-70b", below=12.0, mesh="fsdp=16", batch=16)
        assert 0.9 < moved / (80 * 8192 * (2 * 8192 + 2 * 1024 + 3 * 28_672) * 2) < 1.1

    def test_long_profiles_are_split_over_the_sequence_axis(self):
        split, _ = large("qwen3-8b", below=2.5, mesh="fsdp=4,sequence=4", batch=4, prefix=32_512)
        tensor = PlanOptions(topology="v5e:4x4", mesh="fsdp=4,tensor=4", batch=4, prefix=32_512)
        assert split.temp_bytes_per_chip < plan("qwen3-8b", tensor).temp_bytes_per_chip

    def test_27b_full_training_on_v5p(self):
        options: Any = {"mesh": "fsdp=64", "train": True, "batch": 64, "remat": "full"}
        large("gemma2-27b", below=32, topology="v5p:4x4x4", **options)

    def test_8b_lora_training_on_v5e(self):
        options: Any = {"mesh": "fsdp=16", "train": True, "tuning": "lora", "batch": 16, "remat": "full"}
        # The weights move in the forward pass, and once more for the backward pass and what it computes again.
        assert 1.8 < large("qwen3-8b", below=5.0, **options)[1] / self.weights < 2.2

    @pytest.mark.parametrize(
        ("below", "seconds", "options"),
        [(2.1, 0.76, {}), (10.8, 2.3, {"train": True, "tuning": "lora", "remat": "full"})],
        ids=["score", "LoRA"],
    )
    def test_8b_with_the_lengths_of_people(self, below: float, seconds: float, options: dict[str, Any]):
        """64 pairs on 16 chips: a sixth of the pairs in attention is in vain, waiting for the last chip included."""
        people: Any = {"prefix": 1900, "response_length": 130, "spread": 0.45, "batch": 64, "mesh": "fsdp=16"}
        planned, _ = large("qwen3-8b", below=below, **people, **options)
        assert planned.vain_pairs is not None
        assert planned.vain_pairs < 0.17
        assert planned.estimated_seconds is not None
        assert planned.estimated_seconds < seconds


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("model", ["qwen3-110m-a40m", "qwen3.5-40m"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"quantize": "int8"}, {"train": True, "remat": "full"},
        {"train": True, "tuning": "lora", "remat": "full"},
    ],
    ids=["score", "int8", "train", "LoRA"],
)  # fmt: skip
def test_mixtures_and_recurrent_layers_on_every_generation(
    model: str, topology: str, options: dict[str, Any]
) -> None:
    """Of v5p and v6e, whose programs have work for another core of the chip, too."""
    shape: Any = {"mesh": "fsdp=4", "batch": 4, "prefix": 896, "response_length": 64}
    planned, moved = large(model, below=1.0, topology=topology, **shape, **options)
    assert moved > 1e7
    assert planned.seconds_by.keys() == {"matrix products", "memory", "links"}
