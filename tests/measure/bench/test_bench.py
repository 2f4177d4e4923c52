"""The benchmark: what it times is what it says, and both sides score alike."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from prb_jax.cli import main as prb
from prb_jax.measure.bench.models import load_for_bench, random_params
from prb_jax.measure.bench.options import BenchOptions
from prb_jax.measure.bench.rivals.transformers import padded_batches
from prb_jax.measure.bench.scoring import score_pass
from prb_jax.measure.bench.training import TreeTrainer
from prb_jax.measure.bench.workload import synthetic_workload
from prb_jax.models.checkpoints.load import abstract_params
from prb_jax.models.config.decoder import DecoderConfig, load_config, parse_config
from prb_jax.models.flops import measured_peak, mixing_flops, stream_flops
from prb_jax.models.model import matrix_flops_per_token
from prb_jax.models.named_shapes import SHAPES, read_model, shape_config
from prb_jax.trees.tree import Tree, build_tree
from tests.packed import batch_alone, packed_batch
from tests.sweeps import sweep
from tests.tiny_models import write_tiny_model

SMALL = "--prefix-tokens 60 --response-tokens 12 --pairs 4 --rounds 1"


def test_random_weights_are_drawn_in_a_part_of_their_own_memory() -> None:
    config = read_model("qwen3-40m")
    memory = jax.jit(lambda: random_params(config, jnp.dtype("bfloat16"))).lower().compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.output_size_in_bytes / 4


def test_both_ways_score_alike_and_every_number_is_finite(folder: Path, bench, capsys) -> None:
    rows = bench("score", folder, SMALL, "--against transformers --responses 2 4")
    assert [(row["trees"], row["responses"]) for row in rows] == [(4, 8), (4, 16)]
    assert rows[0]["compiles"] >= 1  # the second workload may find its program there
    for row in rows:
        assert row["quantize"] is None
        assert row["largest_difference"] < 1e-5
        assert 0 < row["peak_share"] < 1
        assert 0 <= row["padding_waste"] < 1
        assert 0 <= row["against_padding_waste"] < 1
        assert row["compiles"] >= 0
        assert row["speedup"] == pytest.approx(row["pairs_per_second"] / row["against_pairs_per_second"])
        assert row["tokens_per_second"] > row["pairs_per_second"] * 60
    shown = capsys.readouterr().out
    words = (
        "comparisons/s|tokens/s|padding|compile s|its matmul peak|of matmul peak|speed-up|K=4, 60+12 tokens"
    )
    assert all(word in shown for word in words.split("|"))


@pytest.mark.slow
def test_a_config_alone_is_enough_and_a_quantised_model_has_a_row_of_its_own(
    folder: Path, bench, capsys
) -> None:
    rows = bench("score", folder / "config.json", SMALL, "--dtype bfloat16 float32 --quantize int8")
    forms = [(dtype, form) for dtype in ("bfloat16", "float32") for form in (None, "int8")]
    assert [(row["dtype"], row["quantize"]) for row in rows] == forms
    assert all(row["attention"] and row["pairs_per_second"] > 0 for row in rows)
    assert all(row["speedup"] is None for row in rows)
    assert "float32, int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("score --pairs 0", "--pairs: expected a number above 0, found 0"),
        ("train --rounds -1", "--rounds: expected a number above 0, found -1"),
        ("score --responses 2 0", "--responses: expected a number above 0, found 0"),
        ("score --dtype float16", "--dtype"),
        ("score --quantize int4", "--quantize"),
        ("score --against trl", "argument --against: invalid choice: 'trl'"),
        ("train --against transformers", "argument --against: invalid choice: 'transformers'"),
        ("load --pairs 3", "unrecognized arguments: --pairs 3"),
        ("train --responses 4", "unrecognized arguments: --responses 4"),
        ("train --quantize int8", "unrecognized arguments: --quantize int8"),
        ("score --remat full", "unrecognized arguments: --remat full"),
        ("train --tuning lora --against trl", "--against trl trains all weights: remove --tuning lora"),
        ("score --questions-per-user 1,0", "--questions-per-user: expected a number above 0, found 0"),
        ("score --questions-per-user 1;5", "found '1;5'; several values: 1,5,15 or 1 5 15"),
        ("score --against-responses 1", "--against-responses requires --against transformers-cached"),
        ("rank", "the following arguments are required: --data"),
        ("rank --data x --responses 4", "unrecognized arguments: --responses 4"),
        ("rank --data x --quantize int8", "unrecognized arguments: --quantize int8"),
        ("rank --data x --against trl", "argument --against: invalid choice: 'trl'"),
        ("rank --data x --users 0", "--users: expected a number above 0, found 0"),
        ("rank --data x --against-users 1", "--against-users requires --against transformers"),
        ("sample --against-prompts 1", "--against-prompts requires --against transformers"),
        ("ppo --against-rows 1", "--against-rows requires --against trl"),
    ],
)
def test_arguments_that_cannot_be(folder: Path, words: str, message: str, refused) -> None:
    verb, *more = words.split()
    assert message in refused(verb, folder, *more)


def test_what_cannot_be_timed_is_one_line(folder: Path, tmp_path: Path, refused) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON" in refused("score", tmp_path / "config.json")
    for words in (("load",), ("ppo",), ("rank", "--data x")):
        said = refused(words[0], "qwen3-40m", *words[1:])
        assert "MODEL: expected a model with weights, found qwen3-40m" in said
    assert "MODEL: expected a folder or one of qwen3-40m, " in refused("serve", tmp_path / "config.json")
    if importlib.util.find_spec("vllm") is None:
        said = refused("score", folder, "--against vllm", SMALL)
        assert "the comparison with vLLM needs vllm, which is not installed" in said


def test_without_a_sub_verb_the_error_names_them(folder: Path, capsys) -> None:
    for words in ([], [str(folder)], ["--train", str(folder)]):
        with pytest.raises(SystemExit) as exit_:
            prb(["bench", *words])
        assert exit_.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("prb: error: ")
        assert all(name in line for name in ("score", "train", "load", "rank"))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_training_beside_trl_starts_from_the_same_loss(folder: Path, bench, capsys, remat: str) -> None:
    """And whatever is computed twice, the loss stays."""
    pytest.importorskip("torch")
    pytest.importorskip("trl")
    words = f"--remat {remat} --against trl --dtype float32 bfloat16"
    full, narrow = bench("train", folder, words, SMALL)
    assert full["loss_difference"] < 1e-5
    assert narrow["loss_difference"] < 0.02
    assert narrow["loss"] == pytest.approx(full["loss"], abs=0.02)
    for row in (full, narrow):
        assert row["speedup"] == pytest.approx(row["pairs_per_second"] / row["against_pairs_per_second"])
        assert 0 < row["peak_share"] < 1
        assert 0 <= row["padding_waste"] < 1
        assert 2 <= row["compiles"] <= 5  # a program for each bucket, one for the update
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("pairs/s in training", "x of TRL", "loss difference"))


@pytest.mark.slow
def test_a_mixture_of_experts_beside_trl_starts_from_the_same_loss(tmp_path: Path, bench) -> None:
    pytest.importorskip("trl")
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe-lead", pad_token_id=77)
    (row,) = bench("train", folder, "--against trl --dtype float32", SMALL)
    assert row["loss_difference"] < 1e-5


@pytest.mark.slow
def test_what_is_trained_can_be_chosen(folder: Path, bench) -> None:
    """Adapters start as nothing, so the first loss is the same; less is computed."""
    rows = {}
    for tuning in ("full", "lora"):
        words = f"--tuning {tuning} --dtype float32 --questions-per-user 2"
        (rows[tuning],) = bench("train", folder, words, SMALL)
        assert rows[tuning]["tuning"] == tuning
        assert rows[tuning]["questions_per_user"] == 2
        assert rows[tuning]["workload"].endswith("2 a user")
    assert rows["lora"]["loss"] == pytest.approx(rows["full"]["loss"], abs=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_size_in_their_name(name: str) -> None:
    config = parse_config(shape_config(name), where=name)
    leaves = jax.tree.leaves(abstract_params(config))
    millions = sum(math.prod(leaf.shape) for leaf in leaves) / 1e6
    said = next(part for part in name.split("-") if re.fullmatch(r"[\d.]+[mb]", part))
    expected = float(said[:-1]) * (1000 if said.endswith("b") else 1)
    # The larger ones have an output matrix of the embedding's size in their published count.
    assert millions == pytest.approx(expected, rel=0.15)


def layer_weights(config: DecoderConfig) -> int:
    layers = abstract_params(config)["layers"]
    return sum(math.prod(leaf.shape) for leaf in layers.values() if len(leaf.shape) == 3)


def brute_force_flops(trees: list[Tree], config: DecoderConfig) -> float:
    """Two operations for every weight and token, four for every head's element and pair that is seen."""
    pairs = 0
    for tree in trees:
        lengths = [len(response) for response in tree.responses]
        p = len(tree.prefix)
        branch = np.repeat(np.arange(-1, len(lengths)), [p, *lengths])
        place = np.concatenate([np.arange(p), *(p + np.arange(n) for n in lengths)])
        seen = (branch[None] == -1) | (branch[:, None] == branch[None])
        seen &= place[None] <= place[:, None]
        near = place[:, None] - place[None] < config.sliding_window
        pairs += sum(int((seen & near).sum() if slides else seen.sum()) for slides in config.layer_windows)
    tokens = sum(tree.tokens for tree in trees)
    return 2 * layer_weights(config) * tokens + 4 * pairs * config.num_attention_heads * config.head_dim


def test_flops_of_trees_are_those_of_their_masks(folder: Path) -> None:
    """Ragged responses, one without a prefix; windows in some layers."""
    rng, trees = np.random.default_rng(0), []
    for prefix, lengths in ((70, (5, 40, 11)), (0, (30, 1)), (12, (3, 3, 3, 60))):
        shared = rng.integers(50, 200, prefix)
        trees.append(build_tree([[*shared, k, *rng.integers(50, 200, n - 1)] for k, n in enumerate(lengths)]))
    config = load_config(folder)
    assert {True, False} == set(config.layer_windows)
    flops = stream_flops(packed_batch(trees), config)
    assert flops == pytest.approx(brute_force_flops(trees, config), rel=1e-12)
    assert stream_flops(batch_alone(trees), config) > flops  # prefixes are computed for each response
    assert matrix_flops_per_token(config) == 2 * layer_weights(config)


def test_a_last_layer_at_the_read_places_needs_less(folder: Path) -> None:
    """Keys and values of all tokens; queries, attention, its output and the mlp of the reads, each counted once."""
    config = replace(
        load_config(folder), num_hidden_layers=1, layer_windows=(False,), layer_mixers=("full_attention",)
    )
    trees = [build_tree([[5, 6, 7, 8, 9], [5, 6, 10, 11], [5, 6, 10, 11]]), build_tree([[3, 4, 4]])]
    trees.append(build_tree([[3], [4], [4]]))
    tokens, reads, seen = 5 + 2 + 3 + 2, 3 + 2, 5 + 4 + 3 + 2
    width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = 2 * width * config.num_key_value_heads * config.head_dim
    others = 2 * width * queries + 3 * width * config.intermediate_size
    by_hand = 2 * (keys * tokens + others * reads) + 4 * seen * queries
    batch = packed_batch(trees)
    assert stream_flops(batch, config, reads_only=True) == pytest.approx(by_hand, rel=1e-12)
    assert mixing_flops(batch, config, reads_only=True) == 4 * seen * queries
    assert mixing_flops(batch, config) > 4 * seen * queries


@pytest.mark.parametrize(("responses", "prefix"), [(2, 2000), (16, 500), (1, 30)])
def test_the_workload_has_the_lengths_it_names(responses: int, prefix: int) -> None:
    options = {
        "responses": responses, "prefix_tokens": prefix, "response_tokens": 130, "vocab_size": 300, "longest": 8192,
    }  # fmt: skip
    workload = synthetic_workload(64, **options)
    assert len(workload.trees) == 64
    assert workload.responses == 64 * responses
    if responses > 1:
        prefixes = [len(tree.prefix) for tree in workload.trees]
        assert np.mean(prefixes) == pytest.approx(prefix, rel=0.01)
        lengths = [len(response) for tree in workload.trees for response in tree.responses]
        assert np.mean(lengths) == pytest.approx(130, rel=0.02)
        assert np.std(lengths) > 10
        assert np.std(prefixes) > 0.2 * prefix
    assert workload.tokens == sum(tree.tokens for tree in workload.trees)
    assert all(ids.min() >= 0 and ids.max() < 300 for tree in workload.trees for ids in tree.responses)
    again = synthetic_workload(64, **options)
    for tree, same in zip(workload.trees, again.trees, strict=True):
        np.testing.assert_array_equal(tree.sequence(0), same.sequence(0))


def test_no_conversation_is_longer_than_the_model_allows() -> None:
    sizes = {"prefix_tokens": 3000, "response_tokens": 600, "vocab_size": 100, "longest": 1024}
    workload = synthetic_workload(50, responses=4, **sizes)
    assert max(len(tree.sequence(k)) for tree in workload.trees for k in range(4)) <= 1024


def test_padded_batches_are_those_of_the_papers_script() -> None:
    """Of eight comparisons their chosen, then their rejected; what is left over fills batches of eight."""
    trees = [build_tree([[9, n, 1], [9, n, 2, 3]]) for n in range(19)]
    batches = padded_batches(trees)
    assert [len(batch) for batch in batches] == [8, 8, 8, 8, 6]
    assert [ids.tolist() for ids in batches[0]] == [[9, n, 1] for n in range(8)]
    assert [ids.tolist() for ids in batches[1]] == [[9, n, 2, 3] for n in range(8)]
    assert [ids.tolist() for ids in batches[4][:2]] == [[9, 16, 1], [9, 16, 2, 3]]


def test_a_pass_counts_what_it_computes(folder: Path) -> None:
    model = load_for_bench(folder, BenchOptions())
    sizes = {"prefix_tokens": 40, "response_tokens": 10, "vocab_size": 256, "longest": 4096}
    workload = synthetic_workload(6, responses=2, **sizes)
    first = score_pass(model, workload, batch_tokens=300)
    assert first.compiles >= 1
    assert first.padded_tokens >= workload.tokens
    assert [len(row) for row in first.scores] == [2] * 6
    second = score_pass(model, workload, batch_tokens=300)
    assert second.compiles == 0
    for row, other in zip(first.scores, second.scores, strict=True):
        np.testing.assert_array_equal(row, other)


def test_shares_of_the_peak_count_the_last_layer_only_at_its_reads(folder: Path) -> None:
    options = BenchOptions()
    model = load_for_bench(folder, options)
    sizes = {"prefix_tokens": 40, "response_tokens": 10, "vocab_size": 256, "longest": 4096}
    workload = synthetic_workload(3, responses=2, **sizes)
    needed = functools.partial(stream_flops, config=model.decoder, reads_only=True)
    trained = TreeTrainer(model, workload, options)
    assert trained.flops == pytest.approx(3 * sum(needed(part.batch) for part in trained.microbatches))
    # packed in another way, the same tokens are computed
    scored = score_pass(model, workload, batch_tokens=None)
    assert scored.flops == pytest.approx(needed(packed_batch(list(workload.trees))))
    assert scored.flops < stream_flops(packed_batch(list(workload.trees)), model.decoder)


def test_the_peak_counts_the_multiplications_of_a_square_product(monkeypatch) -> None:
    sizes = []

    def time_by_size(run, *, seconds):
        sizes.append(run().shape[0])
        return {1024: 2.0, 2048: 4.0}[sizes[-1]]

    monkeypatch.setattr("prb_jax.models.flops.best_time", time_by_size)
    assert measured_peak("float32") == 2 * 2048**3 / 4.0
    assert sizes == [1024, 2048]


@pytest.mark.parametrize(("dtype", "width"), sweep([("float32", 4), ("bfloat16", 2)], few=(1,)))
def test_loading_counts_every_byte_once(folder: Path, bench, dtype: str, width: int, capsys) -> None:
    results = bench("load", folder, f"--dtype {dtype} --rounds 2")
    assert [result["files_are"] for result in results][:1] == ["cached"]
    weights = sum(value.nbytes for value in load_file(folder / "model.safetensors").values())
    head = load_config(folder).hidden_size
    for result in results:
        assert result["file_bytes"] == (folder / "model.safetensors").stat().st_size
        assert result["bytes_read"] == weights  # stored in float32
        assert result["shard_bytes"] == (weights // 4 - head) * width + 4 * head
        rate, plain = result["gb_per_second"], result["plain_gb_per_second"]
        assert rate == pytest.approx(weights / result["seconds"] / 1e9)
        assert plain == pytest.approx(result["file_bytes"] / result["plain_seconds"] / 1e9)
        assert result["ratio"] > 0
        assert result["peak_bytes_above_shards"] is None or result["peak_bytes_above_shards"] >= 0
    assert "host memory above" in capsys.readouterr().out
