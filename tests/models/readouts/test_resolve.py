"""How a folder's read-out is found, and what is refused with which remedy."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prb_jax.errors import CheckpointError
from prb_jax.models.checkpoints.load import inspect_checkpoint
from prb_jax.models.checkpoints.locate import fingerprint
from prb_jax.models.readouts.open_model import resolve_model
from prb_jax.models.readouts.recognise import class_names
from prb_jax.models.readouts.registry import REGISTRY, ROWS
from tests.models.readouts.checkpoints import case_of
from tests.parity.reward_models import write_case


def write(row: str, root: Path) -> Path:
    return write_case(case_of(row), root)[0]


def edit(folder: Path, *, drop: tuple[str, ...] = (), put: dict[str, Any] | None = None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = {k: v for k, v in tensors.items() if not any(fnmatch.fnmatch(k, name) for name in drop)}
    save_file({**tensors, **(put or {})}, path, metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        resolve_model(folder, **options)


def test_names_are_unique() -> None:
    assert len(ROWS) == len(REGISTRY)


def test_side_files_are_fetched_and_fingerprinted(tmp_path: Path) -> None:
    for row in REGISTRY:
        for name, _ in row.layout.side_files:
            (tmp_path / name).write_bytes(name.encode())
            assert name in fingerprint(tmp_path)


def test_classes_of_remote_code_count_and_are_never_imported(tmp_path: Path) -> None:
    raw = {
        "architectures": ["A"],
        "auto_map": {"AutoConfig": "configuration_x.B", "AutoModel": ["org/repo--modeling_x.C", None]},
    }
    assert class_names(raw) == {"A", "B", "C"}
    assert class_names({"architectures": None}) == frozenset()
    folder = write("eurus", tmp_path)
    configure(folder, architectures=None)
    assert resolve_model(folder).row.name == "eurus"


@pytest.mark.parametrize(
    ("row", "tensor", "message"),
    [
        ("inf-orm", "score.2.*", r"'score\.0\.weight', the last of 'score': expected 1 outputs, found 32"),
        ("qwen2-rm", "score.0.weight", r"'score\.0\.weight' of the read-out 'qwen2-rm' is missing"),
        ("athene", "v_head.weight", r"'v_head\.weight' of the read-out 'athene' is missing .* random: get the whole"),
        ("grm-sftreg", "v_head.summary.2.weight", r"'v_head\.summary\.2\.weight' of .* 'grm-sftreg' is missing"),
        ("nemotron-vocabulary", "lm_head.weight", r"reads rows of 'lm_head\.weight', which is missing"),
        ("urm", "weights.fc.4.*", r"'weights\.fc\.2\.weight', .*expected 5 outputs, found 32"),
        ("armorm", "gating.layers.3.*", r"'gating\.layers\.2\.weight', .*expected 19 outputs, found 24"),
        ("qrm", "gating.layers.2.running_var", r"'gating\.layers\.2\.running_var' of the read-out 'qrm' is missing"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_whole(row: str, tensor: str, message: str, tmp_path: Path) -> None:
    folder = write(row, tmp_path)
    edit(folder, drop=(tensor,))
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_model(folder, name=str(folder))
    assert str(folder) in str(caught.value)


def test_side_files_that_are_not_there(tmp_path: Path) -> None:
    folder = write("value-head", tmp_path / "value")
    (folder / "value_head.safetensors").unlink()
    refused(folder, r"'Qwen2ForCausalLM' is a causal.*TRL, the file value_head\.safetensors or .* missing")
    folder = write("ldl", tmp_path / "ldl")
    (folder / "gating_layer.pt").unlink()
    refused(folder, r"By its tensors .* row 'ldl', .* \(in gating_layer\.pt\) are not all")
    (folder / "regression_layer.pt").unlink()
    refused(folder, "unknown architecture 'LDLRew")
    named = "ShikaiChen/LDL-Reward-Gemma-2-27B-v0.1"
    refused(folder, r"row 'ldl', .*\(in regression_layer\.pt, gating_layer\.pt\)", name=named)


def test_config_and_head_must_agree(tmp_path: Path) -> None:
    folder = write("athene", tmp_path / "several")
    edit(folder, put={"v_head.weight": np.ones((2, 32), np.float32)})
    refused(folder, r"'v_head\.weight' .*: expected shape \[1, 32\], found \[2, 32\]")
    edit(folder, put={name: np.ones((1, 32), np.float32) for name in ("v_head.weight", "extra_head.weight")})
    with pytest.raises(CheckpointError, match=r"1 that llama has no place for: 'extra_head\.weight'"):
        inspect_checkpoint(folder, resolve_model(folder).config)
    folder = write("grm-sftreg", tmp_path / "grm")
    configure(folder, vhead_num_layers=2)
    refused(folder, "has 1 hidden layers, but config.json says vhead_num_layers=2")
    folder = write("qrm", tmp_path / "qrm")
    configure(folder, num_quantiles=4)
    refused(folder, "95 outputs: expected a multiple of the 4 numbers")


def test_a_head_of_its_own_goes_before_one_beside_it(tmp_path: Path) -> None:
    folder = write("skywork-v2", tmp_path)
    save_file({"v_head.summary.weight": np.ones((1, 32), np.float32)}, folder / "value_head.safetensors")
    resolved = resolve_model(folder, name=str(folder))
    assert resolved.row.name == "skywork-v2"
    assert inspect_checkpoint(folder, resolved.config).head == "score.weight [1, 32] F32"


def test_named_read_outs(tmp_path: Path) -> None:
    folder = write("nemotron-vocabulary", tmp_path)
    moved = folder.rename(tmp_path / "elsewhere")
    refused(moved, "causal language model.*--readout vocabulary:ID", name=str(moved))
    assert resolve_model(moved, readout="nemotron-vocabulary").config.head.tokens == (0,)  # pyright: ignore
    assert resolve_model(moved, readout="vocabulary:3,9").config.head.tokens == (3, 9)  # pyright: ignore
    hub = resolve_model(moved, name="nvidia/Llama-3.1-Nemotron-70B-Reward-HF")
    assert hub.row.name == "nemotron-vocabulary"
    refused(moved, r"reads rows \[9999\], but 'lm_head\.weight' has 256", readout="vocabulary:9999")
    refused(moved, "unknown readout 'mean': expected one of logit, .*armorm", readout="mean")
    # a tied vocabulary
    edit(moved, drop=("lm_head.weight",))
    configure(moved, tie_word_embeddings=True)
    tied = resolve_model(moved, readout="nemotron-vocabulary")
    assert inspect_checkpoint(moved, tied.config).head == "model.embed_tokens.weight [256, 32] F32"


def test_an_unknown_class_says_how_to_go_on(tmp_path: Path) -> None:
    folder = write("openrlhf", tmp_path)
    configure(folder, architectures=["LlamaForMyReward"])
    refused(folder, "unknown architecture 'LlamaForMyReward'.*name the row with --readout")
    resolved = resolve_model(folder, readout="openrlhf")
    assert inspect_checkpoint(folder, resolved.config).head == "value_head.weight [1, 32] F32"


def test_the_docs_list_every_row_with_its_models() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "open_reward_models.md"
    text = page.read_text(encoding="utf-8")
    for row in REGISTRY:
        assert f"| `{row.name}` | {', '.join(row.models)} | " in text


def test_a_way_to_put_steps_together_that_there_is_not(tmp_path: Path) -> None:
    folder = write("qwen2-prm", tmp_path)
    ways = "over the steps of a response is one of qwen2-prm:product, qwen2-prm:min, .*:mean"
    refused(folder, ways, readout="qwen2-prm:median")
    refused(folder, "'armorm' does not score steps", readout="armorm:min")
    refused(folder, "unknown readout 'steps:min': expected one of .*qwen2-prm:min", readout="steps:min")


@pytest.mark.parametrize(
    ("row", "name", "value", "expected"),
    [
        *(("linear", "model_type", value, "a string") for value in ([], {}, 5, ["llama"])),
        *(("linear", "architectures", value, "a list of class names") for value in (5, "A", {"a": 1}, [[]])),
        *(("linear", "auto_map", value, "an object") for value in (5, "A", [])),
        *(("linear", "rope_scaling", value, "an object") for value in (5, "A")),
        *(("linear", "image_token_id", value, "an integer") for value in ([], "5", 1.5)),
        *(("internlm2", "rope_scaling", value, "an object") for value in (5, ["x"])),
        *(
            ("internlm2", "reward_token_id", value, "an integer of at least 0")
            for value in ([], "5", -1, 1 << 40)
        ),
        *(("qrm", "gating_temperature", value, "a number above 0") for value in ([], "5", 0)),
        *(("ldl", "softmax", value, "true or false") for value in ([1], "no", 1)),
    ],
)
def test_fields_of_other_types_are_named(
    tmp_path: Path, row: str, name: str, value: Any, expected: str
) -> None:
    folder = write(row, tmp_path)
    configure(folder, **{name: value})
    with pytest.raises(CheckpointError, match=f"config.json: field '{name}': expected {expected}"):
        _ = resolve_model(folder).text
