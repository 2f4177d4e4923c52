"""Mixtures of experts: products of groups, checkpoints, meshes, adapters, what is counted, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.checkpoints.adapter_folder import adapted_folder
from prb_jax.models.checkpoints.hf_map import leaf_maps
from prb_jax.models.checkpoints.load import abstract_params, inspect_checkpoint, load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import load_config, parse_config
from prb_jax.models.grouped import combined, group_rows, grouped_product, spread
from prb_jax.models.lora import init_lora, merge_lora
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.mixed_stacks import _division
from prb_jax.models.model import bind, init_params, matrix_flops_per_token
from prb_jax.models.named_shapes import shape_config
from prb_jax.training.losses import load_balance
from tests.packed import packed_batch, read_trees
from tests.plain_process import ROOT, plain_environment
from tests.sweeps import sweep
from tests.tiny_models import TINY_FAMILIES, tiny_config, write_model_without_torch, write_tiny_model
from tests.training.small_batches import batch_of, build, extras_of, random_trees, small_config

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForSequenceClassification"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize("loops", [True, False], ids=["loops", "ragged_dot"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_groups_multiply_each_row_with_the_matrix_that_it_chose(loops: bool, dtype: Any) -> None:
    """Against a sum over all experts in float64: one expert has most of the rows, one none; 2 of 6 are elsewhere."""
    rng = np.random.default_rng(0)
    x, matrices = rng.normal(size=(50, 12)), rng.normal(size=(4, 12, 7))
    chosen = np.where(rng.random((50, 2)) < 0.6, 1, rng.choice([-1, 0, 3, 4], (50, 2)))
    weights, towards = rng.random((50, 2)), rng.normal(size=(50, 7))
    mask = np.stack([(chosen == expert) * weights for expert in range(4)], axis=-1).sum(axis=1)  # [T, E]

    def run(x: jax.Array, matrices: jax.Array, weights: jax.Array) -> jax.Array:
        groups = group_rows(jnp.asarray(chosen), 4, of=6, loops=loops)
        return combined(grouped_product(spread(x, groups), matrices, groups), weights, groups)

    given = jnp.asarray(x, dtype), jnp.asarray(matrices, dtype), jnp.asarray(weights, jnp.float32)
    out, pull = jax.vjp(run, *given)
    to_x, to_matrices, to_weights = pull(jnp.asarray(towards, jnp.float32))
    x, matrices = (np.asarray(one, np.float64) for one in given[:2])
    by_expert = np.einsum("td,edo->teo", x, matrices)
    expected = {
        "out": (out, np.einsum("te,teo->to", mask, by_expert)),
        "x": (to_x, np.einsum("te,to,edo->td", mask, towards, matrices)),
        "matrices": (to_matrices, np.einsum("te,td,to->edo", mask, x, towards)),
        "weights": (
            to_weights,
            np.einsum("tko,to->tk", by_expert[np.arange(50)[:, None], chosen % 4], towards)
            * np.isin(chosen, range(4)),
        ),
    }
    assert not (chosen == 2).any()
    assert (chosen == 1).sum() > 50
    for name, (ours, right) in expected.items():
        off = np.linalg.norm(np.asarray(ours, np.float64) - right) / np.linalg.norm(right)
        assert off < (1e-6 if dtype == jnp.float32 else 5e-3), (name, off)
    assert to_matrices.dtype == dtype


@pytest.mark.parametrize("family", sweep(["qwen2_moe", "mixtral"], few=(1,)))
def test_tensors_of_all_experts_are_read_as_those_of_each(family: str, tmp_path: Path) -> None:
    """As transformers 5 saves them with `save_original_format=False`."""
    from transformers import AutoModelForSequenceClassification

    source, merged = write_tiny_model(tmp_path / "source", family), tmp_path / "merged"
    AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(
        merged, save_original_format=False
    )
    tensors = load_file(merged / "model.safetensors")
    assert len(tensors) < len(load_file(source / "model.safetensors"))
    config = load_config(source)
    assert load_config(merged) == config
    expected = load_params(source, config).params
    with pytest.warns(match="6 tensors of all experts of a layer are read as one for each expert"):
        found = load_params(merged, config).params
    jax.tree.map(np.testing.assert_array_equal, found, expected)

    name = "model.layers.1.mlp.experts.down_proj"
    for change, message in (
        ({name: tensors[name][:-1]}, rf"'{name}': expected shape \[.*\], found \[.*\]"),
        ({_of_expert(family): np.zeros((64, 40), np.float32)}, "is there twice, alone and in one of all experts"),
    ):  # fmt: skip
        folder = shutil.copytree(merged, tmp_path / message[:4], dirs_exist_ok=True)
        save_file(tensors | change, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            inspect_checkpoint(folder, config)


def _of_expert(family: str) -> str:
    module = "block_sparse_moe.experts.0.w2" if family == "mixtral" else "mlp.experts.0.down_proj"
    return f"model.layers.1.{module}.weight"


@pytest.mark.parametrize("form", ["int8", "int8-weights"])
def test_quantised_experts_are_read_as_they_are_quantised_on_a_device(form: str, tmp_path: Path) -> None:
    from prb_jax.models.quantization import quantization_form, quantize_params

    folder = write_tiny_model(tmp_path, "qwen2_moe")
    config = load_config(folder)
    read = load_params(folder, config, quantize=form).params
    whole = load_params(folder, config).params
    made = jax.jit(lambda params: quantize_params(config, params, quantization_form(form)))(whole)
    assert read["layers"]["down"].shape == (3, 6, 40, 64)
    assert read["layers"]["down"].dtype == jnp.int8
    jax.tree.map(np.testing.assert_array_equal, read, made)


def write_packed(folder: Path, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a tiny gpt-oss with experts of MXFP4 in the place of its own, and return these as transformers unpacks
    them."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_tiny_model(folder, "gpt_oss", dtype="bfloat16")
    path, unpacked = folder / "model.safetensors", {}
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 128, (experts, outputs, inputs // 32)).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
        unpacked[name] = numbers.float().numpy()
        assert unpacked[name].shape == (experts, inputs, outputs)
    save_file(tensors, path, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "mxfp4"}}))
    return unpacked


def test_weights_of_mxfp4_are_read_as_transformers_unpacks_them(tmp_path: Path) -> None:
    unpacked = write_packed(tmp_path / "packed", np.random.default_rng(0))
    config = load_config(tmp_path / "packed")
    with pytest.warns(match="6 tensors of MXFP4 are multiplied by their scales of blocks of 32"):
        params, report = load_params(tmp_path / "packed", config)
    for name, right in unpacked.items():
        layer, leaf = int(name.split(".")[2]), name.rsplit(".", 1)[1].removesuffix("_proj")
        np.testing.assert_array_equal(params["layers"][leaf][layer], right)
    assert report.dtypes == {"BF16": len(report.used_keys)}
    # A part that begins and ends within blocks.
    from prb_jax.models.checkpoints.load import _index
    from prb_jax.models.checkpoints.weight_index import SliceReader

    part = np.empty((40, 7), np.float32)
    with SliceReader(_index(tmp_path / "packed", config)) as reader:
        key = "model.layers.1.mlp.experts.2.gate_up_proj"
        reader.read_into(part, key, (slice(17, 57), slice(3, 10)))
    whole = unpacked["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(part, whole[2, 17:57, 3:10])
    # Written again, they are plain numbers, which transformers reads.
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    written = save_params(narrow, config, tmp_path / "new")
    again = load_file(written / "model.safetensors")
    for name, right in unpacked.items():
        np.testing.assert_array_equal(again[name].astype(np.float32), right)
    assert "quantization_config" not in json.loads((written / "config.json").read_text())


def test_broken_weights_of_mxfp4_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, np.random.default_rng(0))
    config, path = load_config(tmp_path), tmp_path / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.experts.down_proj"
    scales = tensors[f"{name}_scales"]
    not_a_number = scales.copy()
    not_a_number[3, 5, 1] = 255
    for change, message in (
        ({f"{name}_scales": not_a_number}, rf"'{name}_scales': a scale is not a number \(255 of E8M0\)"),
        ({f"{name}_scales": scales[:, :-1]}, rf"'{name}_scales': expected shape \[6, 64, 3\], found \[6, 63, 3\]"),
        ({f"{name}_scales": scales.astype(np.int16)}, rf"'{name}_blocks' and its scales: expected U8"),
        ({f"{name}_scales": None}, rf"'{name}_blocks': expected its scales '{name}_scales', found none"),
    ):  # fmt: skip
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message), warnings.catch_warnings(action="ignore"):
            load_params(tmp_path, config)


def test_a_kernel_without_attention_sinks_is_refused_by_name() -> None:
    from prb_jax.models.attention.choice import choose_attention
    from tests.models.attention.kernel_on_mesh import devices

    raw = json.loads(tiny_config(TINY_FAMILIES["gpt_oss"]).to_json_string(use_diff=False))
    config = parse_config(raw | {"architectures": None}, where="c")
    assert config.sinks
    with pytest.warns(match=r"the .*cuDNN.* has no attention sinks: it is computed by block-wise XLA"):
        chosen = choose_attention(devices("gpu"), jnp.dtype("bfloat16"), config=config)
    assert chosen.table == "blocks"
    assert choose_attention(devices("tpu"), jnp.dtype("bfloat16"), config=config).table == "steps"


def test_adapters_of_gate_and_up_in_one_matrix_are_one() -> None:
    raw = json.loads(tiny_config(TINY_FAMILIES["gpt_oss"]).to_json_string(use_diff=False))
    config = parse_config(raw | {"architectures": None}, where="c")

    def factors_of(lora: LoraConfig) -> dict[str, Any]:
        return jax.eval_shape(lambda: init_lora(bind(config, abstract_params(config)).layers, lora)["layers"])

    factors = factors_of(LoraConfig(rank=3))
    assert factors["gate_up_lora_b"].shape == (3, 6, 3, 192)
    assert not {"gate_lora_a", "up_lora_a"} & factors.keys()
    with pytest.raises(CheckpointError, match="gate and up are one matrix here: expected both, found up"):
        factors_of(LoraConfig(targets=("q", "up")))


def test_adapters_of_experts_are_those_of_merged_matrices() -> None:
    """Scores of a model with adapters on every matrix are those with W + s A B, and gradients follow from it."""
    config = small_config(**MOE, num_hidden_layers=3, mlp_only_layers=[0])
    params = init_params(config, seed=1)
    dense = ("dense_gate", "dense_up", "dense_down")
    lora = LoraConfig(rank=3, alpha=6.0, targets=(*LoraConfig().targets, *dense))
    factors = init_lora(bind(config, params).layers, lora, seed=2)["layers"]
    assert factors["down_lora_a"].shape == (2, 4, 24, 3)
    rng = np.random.default_rng(0)
    factors = {name: jnp.asarray(rng.normal(size=leaf.shape, scale=0.3)) for name, leaf in factors.items()}
    batch = packed_batch(random_trees(3))
    run = partial(read_trees, batch=batch, config=config, dtype=jnp.dtype("float32"), differentiated=True)

    def adapted(factors: Any) -> tuple[jax.Array, jax.Array]:
        scores = run({**params, "layers": {**params["layers"], **factors}}, lora_scale=lora.scale)
        return jnp.sin(scores).sum(), scores

    def plain(params: Any) -> tuple[jax.Array, jax.Array]:
        scores = run(params)
        return jnp.sin(scores).sum(), scores

    merged = merge_lora(config, {**params, "layers": {**params["layers"], **factors}}, scale=lora.scale)
    assert merged["layers"].keys() == params["layers"].keys()
    of_factors, scores = jax.jit(jax.grad(adapted, has_aux=True))(factors)
    of_plain = jax.jit(jax.grad(plain, has_aux=True))
    of_merged, expected = of_plain(merged)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.abs(np.asarray(of_plain(params)[1] - expected)).max() > 0.01
    for name in ("gate", "down", "q", "dense_up"):
        a, b = factors[f"{name}_lora_a"], factors[f"{name}_lora_b"]
        to_matrix = lora.scale * of_merged["layers"][name]
        for factor, right in (
            ("lora_a", np.einsum("...io,...ro->...ir", to_matrix, b)),
            ("lora_b", np.einsum("...io,...ir->...ro", to_matrix, a)),
        ):
            off = np.linalg.norm(of_factors[f"{name}_{factor}"] - right) / np.linalg.norm(right)
            assert off < 1e-5, (name, factor, off)


def test_a_training_step_reports_how_evenly_experts_are_used() -> None:
    config, trees = small_config(**MOE), random_trees(4)
    step, state, frozen = build(config)
    sums = step.gradients(state, frozen, batch_of(trees), extras_of(trees))
    loads = np.asarray(sums.parts.expert_loads)
    # The last layer computes read places only; every token takes two of four experts.
    assert loads.shape == (1, 4)
    assert loads.sum() == 2 * sum(tree.tokens for tree in trees)
    _, metrics = step.update(
        state, step.add(sums, step.gradients(state, frozen, batch_of(trees), extras_of(trees)))
    )
    assert float(metrics["busiest_expert"]) == pytest.approx(loads.max() / loads.mean())
    assert float(metrics["idle_experts"]) == 0


@pytest.mark.parametrize(
    ("fields", "kinds", "division"),
    [
        ({"mlp_only_layers": [0, 1]}, "ddssss", (2, 1)),
        ({"decoder_sparse_step": 2}, "dsdsds", (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "dddsds", (2, 2)),
        ({"mlp_only_layers": [5]}, "sssssd", (0, 6)),
    ],
)
def test_layers_without_experts_and_the_scan_over_the_others(fields: Any, kinds: str, division: Any) -> None:
    """Layers before the scan and the length of a period; parameters, FLOPs and names of tensors of each part."""
    config = small_config(**MOE, num_hidden_layers=6, **fields)
    assert "".join("d" if mlp == "mlp" else "s" for _, mlp in config.kinds) == kinds
    assert _division(config.kinds) == division
    layers = abstract_params(config)["layers"]
    assert layers["q"].shape[0] == 6
    assert (layers["gate"].shape[0], layers["dense_gate"].shape[0]) == (kinds.count("s"), kinds.count("d"))
    names = {name for leaf in leaf_maps(config) for name in leaf.file_keys if ".mlp." in name}
    of_dense = {name.split(".")[2] for name in names if ".mlp.gate_proj." in name}
    assert of_dense == {str(layer) for layer, kind in enumerate(kinds) if kind == "d"}
    width, attention = 32, 2 * 32 * (layers["q"].shape[2] + layers["k"].shape[2])
    of_mlp = {"d": 3 * width * config.intermediate_size, "s": width * 4 + 2 * 3 * width * 24}
    assert matrix_flops_per_token(config) == 2 * (6 * attention + sum(of_mlp[kind] for kind in kinds))


def test_load_balance_by_hand() -> None:
    loads = jnp.asarray([[2.0, 2.0, 2.0, 2.0], [6.0, 2.0, 0.0, 0.0]])
    balance = load_balance(loads)
    assert {name: float(value) for name, value in balance.items()} == {
        "busiest_expert": 2.0,
        "idle_experts": 0.25,
    }


def test_flops_are_those_of_the_experts_that_a_token_takes() -> None:
    config = parse_config(shape_config("qwen3-30b-a3b"), where="shape")
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048
    active = 48 * (attention + 2048 * 128 + 8 * 3 * 2048 * 768)
    assert matrix_flops_per_token(config) == 2 * active
    both = parse_config(shape_config("qwen3-next-80b-a3b"), where="shape")
    recurrent = 2048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2048
    full = 2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048
    of_experts = 2048 * (512 + 1) + (10 + 1) * 3 * 2048 * 512
    assert matrix_flops_per_token(both) == 2 * (36 * recurrent + 12 * full + 48 * of_experts)
    dense = parse_config(shape_config("qwen3-40m"), where="shape")
    sparse = parse_config(shape_config("qwen3-110m-a40m"), where="shape")
    routers = 2 * 10 * 512 * 16
    assert matrix_flops_per_token(sparse) == matrix_flops_per_token(dense) + routers


def test_a_mesh_changes_no_score_and_no_gradient(tmp_path: Path) -> None:
    """Experts over `tensor`, with a shared one beside them, and tokens over the other axes."""
    folder = write_model_without_torch(tmp_path / "model", "qwen2_moe")
    meshes = ("data=4,tensor=2", "fsdp=2,sequence=2,tensor=2")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.experts_on_mesh", folder, *meshes],
        capture_output=True, text=True, cwd=ROOT, env=plain_environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == set(meshes)
    for mesh, off in found.items():
        assert off["scores"] < 1e-5, (mesh, off)
        assert off["gradients"] < 1e-5, (mesh, off)
        assert off["loads"] == 0
    assert found[meshes[0]]["part"] == [3, 3, 64, 40]
    assert found[meshes[1]]["part"] == [3, 3, 16, 40]


def test_a_mesh_that_does_not_divide_the_experts_is_refused() -> None:
    from prb_jax.models.model import parameter_shardings
    from prb_jax.platform.sharding import MESH_AXES

    mesh = jax.sharding.AbstractMesh((1, 1, 1, 8), MESH_AXES)
    config = small_config(**MOE, num_attention_heads=8, num_key_value_heads=8)
    with pytest.raises(MeshError, match=r"tensor=8 does not divide 4 \(experts axis of 'layers/down'"):
        parameter_shardings(abstract_params(config), mesh, config=config)


def test_adapters_of_other_experts_are_refused(tmp_path: Path) -> None:
    """Of a base with experts in layers 1 and 2; the layout of factors is compared with PEFT elsewhere."""
    config = small_config(**MOE, num_hidden_layers=3, mlp_only_layers=[0])
    base = save_params(init_params(config), config, tmp_path / "base")
    plain = small_config(num_hidden_layers=3)
    dense = save_params(init_params(plain), plain, tmp_path / "dense")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    described = {
        "peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 4,
        "target_parameters": ["mlp.experts.down_proj"],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    sizes = {"lora_A": (8, 24), "lora_B": (32, 8)}

    def load(on: Path, layers: Any, **changed: tuple[int, ...]) -> Any:
        tensors = {"base_model.model.score.weight": np.ones((1, 32), np.float32)}
        for layer in layers:
            module = f"base_model.model.model.layers.{layer}.mlp.experts"
            for factor, size in (sizes | changed).items():
                tensors[f"{module}.{factor}.weight"] = np.ones(size, np.float32)
        save_file(tensors, adapter / "adapter_model.safetensors")
        view = adapted_folder(adapter, on)
        with warnings.catch_warnings(action="ignore"):
            return load_params(view, load_config(view)).params

    change = load(base, (1, 2))["layers"]["down"] - load_params(base, config).params["layers"]["down"]
    np.testing.assert_allclose(change, np.full((2, 4, 24, 32), 2 * 2.0), atol=1e-5)
    for on, layers, changed, message in (
        (
            base,
            (1,),
            {},
            r"adapter_model.*: expected adapters of the experts of every layer .*layers\.2\.mlp",
        ),
        (base, (0, 1, 2), {}, r"differ in 'model\.layers\.0\.mlp\.experts\.down_proj'"),
        (base, (1, 2), {"lora_A": (6, 24), "lora_B": (32, 6)}, r"expected shape \[8, 24\], found \[6, 24\]"),
        (dense, (1, 2), {}, "its base, a qwen3, has no experts"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(on, layers, **changed)


def test_what_experts_cannot_be_is_refused() -> None:
    raw = json.loads(tiny_config(TINY_FAMILIES["qwen3_moe"]).to_json_string(use_diff=False))
    raw |= {"architectures": ["Qwen3MoeForSequenceClassification"]}
    for change, message in (
        ({"num_experts_per_tok": 7}, r"'num_experts_per_tok': expected at most the number of experts \(6\), found 7"),
        ({"num_experts": 5, "num_local_experts": 6}, r"'num_local_experts': expected the same as num_experts \(5\)"),
        ({"mlp_only_layers": [3]}, r"'mlp_only_layers': expected a list of numbers from 0 to 2, found \[3\]"),
        ({"mlp_only_layers": [0, 1, 2]}, r"'mlp_only_layers': expected at least one layer with experts"),
        ({"decoder_sparse_step": 4}, r"'decoder_sparse_step': expected at least one layer with experts, found 4"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            parse_config(raw | change, where="c")
    raw |= {"model_type": "qwen2_moe", "architectures": None, "use_sliding_window": True}
    with pytest.raises(CheckpointError, match="'use_sliding_window': expected false, as sliding windows"):
        parse_config(raw, where="c")
