"""Saving: bit-for-bit round trips, files that transformers reads, and refusals."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.load import load_params
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import DecoderConfig, load_config
from tests.tiny_models import FAMILIES, write_tiny_model


def read_all(folder: Path) -> dict[str, np.ndarray]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, DecoderConfig, dict[str, Any]]:
    """A folder, its configuration and its parameters."""
    source = write_tiny_model(tmp_path / "source", "llama")
    config = load_config(source)
    return source, config, load_params(source, config).params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bitwise(family: str, dtype: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", family, dtype=dtype, num_labels=2)
    config = load_config(source)
    params, _ = load_params(source, config, dtype=dtype)
    target = save_params(params, config, tmp_path / "target")
    first, second = read_all(source), read_all(target)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert value.tobytes() == second[name].tobytes(), name
    assert load_config(target) == config
    written, given = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    assert written == given


@pytest.mark.parametrize("max_shard_bytes", [10**9, 50_000])
def test_transformers_reads_what_is_saved(max_shard_bytes: int, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    source = write_tiny_model(tmp_path / "source", "gemma3")
    config = load_config(source)
    params = load_params(source, config).params
    target = save_params(params, config, tmp_path / "target", max_shard_bytes=max_shard_bytes)
    names = sorted(path.name for path in target.iterdir())
    if max_shard_bytes == 10**9:
        assert names == ["config.json", "model.safetensors"]
    else:
        assert "model.safetensors.index.json" in names
        assert len(names) > 6
    with safe_open(next(target.glob("*.safetensors")), framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    models = [AutoModelForSequenceClassification.from_pretrained(folder) for folder in (source, target)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(models[0](input_ids=ids).logits, models[1](input_ids=ids).logits)
    again, _ = load_params(target, load_config(target))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_dtype_in_the_file_follows_the_parameters(llama: Any, tmp_path: Path) -> None:
    source, config, _ = llama
    params, _ = load_params(source, config, dtype=jnp.bfloat16, head_dtype=jnp.float32)
    target = save_params(params, config, tmp_path / "target")
    assert load_config(target).torch_dtype == "bfloat16"
    assert load_params(target, config).report.dtypes == {"BF16": 29, "F32": 1}


def test_a_raw_config_of_a_causal_model_becomes_a_reward_model(llama: Any, tmp_path: Path) -> None:
    _, config, params = llama
    raw = config.original | {"architectures": ["LlamaForCausalLM"]}
    target = save_params(params, config, tmp_path / "target", raw_config=raw)
    assert load_config(target).architectures == ("LlamaForSequenceClassification",)
    assert raw["architectures"] == ["LlamaForCausalLM"]


def test_refusals(llama: Any, tmp_path: Path) -> None:
    source, config, params = llama

    def refused(
        message: str, tree: Any = params, place: Path = tmp_path / "target", **arguments: Any
    ) -> None:
        with pytest.raises(CheckpointError, match=message):
            save_params(tree, config, place, **arguments)

    refused("already contains weights", place=source)
    refused("describes another model", raw_config=config.original | {"num_hidden_layers": 4})
    refused("differ in score", {key: value for key, value in params.items() if key != "score"})
    refused(r"'score': expected shape \[64, 1\], found \[64, 2\]", params | {"score": jnp.ones((64, 2))})
    refused("'score': expected one of .* int32", params | {"score": jnp.ones((64, 1), jnp.int32)})
    (tmp_path / "file").write_text("")
    refused("cannot be written", place=tmp_path / "file" / "folder")
    assert not (tmp_path / "target").exists()


def test_a_failed_write_leaves_no_file_that_looks_whole(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, config, params = llama

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        save_params(params, config, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
